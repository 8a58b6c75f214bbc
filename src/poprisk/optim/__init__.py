"""Train: PopRiskAdamW and its gates, averaged weights, the held-back choice among them, and gradient variances."""

from importlib import import_module
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
    "poprisk._core.autodiff": ("FlatModel",),
    "poprisk.optim._estimators.loo": ("one_step_loo_risk",),
    "poprisk.optim._estimators.ranks": ("RankVariance",),
    "poprisk.optim._estimators.rate": ("population_projector", "population_rate", "rate_matrix"),
    "poprisk.optim._estimators.variance": ("MicrobatchVariance", "PerExampleVariance"),
    "poprisk.optim._evaluation": ("evaluating",),
    "poprisk.optim._example_losses": ("ExampleLosses", "Loss", "field"),
    "poprisk.optim._held_block": ("HeldBlock",),
    "poprisk.optim._held_curve": ("Metric", "Moment", "calibrated", "held_error"),
    "poprisk.optim._hold_back": ("hold_back",),
    "poprisk.optim._keep_best": ("KeepBest",),
    "poprisk.optim._kept_risk": ("KeptRisk",),
    "poprisk.optim._kept_weights": ("witness_kept",),
    "poprisk.optim._last_features": ("LastFeatures",),
    "poprisk.optim._projector_descent": ("PopulationProjectorDescent",),
    "poprisk.optim._tail_average": ("TailAverage",),
}


def __getattr__(name: str) -> Any:
    module = next((module for module, names in _LAZY.items() if name in names), None)
    return _moved.facade_attribute(__name__, name) if module is None else getattr(import_module(module), name)
