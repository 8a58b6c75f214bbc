"""Means and paired differences over seeds, with the uncertainty that few seeds leave."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from poprisk.errors import DataError


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and its standard error; with one seed there is no error to give."""

    value: float
    standard_error: float | None
    count: int


@dataclass(frozen=True)
class Difference:
    """A mean paired difference with an interval around it; with one pair there is no interval to give."""

    value: float
    low: float | None
    high: float | None
    confidence: float
    count: int

    @property
    def verdict(self) -> str:
        """``above``, ``below``, or ``unclear`` where the interval holds zero or does not exist."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return "unclear"
        return "above" if self.low > 0 else "below"


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """The mean and its standard error.

    >>> mean_over_seeds([1.0, 3.0])
    Mean(value=2.0, standard_error=1.0, count=2)
    """
    count = len(values)
    if count == 0:
        raise DataError("a mean over seeds needs at least one value, got none")
    mean = math.fsum(values) / count
    if count == 1:
        return Mean(mean, None, 1)
    variance = math.fsum((x - mean) ** 2 for x in values) / (count - 1)
    return Mean(mean, math.sqrt(variance / count), count)


def paired_difference(first: Sequence[float], second: Sequence[float], confidence: float = 0.95) -> Difference:
    """The mean of first - second, pair by pair, and the Student-t interval around it.

    >>> d = paired_difference([1.0, 2.0, 4.0], [0.0, 1.0, 2.0])
    >>> round(d.value, 3), round(d.low, 3), round(d.high, 3), d.verdict
    (1.333, -0.101, 2.768, 'unclear')
    """
    if len(first) != len(second):
        raise DataError(f"pairs need two lists of one length, got {len(first)} and {len(second)} values")
    mean = mean_over_seeds([a - b for a, b in zip(first, second, strict=True)])
    if mean.standard_error is None:
        return Difference(mean.value, None, None, confidence, mean.count)
    from scipy.stats import t  # slow to import, and needed only here

    reach = float(t.ppf((1 + confidence) / 2, mean.count - 1)) * mean.standard_error
    return Difference(mean.value, mean.value - reach, mean.value + reach, confidence, mean.count)
