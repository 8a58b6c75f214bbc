"""Bootstrap intervals of paired differences, and times to a target over seeds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from poprisk._core.statistics import Difference, mean_over_seeds
from poprisk.errors import DataError

_ENUMERATED_PAIRS = 5  # 5^5 = 3125 resamples are fewer than would be drawn


def bootstrap_difference(
    first: Sequence[float],
    second: Sequence[float],
    confidence: float = 0.95,
    resamples: int = 10_000,
    seed: int = 0,
) -> Difference:
    r"""The mean of first - second, pair by pair, and the percentile-bootstrap interval around it.

    Pairs are drawn with replacement, and the interval runs between the :math:`(1 \mp c)/2` quantiles of the resampled
    means, outwards where a quantile falls between two. Up to five pairs all :math:`n^n` resamples are taken once, so
    that nothing is random.

    Few pairs make it too narrow: it cannot reach beyond the smallest and largest difference, and with five pairs of
    normal differences a nominal 95% covers the truth about 84% of the time. Give :func:`paired_difference`, whose
    Student-t interval covers what it says for normal differences, beside it.

    Args:
        first: One value a seed.
        second: The values it is compared with, seed by seed.
        confidence: Nominal coverage.
        resamples: How many are drawn when there are more than five pairs.
        seed: Of the draw.

    Raises:
        DataError: the lists differ in length, are empty or not finite, or a setting is out of range.

    >>> d = bootstrap_difference([1.0, 2.0, 4.0], [0.0, 1.0, 2.0])
    >>> round(d.value, 3), d.low, d.high, d.verdict
    (1.333, 1.0, 2.0, 'above')
    """
    if len(first) != len(second):
        raise DataError(f"pairs need two lists of one length, got {len(first)} and {len(second)} values")
    if not 0 < confidence < 1 or resamples < 1:
        raise DataError(
            f"a bootstrap needs 0 < confidence < 1 and at least one resample, got {confidence} and {resamples}"
        )
    differences = [a - b for a, b in zip(first, second, strict=True)]
    if not all(math.isfinite(x) for x in differences):
        raise DataError(
            f"a bootstrap needs finite values, got differences {differences}: leave failed pairs out, and say so"
        )
    mean = mean_over_seeds(differences)
    if mean.count == 1:
        return Difference(mean.value, None, None, confidence, 1)
    import numpy as np

    count = mean.count
    if count <= _ENUMERATED_PAIRS:
        drawn = np.indices((count,) * count).reshape(count, -1).T
    else:
        drawn = np.random.default_rng(seed).integers(count, size=(resamples, count))
    means = np.asarray(differences)[drawn].mean(axis=1)
    low = float(np.quantile(means, (1 - confidence) / 2, method="lower"))
    high = float(np.quantile(means, (1 + confidence) / 2, method="higher"))
    return Difference(mean.value, low, high, confidence, count)


@dataclass(frozen=True)
class MedianSteps:
    """Median time to a target over seeds; ``value`` is None where the median seed never gets there."""

    value: float | None
    reached: int
    count: int

    def __str__(self) -> str:
        words = f"{self.reached} of {self.count} reached"
        return f"not reached ({words})" if self.value is None else f"{self.value:g} ({words})"


def first_step_reaching(
    curve: Sequence[float | None], steps: Sequence[int], target: float, higher_is_better: bool
) -> int | None:
    """The first evaluated step at which the curve is at the target or beyond it; None if there is none.

    Entries that are None or NaN (a member that failed) reach nothing.

    Raises:
        DataError: curve and steps differ in length.

    >>> first_step_reaching([0.5, None, 0.9, 0.8], [10, 20, 30, 40], target=0.8, higher_is_better=True)
    30
    """
    if len(curve) != len(steps):
        raise DataError(f"a curve needs one value a step, got {len(curve)} values and {len(steps)} steps")
    for step, value in zip(steps, curve, strict=True):
        if value is not None and (value >= target if higher_is_better else value <= target):
            return step
    return None


def median_steps(first_steps: Sequence[int | None]) -> MedianSteps:
    """The median over seeds of what :func:`first_step_reaching` gave, a miss counting as infinitely late.

    Raises:
        DataError: there are no seeds.

    >>> print(median_steps([300, None, 100]), "|", median_steps([300, None]))
    300 (2 of 3 reached) | not reached (1 of 2 reached)
    """
    if not first_steps:
        raise DataError("a median over seeds needs at least one seed, got none")
    middle = median(math.inf if step is None else float(step) for step in first_steps)
    reached = sum(step is not None for step in first_steps)
    return MedianSteps(middle if math.isfinite(middle) else None, reached, len(first_steps))
