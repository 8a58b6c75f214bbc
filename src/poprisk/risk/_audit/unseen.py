r"""Class probabilities of every training example by a model that was fitted without it.

Nothing is trained: a kernel ridge regression on the one-hot labels has its leave-one-out predictions in closed form,

.. math:: f_{-i}(x_i) = y_i - \frac{y_i - f(x_i)}{1 - H_{ii}}

with the hat matrix H. The kernel is Gaussian, its width the median distance, on points that no label has touched: the
inputs, and the features of the network's last layer before the first step. Beyond a few hundred examples the regression
lives in the span of random landmarks (Nyström). The ridge is the one with the smallest leave-one-out error, and one
temperature turns predictions into probabilities. With a budget of trainings, the networks of K folds take part too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from poprisk._core.seeds import shuffled
from poprisk.risk._classes import ClassView
from poprisk.risk._duplicates import duplicate_groups
from poprisk.risk._moments import first_features
from poprisk.risk._out_of_sample import out_of_sample_probabilities
from poprisk.runs import Run

_LANDMARKS = 300
"""Landmarks of the kernel for up to 1,000 examples; their number grows with the square root."""
_MOST_LANDMARKS = 1000
_WIDEST = 20_000
"""Numbers per input beyond which distances between inputs are not used."""
_COPIES = 4
"""Mean number of equal inputs up to which they are copies, left out together; beyond, inputs are categories."""
_RIDGES = tuple(10.0**k for k in range(-4, 4))
"""Ridges to choose from, in units of the kernel's mean eigenvalue."""


@dataclass(frozen=True)
class Unseen:
    """Out-of-sample class probabilities, and where they come from."""

    probabilities: Float[Tensor, "n classes"]
    source: str
    loss: float
    """Their mean cross-entropy with the given labels."""
    check: Int[Tensor, "n"] | None = None
    """Classes predicted by another kind of model, which must agree; None where that is the network of the run."""


def unseen(run: Run, view: ClassView, folds: int, *, batch_size: int = 1024) -> Unseen | None:
    """The best out-of-sample probabilities by their loss; None where a run allows none.

    Args:
        run: A recorded run with its problem.
        view: Its classes.
        folds: Number of trainings to spend; less than 2 trains nothing.
        batch_size: Number of examples evaluated at a time.
    """
    groups = copies(duplicate_groups(run.problem.inputs), view.labels)
    hot = F.one_hot(view.labels, view.num_classes).double()
    candidates = [
        calibrated(left_out(points, hot, groups), view.labels, source) for source, points in _points(run, batch_size)
    ]
    best = min(candidates, key=lambda found: found.loss, default=None)
    if folds < 2:
        return best
    logits = out_of_sample_probabilities(run, "k_fold", folds).probabilities.double().clamp_min(1e-12).log()
    trained = calibrated(logits, view.labels, f"the networks of {folds} folds")
    if best is None or trained.loss < best.loss:
        # They make the mistakes of the run's network, which therefore cannot vouch for them.
        return replace(trained, check=None if best is None else best.probabilities.argmax(1))
    return best


def copies(groups: Int[Tensor, "n"], labels: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """Groups of examples that are copies of one; equal inputs that are many, or have different labels, are not.

    >>> copies(torch.tensor([0, 1, 0]), torch.tensor([2, 2, 2]))
    tensor([0, 1, 0])
    >>> copies(torch.tensor([0, 1, 0]), torch.tensor([2, 2, 1]))
    tensor([0, 1, 2])
    """
    number = 1 + int(groups.max())
    labelled = len(torch.stack([groups, labels]).unique(dim=1)[0])
    return groups if labelled == number and len(groups) <= _COPIES * number else torch.arange(len(groups))


def left_out(
    points: Float[Tensor, "n features"], targets: Float[Tensor, "n classes"], groups: Int[Tensor, "n"]
) -> Float[Tensor, "n classes"]:
    """Leave-one-out predictions of a kernel ridge regression; examples of a group are left out together."""
    number = torch.bincount(groups).double()[:, None]
    first = torch.full((len(number),), len(groups)).scatter_reduce(0, groups, torch.arange(len(groups)), "amin")
    means = torch.zeros(len(number), targets.shape[1], dtype=torch.float64).index_add_(0, groups, targets) / number
    return _ridge(_features(points[first]), means)[groups]


def calibrated(scores: Float[Tensor, "n classes"], labels: Int[Tensor, "n"], source: str) -> Unseen:
    """Softmax of the scores at the temperature with the smallest cross-entropy."""
    scores = scores.double()
    best, temperature = min(
        (float(F.cross_entropy(scale * scores, labels)), float(scale)) for scale in torch.logspace(-1.5, 1.5, 25)
    )
    return Unseen((temperature * scores).softmax(1).float(), source, best)


def _points(run: Run, batch_size: int) -> Iterator[tuple[str, Float[Tensor, "n features"]]]:
    inputs = run.problem.inputs
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    if all(part.is_floating_point() for part in parts):
        flat = [part.detach().cpu().reshape(len(part), -1) for part in parts]
        if sum(part.shape[1] for part in flat) <= _WIDEST:
            yield "a regression on the inputs", torch.cat([part.float() for part in flat], 1).nan_to_num(0, 0, 0)
    features = first_features(run, batch_size)
    if features is not None:
        yield "a regression on the network's first features", features.nan_to_num(0, 0, 0)


def _features(points: Float[Tensor, "n features"]) -> Float[Tensor, "n landmarks"]:
    """Features whose inner products are the Gaussian kernel, exactly for few points."""
    n = len(points)
    most = min(_MOST_LANDMARKS, max(_LANDMARKS, round(_LANDMARKS * math.sqrt(n / 1000))))
    chosen = shuffled(n, 0, "landmarks")[:most]
    points = points - points.mean(0)
    squared = torch.cdist(points, points[chosen]).square()
    width = squared[squared > 0].median() if bool((squared > 0).any()) else squared.new_ones(())
    kernel = torch.exp(-squared / width).double()
    values, vectors = torch.linalg.eigh(kernel[chosen])
    kept = values > 1e-6 * values[-1]
    return kernel @ (vectors[:, kept] / values[kept].sqrt())


def _ridge(phi: Float[Tensor, "n features"], targets: Float[Tensor, "n classes"]) -> Float[Tensor, "n classes"]:
    """Leave-one-out predictions with an intercept, at the ridge with the smallest squared error."""
    n = len(phi)
    phi, centred = phi - phi.mean(0), targets - targets.mean(0)
    values, vectors = torch.linalg.eigh(phi.T @ phi)
    kept = values > 1e-9 * values[-1].clamp_min(1e-30)
    values, U = values[kept], phi @ (vectors[:, kept] / values[kept].sqrt())
    projected, squares = U.T @ centred, U.square()
    outside, rest = centred - U @ projected, (1 - 1 / n - squares.sum(1)).clamp_min(0)
    best, predictions = math.inf, targets
    for ridge in _RIDGES:
        shrink = ridge * values.sum() / n / (values + ridge * values.sum() / n)
        free = (rest + squares @ shrink).clamp_min(1e-9)[:, None]
        residual = (outside + U @ (shrink[:, None] * projected)) / free
        error = float(residual.square().mean())
        if error < best:
            best, predictions = error, targets - residual
    return predictions
