"""Quasi-random trials: the points of its search space at which each arm of a comparison is tried.

Every knob has its own column of one scrambled Sobol sequence. The k-th trials of two arms therefore lie at the same
quantile of every knob they share, a larger search contains the smaller one, and no point depends on the task or arm.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from poprisk.errors import HyperparameterError

COLUMNS: dict[str, int] = {
    "lr": 0,
    "weight_decay": 1,
    "beta2_gap": 2,
    "strength": 7,
    "rho_gap": 44,
    "alpha": 57,
    "lamb": 33,
    "alpha_ema_gap": 62,
    "beta1_gap": 8,
    "eps": 41,
    "lr_warmup": 14,
    "gate_warmup": 12,
}
"""The knobs that can be searched and the dimension of the sequence that each uses; a ``_gap`` is one minus the rate.

With so few points, some pairs of Sobol dimensions are strongly correlated (up to 0.9 for 8 or 16 points), so that a
search over two knobs would be a search over one. The scrambling and the dimensions were chosen once, from the points
alone and without any training, so that the knobs of an arm are nearly uncorrelated for 6 to 32 trials. A new knob takes
an unused dimension; the others do not change.
"""

_DIMENSIONS = 64  # all are drawn, used or not, because the scrambling depends on their number
_SCRAMBLING = 12631
_DIGITS = 3


@dataclass(frozen=True)
class Range:
    """The range over which a knob is searched, uniformly in its logarithm or in its value.

    Raises:
        HyperparameterError: the range is empty or not finite, or logarithmic and not positive.
    """

    low: float
    high: float
    log: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise HyperparameterError(f"a range needs finite bounds low < high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise HyperparameterError(f"a logarithmic range needs low > 0, got {self.low}: raise it, or give log=False")

    def at(self, quantile: float) -> float:
        """The value at a quantile, to three significant digits and within the range.

        >>> Range(1e-4, 1e-2).at(0.5), Range(0.0, 1.0, log=False).at(0.33333)
        (0.001, 0.333)
        """
        if self.log:
            value = math.exp(math.log(self.low) + quantile * (math.log(self.high) - math.log(self.low)))
        else:
            value = self.low + quantile * (self.high - self.low)
        return min(max(float(f"{value:.{_DIGITS - 1}e}"), self.low), self.high)


def trials(searched: Mapping[str, Range], count: int, seed: int = 0) -> list[dict[str, float]]:
    """The first ``count`` trials over these ranges; one empty trial for an arm that has nothing to search.

    Args:
        searched: Range of each knob.
        count: Number of trials; a power of two covers every range evenly.
        seed: Seed of the sequence; only the points of the default were checked for correlations.

    Returns:
        One dictionary of values per trial. With the same seed, the first 8 of 24 trials are the trials of ``count=8``.

    Raises:
        HyperparameterError: a knob has no column, or count is not positive.

    >>> for trial in trials({"lr": Range(1e-4, 1e-2), "weight_decay": Range(1e-3, 1.0)}, 4):
    ...     print(trial)
    {'lr': 0.00264, 'weight_decay': 0.00107}
    {'lr': 0.00025, 'weight_decay': 0.0519}
    {'lr': 0.000944, 'weight_decay': 0.0102}
    {'lr': 0.0093, 'weight_decay': 0.215}
    """
    unknown = [name for name in searched if name not in COLUMNS]
    if unknown:
        raise HyperparameterError(f"cannot search {', '.join(unknown)}; choose from {', '.join(COLUMNS)}")
    if count < 1:
        raise HyperparameterError(f"a search needs at least one trial, got {count}")
    if not searched:
        return [{}]
    import numpy as np
    from scipy.stats import qmc  # slow to import

    generator = np.random.default_rng([_SCRAMBLING, seed])
    # scipy before 1.15 does not know the newer name of this argument
    sobol = qmc.Sobol(_DIMENSIONS, scramble=True, seed=generator)  # pyright: ignore[reportCallIssue]
    points = sobol.random_base2(math.ceil(math.log2(count)))[:count]
    return [{name: span.at(float(point[COLUMNS[name]])) for name, span in searched.items()} for point in points]
