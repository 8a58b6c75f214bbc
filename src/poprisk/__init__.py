"""Train on population risk instead of training loss, and know what a training run learned, memorized and cannot see.

Public names are imported on first use (PEP 562), so that ``import poprisk`` is quick; the stub next to this file tells
type checkers where they are defined.
"""

import logging
from importlib import import_module
from typing import Any

from poprisk import _moved
from poprisk._version import __version__ as __version__

_NAMES_BY_ROOM = {
    "poprisk._core.cluster": "cluster",
    "poprisk._core.estimate": "Estimate",
    "poprisk.operators": "DissipationChannels DriftDiffusion ErrorCells Window cross_kernel dissipation_channels "
    "drift_diffusion error_cells train_kernel",
    "poprisk.optim": "Gate KeepBest MicrobatchVariance PerExampleVariance PopRiskAdamW PopulationProjectorDescent "
    "RankVariance TailAverage hold_back suggest_lr",
    "poprisk.report": "Analysis CleanTargets analyze write_report",
    "poprisk.risk": "AuditTable RiskEstimate RiskMeter audit influence_matrix influence_on k_fold leave_one_out "
    "out_of_sample_probabilities population_risk self_influence",
    "poprisk.runs": "Problem Recorder Run refit replay train",
}
_ROOM_OF = {name: room for room, names in _NAMES_BY_ROOM.items() for name in names.split()}
logging.getLogger("poprisk").addHandler(logging.NullHandler())  # the application chooses the handlers
_moved.install()


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_ROOM_OF)
    if name in _ROOM_OF:
        return getattr(import_module(_ROOM_OF[name]), name)
    if name in _moved.ROOT_NAMES:
        return _moved.root_name(name)
    raise AttributeError(f"module 'poprisk' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*sorted(_ROOM_OF), "__version__"]
