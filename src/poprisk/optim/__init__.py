"""Train: PopRiskAdamW and its gates, averaged weights, the held-back choice among them, and gradient variances."""

from typing import TYPE_CHECKING, Any

from poprisk import _moved
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._gate import Gate
from poprisk.optim._learning_rate import suggest_lr
from poprisk.optim.rules._gates import hard_gate, snr_gate, soft_gate
from poprisk.optim.rules._threshold import calibrated_alpha, loo_coefficient

# isort: split
# For the rooms above: not public, and not in __all__.
from poprisk.optim._defaults import DEFAULTS
from poprisk.optim._diagnostics import GateDiagnostics, meters, over_all
from poprisk.optim._gate import join_gate
from poprisk.optim._parsing import parse_options, read_options
from poprisk.optim._updates import ParamUpdate, hyper_of, number, rule_state, was_stepped
from poprisk.optim.rules._adam import adam_options, adam_step, linearize_adam
from poprisk.optim.rules._coefficients import Granularity, Hyper, Signal, advance, current
from poprisk.optim.rules._gates import GateName
from poprisk.optim.rules._population import (
    PopulationState,
    current_gate,
    debiased_variance,
    is_usable,
    linearize,
    population_step,
)
from poprisk.optim.rules._relative import first_scale
from poprisk.optim.rules._sgd import linearize_sgd, sgd_options, sgd_step
from poprisk.optim.rules._threshold import Centering

if TYPE_CHECKING:
    from poprisk._core.autodiff import FlatModel
    from poprisk.optim._estimators.loo import one_step_loo_risk
    from poprisk.optim._estimators.ranks import RankVariance
    from poprisk.optim._estimators.rate import population_projector, population_rate, rate_matrix
    from poprisk.optim._estimators.variance import MicrobatchVariance, PerExampleVariance
    from poprisk.optim._evaluation import evaluating
    from poprisk.optim._example_losses import ExampleLosses, Loss, field
    from poprisk.optim._held_block import HeldBlock
    from poprisk.optim._held_curve import Metric, Moment, calibrated, held_error
    from poprisk.optim._hold_back import hold_back
    from poprisk.optim._keep_best import KeepBest
    from poprisk.optim._kept_risk import KeptRisk
    from poprisk.optim._kept_weights import witness_kept
    from poprisk.optim._last_features import LastFeatures
    from poprisk.optim._projector_descent import PopulationProjectorDescent
    from poprisk.optim._tail_average import TailAverage

__all__ = [
    "FlatModel", "Gate", "KeepBest", "KeptRisk", "MicrobatchVariance", "PerExampleVariance", "PopRiskAdamW",
    "PopulationProjectorDescent", "RankVariance", "TailAverage", "calibrated_alpha", "hard_gate", "hold_back",
    "loo_coefficient", "one_step_loo_risk", "population_projector", "population_rate", "rate_matrix", "snr_gate",
    "soft_gate", "suggest_lr",
]  # fmt: skip

# Few need these, and they bring derivatives, linear algebra or torch.distributed along.
_LAZY = {
    "FlatModel": "poprisk._core.autodiff",
    "MicrobatchVariance": "poprisk.optim._estimators.variance",
    "PerExampleVariance": "poprisk.optim._estimators.variance",
    "one_step_loo_risk": "poprisk.optim._estimators.loo",
    "population_projector": "poprisk.optim._estimators.rate",
    "population_rate": "poprisk.optim._estimators.rate",
    "rate_matrix": "poprisk.optim._estimators.rate",
    "PopulationProjectorDescent": "poprisk.optim._projector_descent",
    "RankVariance": "poprisk.optim._estimators.ranks",
    "KeepBest": "poprisk.optim._keep_best",
    "KeptRisk": "poprisk.optim._kept_risk",
    "TailAverage": "poprisk.optim._tail_average",
    "hold_back": "poprisk.optim._hold_back",
    # For the rooms above: not public, and not in __all__.
    "ExampleLosses": "poprisk.optim._example_losses",
    "HeldBlock": "poprisk.optim._held_block",
    "LastFeatures": "poprisk.optim._last_features",
    "Loss": "poprisk.optim._example_losses",
    "Metric": "poprisk.optim._held_curve",
    "Moment": "poprisk.optim._held_curve",
    "calibrated": "poprisk.optim._held_curve",
    "evaluating": "poprisk.optim._evaluation",
    "field": "poprisk.optim._example_losses",
    "held_error": "poprisk.optim._held_curve",
    "witness_kept": "poprisk.optim._kept_weights",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        return _moved.facade_attribute(__name__, name)
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
