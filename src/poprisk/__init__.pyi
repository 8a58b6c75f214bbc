from poprisk.estimate import Estimate as Estimate
from poprisk.influence import RiskMeter as RiskMeter
from poprisk.influence import influence_matrix as influence_matrix
from poprisk.influence import influence_on as influence_on
from poprisk.influence import population_risk as population_risk
from poprisk.operators import Window as Window
from poprisk.optim import PopRiskAdamW as PopRiskAdamW
from poprisk.optim import PopulationProjectorDescent as PopulationProjectorDescent
from poprisk.optim import suggest_lr as suggest_lr
from poprisk.population import MicrobatchVariance as MicrobatchVariance
from poprisk.population import PerExampleVariance as PerExampleVariance
from poprisk.population import one_step_loo_risk as one_step_loo_risk
from poprisk.population import population_projector as population_projector
from poprisk.population import population_rate as population_rate
from poprisk.population import rate_matrix as rate_matrix
from poprisk.problems import Problem as Problem
from poprisk.rules import calibrated_alpha as calibrated_alpha
from poprisk.rules import hard_gate as hard_gate
from poprisk.rules import loo_coefficient as loo_coefficient
from poprisk.rules import snr_gate as snr_gate
from poprisk.rules import soft_gate as soft_gate
from poprisk.runs import Recorder as Recorder
from poprisk.runs import Run as Run
from poprisk.runs import replay as replay
from poprisk.runs import train as train

__all__: list[str]
__version__: str
