"""Quasi-random trials: where in its search space each arm of a comparison is tried.

Every knob has a column of one scrambled Sobol sequence, by its name. So the k-th trial of two arms lies at the same
quantile of every knob they share, more trials only add to fewer, and nothing depends on the task or on the arm.
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
"""The knobs that can be searched and the dimension of the sequence each follows; a ``_gap`` is one minus the rate.

Of so few points some pairs of Sobol dimensions lie on a diagonal (correlations up to 0.9 of 8 or 16), which would make
a search over two knobs a search over one. Scrambling and dimensions were chosen once, from the points alone and from no
training, so that knobs of one arm are little correlated at 6 to 32 trials. A new knob takes a free dimension; the old
ones stay.
"""

_DIMENSIONS = 64  # drawn whether used or not: the scrambling depends on their number
_SCRAMBLING = 12631
_DIGITS = 3


@dataclass(frozen=True)
class Range:
    """The values a knob is searched over, evenly in its logarithm or evenly as it is.

    Raises:
        HyperparameterError: the range is empty or not finite, or logarithmic and not positive.
    """

    low: float
    high: float
    log: bool = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise HyperparameterError(f"a range needs finite low < high, got {self.low} and {self.high}")
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
        seed: Another one gives other points, without the care taken over correlations.

    Returns:
        One dictionary of values a trial. With the same seed the first 8 of 24 are the 8 of 8.

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
        raise HyperparameterError(f"cannot search {', '.join(unknown)}; knobs with a column: {', '.join(COLUMNS)}")
    if count < 1:
        raise HyperparameterError(f"a search needs at least one trial, got {count}")
    if not searched:
        return [{}]
    import numpy as np
    from scipy.stats import qmc  # slow to import

    generator = np.random.default_rng([_SCRAMBLING, seed])
    # the newer name of this argument is not known to scipy before 1.15
    sobol = qmc.Sobol(_DIMENSIONS, scramble=True, seed=generator)  # pyright: ignore[reportCallIssue]
    points = sobol.random_base2(math.ceil(math.log2(count)))[:count]
    return [{name: span.at(float(point[COLUMNS[name]])) for name, span in searched.items()} for point in points]
