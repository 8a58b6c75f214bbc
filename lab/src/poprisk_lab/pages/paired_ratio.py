"""How many times more one thing takes than another, paired by seed: a geometric mean with its interval and verdict."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from poprisk._core.statistics import paired_difference

LEAST_PAIRS = 3
"""Fewer seeds decide nothing about a ratio."""


@dataclass(frozen=True)
class Ratio:
    """A ratio of two lists, pair by pair.

    Attributes:
        value: Geometric mean of the first over the second.
        low: Lower end of the 95% interval; None for one pair.
        high: Its upper end.
        pairs: How many seeds.
        at_least: Whether some seeds of the first never arrived and count as if they had at the last step, so that
            value and low are lower bounds, and there is no upper one.
    """

    value: float
    low: float | None
    high: float | None
    pairs: int
    at_least: bool = False

    @property
    def words(self) -> str:
        """As in a sentence.

        >>> Ratio(1.2, 1.1, 1.32, 3).words, Ratio(3.0, 2.0, 9.0, 3, True).words, Ratio(3.0, None, None, 1).words
        ('1.2× [1.1, 1.3]', 'at least 3.0× [2.0, ∞]', '3.0×')
        """
        return f"{'at least ' if self.at_least else ''}{self.value:.1f}×{self.interval_words}"

    @property
    def interval_words(self) -> str:
        """The interval in brackets, after a space; nothing where there is none."""
        if self.low is None or self.high is None:
            return ""
        high = math.inf if self.at_least else self.high
        return f" [{self.low:.1f}, {'∞' if math.isinf(high) else f'{high:.1f}'}]"

    def verdict(self, bar: float) -> str:
        """``Held`` if the whole interval is at the bar or above it, ``Not held`` if all of it is below.

        >>> Ratio(6.0, 5.0, 7.2, 3).verdict(5), Ratio(6.0, 4.0, 9.0, 3).verdict(5), Ratio(2.0, 1.0, 4.0, 3).verdict(5)
        ('Held', 'Undecided', 'Not held')
        """
        if self.low is None or self.high is None or self.pairs < LEAST_PAIRS:
            return "Undecided"
        if self.low >= bar:
            return "Held"
        return "Not held" if self.high < bar and not self.at_least else "Undecided"

    @property
    def inverse(self) -> "Ratio":
        """The second over the first."""
        low, high = (None if end is None else (math.inf if end == 0 else 1 / end) for end in (self.high, self.low))
        return Ratio(1 / self.value, low, high, self.pairs)


def paired_ratio(first: Sequence[float], second: Sequence[float]) -> Ratio | None:
    """The first over the second, from Student's interval of the paired logarithms; None unless all are above 0.

    >>> found = paired_ratio([8.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    >>> round(found.value, 6), round(found.low, 2), round(found.high, 2)
    (4.0, 0.71, 22.38)
    >>> paired_ratio([8.0, float("nan")], [1.0, 1.0])
    """
    if not all(math.isfinite(value) and value > 0 for value in (*first, *second)):
        return None
    found = paired_difference([math.log(value) for value in first], [math.log(value) for value in second])
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Ratio(math.exp(found.value), low, high, found.count)


def looked_before(step: int, looks: Sequence[int]) -> int:
    """The evaluated step before this one: what happened at a step may have happened just after that.

    >>> looked_before(20, [10, 20, 30]), looked_before(10, [10, 20, 30])
    (10, 0)
    """
    place = bisect_left(looks, step)
    return looks[place - 1] if place else 0


def steps_ratio(slow: Sequence[int | None], fast: Sequence[int | None], looks: Sequence[int]) -> Ratio | None:
    r"""How many times fewer steps the second takes to arrive than the first, by seed.

    An arrival seen at one look came somewhere after the look before, so the interval is never narrower than what that
    leaves open: from the mean of :math:`\log (s^- / f)` to that of :math:`\log (s / f^-)`, where :math:`x^-` is the
    look before :math:`x`.

    Args:
        slow: Steps to the target by seed, None where it was never met: then the whole run counts, a lower bound.
        fast: The same seeds of what is said to be quicker.
        looks: The evaluated steps.

    Returns:
        None where the second did not always arrive.

    >>> steps_ratio([400, 400, 400], [100, 100, 100], [100, 200, 300, 400]).words
    '4.0× [3.0, ∞]'
    >>> steps_ratio([None, 300], [200, 100], [100, 200, 300, 400]).at_least
    True
    >>> steps_ratio([400, 200], [100, None], [100, 200, 300, 400])
    """
    there = [step for step in fast if step is not None]
    if len(there) < len(fast):
        return None
    capped = [looks[-1] if step is None else step for step in slow]
    earliest = [looks[-1] if step is None else looked_before(step, looks) for step in slow]
    found = paired_difference([math.log(step) for step in capped], [math.log(step) for step in there])
    low, high = found.low, found.high
    if low is not None and high is not None:
        low = min(low, _mean_log_ratio(earliest, there))
        high = max(high, _mean_log_ratio(capped, [looked_before(step, looks) for step in there]))
    low, high = (None if end is None else math.exp(end) for end in (low, high))
    return Ratio(math.exp(found.value), low, high, found.count, None in slow)


def _mean_log_ratio(above: Sequence[int], below: Sequence[int]) -> float:
    """Minus or plus infinity where a look before is the start of the run."""
    if 0 in above:
        return -math.inf
    if 0 in below:
        return math.inf
    return math.fsum(math.log(a / b) for a, b in zip(above, below, strict=True)) / len(above)
