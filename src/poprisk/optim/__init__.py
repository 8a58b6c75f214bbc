"""Optimizers that descend population risk."""

from typing import TYPE_CHECKING, Any

from poprisk.optim.adamw import PopRiskAdamW as PopRiskAdamW
from poprisk.optim.defaults import DEFAULTS as DEFAULTS
from poprisk.optim.defaults import PAPER as PAPER
from poprisk.optim.defaults import Defaults as Defaults
from poprisk.optim.learning_rate import suggest_lr as suggest_lr

if TYPE_CHECKING:
    from poprisk.optim.projector import PopulationProjectorDescent as PopulationProjectorDescent


def __getattr__(name: str) -> Any:
    if name == "PopulationProjectorDescent":  # few need it, and it brings linear algebra along
        from poprisk.optim.projector import PopulationProjectorDescent

        return PopulationProjectorDescent
    raise AttributeError(f"module 'poprisk.optim' has no attribute {name!r}")
