r"""How good a score of training examples is: against retraining, and at finding wrong labels.

Scores of any method can be measured, ours or another's. ``scores[q, i]`` is what the method says of training example i
for query q; removing examples changes a query's output by about the sum of their scores (up to sign and scale, unless a
metric says otherwise).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Generator, Tensor

from poprisk._core.estimate import Estimate
from poprisk.errors import DataError


def linear_datamodeling_score(
    scores: Float[Tensor, "queries n"],
    subsets: Shaped[Tensor, "trainings n"],
    outputs: Float[Tensor, "trainings queries"],
    *,
    resamples: int = 200,
    generator: Generator | None = None,
) -> Estimate:
    r"""LDS: whether summed scores rank retrained networks rightly (Park et al., 2023).

    .. math:: \frac1q \sum_{j} \operatorname{Spearman}_m\big(\textstyle\sum_{i \in S_m} s_{ji},\; y_{mj}\big)

    over queries j and trainings m. A query whose outputs or predictions do not vary has no rank correlation and is left
    out. The standard error is by a bootstrap over trainings and queries together.

    Args:
        scores: Score of each example for each query.
        subsets: Which examples make up S_m, as a mask or weights: those removed if the scores say what a removal does,
            those kept if they say what an example adds.
        outputs: Outputs at each query of the network retrained for each subset.
        resamples: Number of bootstrap resamples.
        generator: Generator for the bootstrap.

    Returns:
        From -1 to 1; its cost is the number of trainings. Not valid where no query varies.

    Raises:
        DataError: shapes that do not fit, fewer than 3 trainings, or numbers that are not finite.

    >>> scores = torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=torch.float64)
    >>> subsets = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1.0]], dtype=torch.float64)
    >>> linear_datamodeling_score(scores, subsets, subsets @ scores.T).value
    1.0
    """
    subsets = subsets.to(scores.dtype)
    trainings, queries = len(subsets), len(scores)
    if subsets.shape[1:] != scores.shape[1:] or outputs.shape != (trainings, queries):
        raise DataError(
            f"scores [queries, n], subsets [trainings, n] and outputs [trainings, queries] must fit, got "
            f"{list(scores.shape)}, {list(subsets.shape)} and {list(outputs.shape)}"
        )
    if trainings < 3:
        raise DataError(f"a rank correlation over trainings needs at least 3 of them, got {trainings}")
    _check_finite(scores=scores, subsets=subsets, outputs=outputs)
    predicted, actual = (scores @ subsets.T).double(), outputs.T.double()
    correlations = _spearman(predicted, actual)
    varies = correlations.isfinite()
    if not bool(varies.any()):
        reason = "no query's outputs and predictions vary over the trainings"
        return Estimate(float("nan"), float("nan"), valid=False, reason=reason, cost=trainings)
    error = _bootstrap_error(predicted[varies], actual[varies], resamples, generator)
    value = float(correlations[varies].mean())
    left_out = int((~varies).sum())
    note = f"{left_out} of {queries} queries do not vary and are left out" if left_out else ""
    if math.isnan(error):
        reason = "too few trainings vary for a standard error"
        return Estimate(value, error, valid=False, reason=reason, cost=trainings)
    return Estimate(value, error, reason=note, cost=trainings)


@dataclass(frozen=True)
class LooCorrelation:
    r"""How removals came out against what was predicted: :math:`actual \approx intercept + slope \cdot predicted`.

    Floats for all queries pooled, tensors with one entry for each query otherwise; NaN where nothing varies.
    """

    pearson: float | Tensor
    slope: float | Tensor
    """1 where the predictions are in the right units."""
    intercept: float | Tensor
    rmse: float | Tensor
    """Error of the predictions themselves, not of the fitted line."""
    count: int
    """Pairs in each fit."""


def loo_correlation(
    predicted: Float[Tensor, "queries removals"], actual: Float[Tensor, "queries removals"], *, per_query: bool = False
) -> LooCorrelation:
    r"""Predicted against actual changes when examples are removed one by one: correlation, and calibration.

    Raises:
        DataError: shapes that differ, fewer than 3 pairs, or numbers that are not finite.

    >>> predicted = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    >>> found = loo_correlation(predicted, 2 * predicted + 1)
    >>> round(found.pearson, 6), round(found.slope, 6), round(found.intercept, 6)
    (1.0, 2.0, 1.0)
    """
    if predicted.shape != actual.shape or predicted.dim() != 2:
        raise DataError(
            f"predicted and actual must both be [queries, removals], got {list(predicted.shape)} and "
            f"{list(actual.shape)}"
        )
    _check_finite(predicted=predicted, actual=actual)
    shape = (len(predicted), -1) if per_query else (1, -1)
    x, y = predicted.double().reshape(shape), actual.double().reshape(shape)
    count = x.shape[1]
    if count < 3:
        raise DataError(f"a correlation needs at least 3 pairs, got {count}")
    dx, dy = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    xx, yy, xy = dx.square().sum(1), dy.square().sum(1), (dx * dy).sum(1)
    slope = xy / xx
    fits = (xy / (xx * yy).sqrt(), slope, y.mean(1) - slope * x.mean(1), (x - y).square().mean(1).sqrt())
    pearson, slope, intercept, rmse = fits if per_query else tuple(float(value) for value in fits)
    return LooCorrelation(pearson, slope, intercept, rmse, count)


def mislabel_auc(scores: Float[Tensor, "n"], wrong: Bool[Tensor, "n"]) -> Estimate:
    r"""Area under the ROC curve: the probability that a wrong label scores above a right one, ties counting half.

    The standard error is DeLong's (1988).

    Raises:
        DataError: shapes that differ, NaN scores, or fewer than two wrong or two right labels.

    >>> mislabel_auc(torch.tensor([0.9, 0.4, 0.5, 0.1]), torch.tensor([True, True, False, False])).value
    0.75
    """
    _check_labels(scores, wrong)
    positive, negative = scores[wrong].double(), scores[~wrong].double()
    if min(len(positive), len(negative)) < 2:
        raise DataError(
            f"an area with its error needs two wrong and two right labels, got {len(positive)} and {len(negative)}"
        )
    above = _share_below(positive, negative)  # for each wrong label, the share of right ones it beats
    below = 1 - _share_below(negative, positive)
    variance = above.var() / len(positive) + below.var() / len(negative)
    return Estimate(float(above.mean()), float(variance.sqrt()))


def share_found(scores: Float[Tensor, "n"], wrong: Bool[Tensor, "n"], inspected: float = 0.15) -> Estimate:
    """The share of wrong labels among the highest scores, if a share of all examples is inspected.

    Examples with equal scores at the edge count for the part of them that is inspected. The standard error is that of a
    share of the wrong labels, as if they had been drawn at random.

    Raises:
        DataError: shapes that differ, NaN scores, no wrong label, or a share outside of 0 to 1.

    >>> share_found(torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([True, False, True, False]), 0.5).value
    0.5
    """
    _check_labels(scores, wrong)
    number = int(wrong.sum())
    if not number:
        raise DataError("a share of the wrong labels needs at least one of them, got none")
    if not 0 < inspected <= 1:
        raise DataError(f"inspected is a share of the examples, above 0 and at most 1, got {inspected}")
    k = max(1, int(inspected * len(scores) + 1e-9))
    edge = scores.sort(descending=True).values[k - 1]
    above, level = scores > edge, scores == edge
    part = (k - int(above.sum())) / int(level.sum())
    share = (int((above & wrong).sum()) + part * int((level & wrong).sum())) / number
    return Estimate(share, (share * (1 - share) / number) ** 0.5)


@dataclass(frozen=True)
class Brittleness:
    """How many of the examples that matter most must go before a prediction changes."""

    size: int | None
    """The smallest number tried whose removal changed the prediction; None if none did."""
    original: int
    """The prediction to begin with."""
    predictions: dict[int, int]
    """For each number tried."""

    @property
    def trainings(self) -> int:
        """What it cost."""
        return len(self.predictions)


def brittleness(
    scores: Float[Tensor, "n"],
    retrain: Callable[[Int[Tensor, "removed"]], int],
    original: int,
    *,
    sizes: Sequence[int] = tuple(range(20, 201, 20)),
) -> Brittleness:
    """Remove the highest-scored examples, retrain, and look whether the prediction is another one.

    Args:
        scores: Scores for one query, highest for the examples that support its prediction most: those whose removal
            is predicted to raise the loss of the predicted class most.
        retrain: Trains without the examples at these positions and returns the query's predicted class.
        original: The class predicted with all of them.
        sizes: How many to remove, tried from the smallest until one changes the prediction. A larger removal that
            changes it back would not be noticed.

    Raises:
        DataError: NaN scores, or a size that is not between 1 and n.

    >>> scores = torch.tensor([3.0, 1.0, 2.0])
    >>> brittleness(scores, lambda removed: int(len(removed) > 1), 0, sizes=(1, 2, 3)).size
    2
    """
    tried = sorted(set(sizes))
    if not tried or tried[0] < 1 or tried[-1] > len(scores):
        raise DataError(f"sizes must lie in 1 … {len(scores)}, got {list(sizes)}")
    if bool(scores.isnan().any()):
        raise DataError(f"scores must be numbers, got {int(scores.isnan().sum())} NaN of {len(scores)}")
    order = scores.argsort(descending=True, stable=True)
    predictions: dict[int, int] = {}
    for size in tried:
        predictions[size] = int(retrain(order[:size]))
        if predictions[size] != original:
            return Brittleness(size, original, predictions)
    return Brittleness(None, original, predictions)


def _spearman(x: Float[Tensor, "queries m"], y: Float[Tensor, "queries m"]) -> Float[Tensor, "queries"]:
    """NaN where a row is constant."""
    rx, ry = _ranks(x), _ranks(y)
    rx, ry = rx - rx.mean(1, keepdim=True), ry - ry.mean(1, keepdim=True)
    return (rx * ry).sum(1) / (rx.square().sum(1) * ry.square().sum(1)).sqrt()


def _ranks(x: Float[Tensor, "queries m"]) -> Float[Tensor, "queries m"]:
    """Equal values share the mean of their ranks."""
    ordered = x.sort(1).values.contiguous()
    x = x.contiguous()
    first = torch.searchsorted(ordered, x, side="left")
    last = torch.searchsorted(ordered, x, side="right")
    return (first + last).double() / 2


def _share_below(of: Float[Tensor, "a"], among: Float[Tensor, "b"]) -> Float[Tensor, "a"]:
    """For each value, the share of the others that lie below it, equal ones counting half."""
    ordered = among.sort().values
    first = torch.searchsorted(ordered, of, side="left")
    last = torch.searchsorted(ordered, of, side="right")
    return (first + last).double() / (2 * len(among))


def _bootstrap_error(predicted: Tensor, actual: Tensor, resamples: int, generator: Generator | None) -> float:
    queries, trainings = predicted.shape
    generator = generator or Generator().manual_seed(0)
    means = []
    for _ in range(resamples):
        rows = torch.randint(queries, (queries,), generator=generator)
        columns = torch.randint(trainings, (trainings,), generator=generator)
        means.append(_spearman(predicted[rows][:, columns], actual[rows][:, columns]).nanmean())
    found = torch.stack(means)
    found = found[found.isfinite()]
    return float(found.std()) if len(found) > 1 else float("nan")


def _check_finite(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        bad = int((~tensor.isfinite()).sum())
        if bad:
            raise DataError(f"{name} must be finite numbers, got {bad} that are not, of {tensor.numel()}")


def _check_labels(scores: Tensor, wrong: Tensor) -> None:
    if scores.dim() != 1 or scores.shape != wrong.shape or wrong.dtype != torch.bool:
        raise DataError(
            f"scores and the mask of wrong labels must have one entry for each example, got {list(scores.shape)} and "
            f"{wrong.dtype} {list(wrong.shape)}"
        )
    if bool(scores.isnan().any()):
        raise DataError(f"scores must be numbers, got {int(scores.isnan().sum())} NaN of {len(scores)}")
