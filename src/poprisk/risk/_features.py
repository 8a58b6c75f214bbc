r"""Out-of-sample class probabilities from the features of the weights that were kept, checked on held-back examples.

No further training is needed. A ridge regression on the one-hot labels, from what the last layer of the network
receives, has its leave-one-out predictions in closed form,

.. math:: f_{-i}(x_i) = y_i - \frac{y_i - f(x_i)}{1 - h_i}

with the leverages h. The features themselves have been trained with the labels, so that these predictions still favour
each example's own label. Two things of the regression are therefore chosen by the first half of the held-back examples,
which nothing was trained on: the ridge, the largest one whose loss is within a standard error of the least, and a
constant that is taken off the score of every example's own label, as small as the error of that loss allows. The second
half decides whether examples that were left out are predicted like examples that were never seen: the same loss, and as
often their own label.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

_RIDGES = tuple(10.0**k for k in range(-3, 2))
"""Ridges to choose from, in units of the mean eigenvalue."""
_SCALES = torch.logspace(-1, 3, 41, dtype=torch.float64).tolist()
_HALVINGS = 30
_ERRORS, _LOOSE = 2.5, 0.02
"""Standard errors, and share of the loss, by which left-out and held-back examples may differ."""
_WIDEST = 0.2
"""Most standard error of the held-back loss, as a share of it, for the check to say anything."""
_MOST_TAKEN = 0.3
"""Share of the loss that may be due to the constant."""
FEWEST_CHECKED = 20
"""Held-back examples below which nothing is checked."""


@dataclass(frozen=True)
class LeftOut:
    """Class probabilities of trained examples, each left out, and of held-back ones, with the verdict."""

    trained: Float[Tensor, "n classes"]
    held: Float[Tensor, "held classes"]
    valid: bool
    reason: str


def left_out_probabilities(
    points: Float[Tensor, "n features"],
    labels: Int[Tensor, "n"],
    held_points: Float[Tensor, "held features"],
    held_labels: Int[Tensor, "held"],
    classes: int,
) -> LeftOut:
    """Probabilities of examples that were trained on, as if each had not been.

    Args:
        points: Features of the examples that were trained on.
        labels: Their classes.
        held_points: Features of the held-back examples.
        held_labels: Their classes.
        classes: Number of classes.

    >>> generator = torch.Generator().manual_seed(0)
    >>> x, y = torch.randn(1200, 3, generator=generator), torch.randint(2, (1200,), generator=generator)
    >>> x[:, 0] += 2 * y
    >>> found = left_out_probabilities(x[400:], y[400:], x[:400], y[:400], 2)
    >>> found.valid, bool(found.trained.argmax(1).eq(y[400:]).double().mean() > 0.8)
    (True, True)
    """
    first, second = slice(0, None, 2), slice(1, None, 2)
    best: tuple[Tensor, Tensor, float, Tensor] | None = None  # of the smallest ridge so far with the least loss
    found = []
    for scores, held_scores in _regressions(points, labels, held_points, classes):
        scale, losses = _scaled(held_scores[first], held_labels[first])
        found.append((scores, held_scores, scale, losses))
        if best is None or losses.mean() < best[3].mean():
            best = found[-1]
    assert best is not None
    scores, held_scores, scale, losses = next(each for each in reversed(found) if _close(each[3], best[3]))
    spread = losses.std().item() / math.sqrt(len(losses))
    constant = _constant(scores, labels, scale, losses.mean().item() - spread)
    taken = scores - constant * F.one_hot(labels, classes)
    trained, held = (scale * taken).softmax(1), (scale * held_scores).softmax(1)
    before = _losses((scale * scores).softmax(1), labels).mean().item()
    valid, reason = _verdict(trained, labels, held[second], held_labels[second], before)
    return LeftOut(trained.float(), held.float(), valid, reason)


def _regressions(
    points: Tensor, labels: Tensor, held_points: Tensor, classes: int
) -> list[tuple[Float[Tensor, "n classes"], Float[Tensor, "held classes"]]]:
    """For each ridge the leave-one-out scores, and those of the held-back examples."""
    n, mean = len(points), points.double().mean(0)
    x, held = points.double() - mean, held_points.double() - mean
    y = F.one_hot(labels, classes).double()
    prior = y.mean(0)
    values, vectors = torch.linalg.eigh(x.T @ x)
    values, x, held = values.clamp_min(0), x @ vectors, held @ vectors
    product, squares, found = x.T @ (y - prior), x.square(), []
    for ridge in _RIDGES:
        shrunk = 1 / (values + ridge * values.mean().clamp_min(1e-30))
        weights = shrunk[:, None] * product
        free = (1 - 1 / n - squares @ shrunk).clamp_min(1e-9)[:, None]
        found.append((y - (y - prior - x @ weights) / free, held @ weights + prior))
    return found


def _scaled(scores: Tensor, labels: Tensor) -> tuple[float, Float[Tensor, "held"]]:
    """The factor of the scores with the least cross-entropy, and the losses at it."""
    losses = [F.cross_entropy(scale * scores, labels, reduction="none") for scale in _SCALES]
    best = min(range(len(losses)), key=lambda i: float(losses[i].mean()))
    return _SCALES[best], losses[best]


def _close(losses: Tensor, least: Tensor) -> bool:
    """Whether the mean loss is within a standard error of the least one, compared example by example."""
    differences = losses - least
    return float(differences.mean()) <= float(differences.std()) / math.sqrt(len(differences))


def _constant(scores: Tensor, labels: Tensor, scale: float, wanted: float) -> float:
    """What to take off the scores of the examples' own labels, so that their mean loss is the wanted one."""
    own = F.one_hot(labels, scores.shape[1])

    def loss(constant: float) -> float:
        return F.cross_entropy(scale * (scores - constant * own), labels).item()

    low, high = 0.0, 1.0
    if loss(low) >= wanted:
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if loss(middle) < wanted else (low, middle)
    return low


def _losses(probabilities: Tensor, labels: Tensor) -> Tensor:
    return -probabilities.gather(1, labels[:, None])[:, 0].clamp_min(1e-30).log()


def _verdict(trained: Tensor, labels: Tensor, held: Tensor, held_labels: Tensor, before: float) -> tuple[bool, str]:
    losses, count = _losses(held, held_labels), len(held)
    mine, theirs = _losses(trained, labels).mean().item(), losses.mean().item()
    if 2 * count < FEWEST_CHECKED:
        return False, f"{2 * count} held-back examples are too few to check them: hold more back"
    error = losses.std().item() / math.sqrt(count)
    right, held_right = ((p.argmax(1) == y).double().mean().item() for p, y in ((trained, labels), (held, held_labels)))
    what = f"loss {mine:.3g} left out, {theirs:.3g} ± {error:.2g} held back"
    if error > _WIDEST * theirs:
        return False, f"the held-back examples are too few to check them ({what}): hold more back"
    if abs(mine - theirs) > _ERRORS * error + _LOOSE * theirs:
        return False, f"examples that are left out are not predicted like held-back ones ({what})"
    spread = math.sqrt(max(held_right * (1 - held_right), 1 / count) / count)
    if abs(right - held_right) > _ERRORS * spread + _LOOSE:
        shares = f"{right:.0%} of the examples left out and {held_right:.0%} of those held back get their own label"
        return False, f"examples that are left out are not predicted like held-back ones ({shares})"
    if mine - before > _MOST_TAKEN * mine:
        return False, f"the features remember the labels: without a correction their loss is {before:.3g} ({what})"
    return True, f"like held-back examples: {what}"
