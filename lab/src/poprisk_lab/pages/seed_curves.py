"""Curves of several seeds on a figure: their mean, and the range between the lowest and the highest of them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def mean_and_range(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Mean, lowest and highest over the seeds, place by place; NaN from where one of them is not finite.

    A mean over the seeds that are left would look better the more of them diverge.

    >>> mean_and_range([[1.0, 2.0], [3.0, math.nan]])
    ([2.0, nan], [1.0, nan], [3.0, nan])
    """
    places = [list(values) for values in zip(*curves, strict=True)]
    whole = [all(math.isfinite(value) for value in values) for values in places]
    mean = [math.fsum(values) / len(values) if w else math.nan for values, w in zip(places, whole, strict=True)]
    low = [min(values) if w else math.nan for values, w in zip(places, whole, strict=True)]
    high = [max(values) if w else math.nan for values, w in zip(places, whole, strict=True)]
    return mean, low, high


def draw_seeds(
    axes: "Axes", steps: Sequence[float], curves: Sequence[Sequence[float]], label: str, color: str, **style: Any
) -> None:
    """The mean as a line, the range as a band behind it."""
    draw_band(axes, steps, *mean_and_range(curves), label=label, color=color, **style)


def draw_band(
    axes: "Axes",
    steps: Sequence[float],
    mean: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    *,
    label: str,
    color: str,
    **style: Any,
) -> None:
    """The same from a mean and a range that are known already."""
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axes.plot(steps, mean, color=color, label=label, **style)


def thinned(steps: Sequence[int], values: Sequence[float], places: int) -> tuple[list[float], list[float]]:
    """A curve over a logarithmic axis with the mean of each of so many stretches of equal length: jitter is averaged.

    >>> thinned([1, 2, 50, 100], [0.0, 1.0, 3.0, 5.0], 2)
    ([1.5, 75.0], [0.5, 4.0])
    """
    first, last = math.log(steps[0]), math.log(steps[-1])
    kept: dict[int, list[tuple[float, float]]] = {}
    for step, value in zip(steps, values, strict=True):
        share = (math.log(step) - first) / (last - first) if last > first else 0.0
        kept.setdefault(min(places - 1, int(places * share)), []).append((step, value))
    means = [tuple(math.fsum(column) / len(group) for column in zip(*group, strict=True)) for group in kept.values()]
    return [step for step, _ in means], [value for _, value in means]
