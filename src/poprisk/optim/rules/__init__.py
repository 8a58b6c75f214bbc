"""Update rules as pure functions, state to state: the one definition that optimizer, replay and ensembles share."""

from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import PopulationState, initial_state, linearize, population_step

__all__ = [
    "Hyper",
    "PopulationState",
    "initial_state",
    "linearize",
    "population_step",
]
