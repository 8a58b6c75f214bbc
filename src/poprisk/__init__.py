"""Train on population risk instead of training loss, and know what a training run learned, memorized and cannot see.

Public names are imported on first use (PEP 562), so that ``import poprisk`` costs nothing beyond its parts.
"""

from importlib import import_module
from typing import Any

_ROOMS = {
    "PopRiskAdamW": "poprisk.optim",
    "PopulationProjectorDescent": "poprisk.optim",
    "calibrated_alpha": "poprisk.rules",
    "hard_gate": "poprisk.rules",
    "loo_coefficient": "poprisk.rules",
    "snr_gate": "poprisk.rules",
    "soft_gate": "poprisk.rules",
    "MicrobatchVariance": "poprisk.population",
    "PerExampleVariance": "poprisk.population",
    "one_step_loo_risk": "poprisk.population",
    "population_projector": "poprisk.population",
    "population_rate": "poprisk.population",
    "rate_matrix": "poprisk.population",
}
__all__ = sorted(_ROOMS)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'poprisk' has no attribute {name!r}")
    return getattr(import_module(_ROOMS[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
