r"""Estimate the number of wrong labels from the confident joint of predicted and given labels along the training.

Confident learning (Northcutt, Jiang and Chuang, 2021) counts an example with label j as one of class i if its
probability of i reaches :math:`t_i`, the mean probability of i over the examples labelled i; of several such classes,
the most probable one counts. Each row of this table is then scaled to the number of examples with its label, and the
sum of the off-diagonal entries is the estimated number of wrong labels.

The method is meant for probabilities from networks that have not seen the example. During training, a network first
learns what most examples have in common and finally memorizes the wrong labels too. The count therefore falls while the
network learns, levels off, and falls again while it memorizes. The estimate is taken where the count is most level on a
logarithmic time scale.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.estimate import Estimate

_WINDOW = 1.5
"""Ratio of the end of a window to its start."""
_LEVEL = 0.9
"""Largest steepness that counts as level; with clean labels the count falls faster than 1 / t to the end."""


@dataclass(frozen=True)
class WrongCount:
    """Number of labels counted as wrong, and its standard deviation by chance."""

    value: float
    deviation: float


def confident_joint(
    probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, "n"]
) -> Float[Tensor, "given predicted"]:
    """Number of examples by given label and confidently predicted class; examples without such a class do not count.

    >>> probabilities = torch.tensor([[0.9, 0.1], [0.7, 0.3], [0.1, 0.9], [0.8, 0.2]])
    >>> confident_joint(probabilities, torch.tensor([0, 0, 1, 1]))  # the last one looks like a 0
    tensor([[1., 0.],
            [1., 1.]])
    """
    classes = probabilities.shape[1]
    number = torch.bincount(labels, minlength=classes).to(probabilities.dtype)
    own = probabilities.gather(1, labels[:, None])[:, 0]
    summed = torch.zeros_like(number).index_add_(0, labels, own)
    thresholds = torch.where(number > 0, summed / number.clamp_min(1), torch.inf)
    # Slightly lower, so that equal probabilities reach their own mean despite rounding.
    confident = torch.where(probabilities >= thresholds * (1 - 1e-6), probabilities, -1.0)
    best = confident.max(1)
    has = best.values >= 0
    joint = torch.zeros(classes * classes, dtype=probabilities.dtype)
    places = labels[has] * classes + best.indices[has]
    return joint.index_add_(0, places, torch.ones(len(places), dtype=joint.dtype)).reshape(classes, classes)


def wrong_count(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, "n"]) -> WrongCount:
    r"""The calibrated number of wrong labels, :math:`\sum_j n_j f_j` with :math:`f_j` the off-diagonal share of row j.

    Its variance by chance is :math:`\sum_j n_j^2 f_j (1 - f_j) / m_j`, with :math:`m_j` counted examples in row j.
    """
    joint = confident_joint(probabilities, labels).double()
    number = torch.bincount(labels, minlength=len(joint)).double()
    counted = joint.sum(1)
    share = torch.where(counted > 0, 1 - joint.diagonal() / counted.clamp_min(1), 0.0)
    variance = number.square() * share * (1 - share) / counted.clamp_min(1)
    return WrongCount(float((number * share).sum()), math.sqrt(float(variance.sum())))


def read_count(steps: Sequence[int], counts: Sequence[WrongCount], n: int, classes: int, epoch: float) -> Estimate:
    r"""The estimated number of wrong labels, from the counts along the training.

    The estimate is the geometric mean of the count over the most level window from t to 1.5 t after the first epoch.
    Windows are compared by the exponent p of the count's decay :math:`t^{-p}`, plus half that of the next window (a
    pause in learning is followed by a further fall), plus :math:`1/\sqrt{count}` for chance. The standard error joins
    chance with half the range of the count from :math:`t / 1.5` to :math:`1.5^2 t`.

    Args:
        steps: Steps at which the labels were counted.
        counts: The count at each of them, from probabilities averaged over the training so far.
        n: Number of examples.
        classes: Number of classes.
        epoch: Number of steps in one pass over the data; earlier counts are ignored.

    Returns:
        Not valid if the count does not level off, e.g. in a short training or one evaluated at few steps.
    """
    values = [count.value for count in counts]
    powers = {i: found for i in range(len(steps)) if (found := _fall(steps, values, i)) is not None}
    chance = n * (1 - 1 / classes)
    windows = []
    for i, (j, power) in powers.items():
        if steps[i] >= epoch and values[i] <= 0.75 * chance:
            following = powers[j][1] if j in powers else power
            windows.append((power + following / 2 + 1 / math.sqrt(values[j] + 1), i, j))
    flattest = min(windows, default=(math.inf, 0, 0))
    if flattest[0] < _LEVEL:
        _, i, j = flattest
        value = math.sqrt(values[i] * values[j])
        spread = _half_range(steps, values, steps[i] / _WINDOW, steps[j] * _WINDOW)
        return Estimate(value, math.hypot(counts[j].deviation, spread))
    spread = _half_range(steps, values, steps[-1] / _WINDOW, steps[-1])
    reason = "the count of wrong labels does not level off along the training; this is the last one"
    error = math.hypot(counts[-1].deviation, spread)
    return Estimate(values[-1], error, valid=False, reason=reason)


def _fall(steps: Sequence[int], values: Sequence[float], i: int) -> tuple[int, float] | None:
    """The end of the window that starts at index i, and the exponent with which the count falls or rises in it."""
    t = steps[i]
    j = next((j for j in range(i + 1, len(steps)) if steps[j] >= 0.95 * _WINDOW * t), None)
    if j is None or steps[j] > _WINDOW**2 * t:
        return None
    return j, abs(math.log((values[i] + 1) / (values[j] + 1))) / math.log(steps[j] / t)


def _half_range(steps: Sequence[int], values: Sequence[float], low: float, high: float) -> float:
    near = [value for t, value in zip(steps, values, strict=True) if low <= t <= high]
    return (max(near) - min(near)) / 2
