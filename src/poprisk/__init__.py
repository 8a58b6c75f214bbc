"""Train on population risk instead of training loss, and know what a training run learned, memorized and cannot see.

Public names are imported on first use (PEP 562), so that ``import poprisk`` costs nothing beyond its parts; the stub
beside this file tells the type checker where they live.
"""

import logging
from importlib import import_module
from typing import Any

_NAMES_BY_ROOM = {
    "poprisk.estimate": ("Estimate",),
    "poprisk.influence": ("RiskMeter", "influence_matrix", "influence_on", "population_risk"),
    "poprisk.operators": ("Window",),
    "poprisk.optim": ("PopRiskAdamW", "PopulationProjectorDescent", "suggest_lr"),
    "poprisk.population": (
        "MicrobatchVariance",
        "PerExampleVariance",
        "one_step_loo_risk",
        "population_projector",
        "population_rate",
        "rate_matrix",
    ),
    "poprisk.problems": ("Problem",),
    "poprisk.rules": ("calibrated_alpha", "hard_gate", "loo_coefficient", "snr_gate", "soft_gate"),
    "poprisk.runs": ("Recorder", "Run", "replay", "train"),
}
_ROOM_OF = {name: room for room, names in _NAMES_BY_ROOM.items() for name in names}
__version__ = "0.1.0"
logging.getLogger("poprisk").addHandler(logging.NullHandler())  # who listens is the application's choice


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_ROOM_OF)
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'poprisk' has no attribute {name!r}")
    return getattr(import_module(_ROOM_OF[name]), name)


def __dir__() -> list[str]:
    return [*sorted(_ROOM_OF), "__version__"]
