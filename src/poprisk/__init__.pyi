from poprisk._core.estimate import Estimate as Estimate
from poprisk.operators import DissipationChannels as DissipationChannels
from poprisk.operators import DriftDiffusion as DriftDiffusion
from poprisk.operators import ErrorCells as ErrorCells
from poprisk.operators import Window as Window
from poprisk.operators import cross_kernel as cross_kernel
from poprisk.operators import dissipation_channels as dissipation_channels
from poprisk.operators import drift_diffusion as drift_diffusion
from poprisk.operators import error_cells as error_cells
from poprisk.operators import train_kernel as train_kernel
from poprisk.optim import MicrobatchVariance as MicrobatchVariance
from poprisk.optim import PerExampleVariance as PerExampleVariance
from poprisk.optim import PopRiskAdamW as PopRiskAdamW
from poprisk.optim import PopulationProjectorDescent as PopulationProjectorDescent
from poprisk.optim import RankVariance as RankVariance
from poprisk.optim import suggest_lr as suggest_lr
from poprisk.report import Analysis as Analysis
from poprisk.report import CleanTargets as CleanTargets
from poprisk.report import analyze as analyze
from poprisk.report import write_report as write_report
from poprisk.risk import AuditTable as AuditTable
from poprisk.risk import RiskEstimate as RiskEstimate
from poprisk.risk import RiskMeter as RiskMeter
from poprisk.risk import audit as audit
from poprisk.risk import influence_matrix as influence_matrix
from poprisk.risk import influence_on as influence_on
from poprisk.risk import k_fold as k_fold
from poprisk.risk import leave_one_out as leave_one_out
from poprisk.risk import population_risk as population_risk
from poprisk.risk import self_influence as self_influence
from poprisk.runs import Problem as Problem
from poprisk.runs import Recorder as Recorder
from poprisk.runs import Run as Run
from poprisk.runs import replay as replay
from poprisk.runs import train as train

__all__: list[str]
__version__: str
