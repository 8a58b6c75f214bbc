"""The risk of weights that were measured on held-back examples."""

import math
from dataclasses import dataclass

from poprisk._core.estimate import Estimate
from poprisk.optim._held_curve import FEWEST_HELD, Moment, held_error


@dataclass(frozen=True, eq=False)
class KeptRisk(Estimate):
    """The risk of the weights that :class:`KeepBest` kept, on new data as noisy as the training data."""

    step: int = 0
    """The number of steps after which they were kept. A training on all examples, the held-back ones included, stops
    after as many."""
    tail: float | None = None
    """The share of the steps that they are a mean of; None for the weights themselves."""
    accuracy: float = math.nan
    """Share of the held-back examples that they get right; NaN where targets are not classes."""
    measured: int = 0
    """Number of moments that were compared."""


def risk_at(moment: Moment, work: float) -> KeptRisk:
    """The risk of the weights of one moment, whatever was measured at others."""
    losses = moment.losses.double()
    count, value = len(losses), float(losses.mean())
    spread = float(losses.std()) / math.sqrt(count) if count > 1 else math.nan
    error = held_error(value, spread, float(losses.max()) / count, count)
    valid = count >= FEWEST_HELD and math.isfinite(error)
    reason = f"measured on {count} held-back examples after step {moment.step}"
    if not valid:
        error, reason = math.nan, f"{reason}: too few for an error, or a loss that is not finite"
    about = {"step": moment.step, "tail": moment.tail, "accuracy": accuracy_of(moment), "measured": 1}
    return KeptRisk(value, error, valid=valid, reason=reason, cost=work, **about)


def accuracy_of(moment: Moment) -> float:
    """Share of examples without an error, where scores are errors (0 or 1)."""
    return float(1 - moment.scores.double().mean()) if moment.counts_errors else math.nan
