"""Optimizers that descend population risk."""

from poprisk.optim.adamw import PopRiskAdamW as PopRiskAdamW
from poprisk.optim.defaults import DEFAULTS as DEFAULTS
from poprisk.optim.defaults import PAPER as PAPER
from poprisk.optim.defaults import Defaults as Defaults
from poprisk.optim.projector import PopulationProjectorDescent as PopulationProjectorDescent
