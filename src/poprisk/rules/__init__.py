"""Update rules as pure functions, state to state: the one definition that optimizer, replay and ensembles share."""

from poprisk.rules.coefficients import Hyper as Hyper
from poprisk.rules.gates import hard_gate as hard_gate
from poprisk.rules.gates import snr_gate as snr_gate
from poprisk.rules.gates import soft_gate as soft_gate
from poprisk.rules.population import PopulationState as PopulationState
from poprisk.rules.population import initial_state as initial_state
from poprisk.rules.population import linearize as linearize
from poprisk.rules.population import population_step as population_step
from poprisk.rules.threshold import calibrated_alpha as calibrated_alpha
from poprisk.rules.threshold import loo_coefficient as loo_coefficient
