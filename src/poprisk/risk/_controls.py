r"""Controls of exclusion and leverage: a few real deletions, which correct the predicted ones and measure their error.

With predicted gaps :math:`g_i` for m examples and the real gaps :math:`r_i` of k of them, drawn at random, the mean gap
is estimated as in prediction-powered inference (Angelopoulos et al., 2023):

.. math:: \bar r + \lambda\,(\bar g_M - \bar g_C), \qquad \lambda \in [0, 1]

λ is the slope of r on g, fitted without the example it is applied to. Where predictions are good, the k trainings count
as much as m; where they are worthless, λ is 0 and the mean of the real deletions is left.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.func import grad, vmap

from poprisk._core.autodiff import ExampleLoss, take_examples
from poprisk._core.seeds import generator_for, shuffled
from poprisk.risk._error import corrected_risk_error, example_losses_of
from poprisk.risk._resampled import members_without
from poprisk.risk._retraining.retrain import Retrained, member_outputs, retrain
from poprisk.risk._verdict import FIRST_CONTROLS, ROUGH_MOVED
from poprisk.runs import Run

T = TypeVar("T")
_MIXED = 64
"""Number of new inputs on which two models are compared."""


@dataclass(frozen=True, eq=False)
class Control:
    """Real deletions of some of the examples for which there are predictions."""

    rows: Int[Tensor, "k"]
    """Their positions among these examples."""
    losses: Float[Tensor, "k"]
    """Loss of each under a model that was really trained without it."""
    moved: float = math.nan
    """(n - 1) times the loss between the models with and without an example, at new inputs: see :func:`moved_by`."""
    notes: tuple[str, ...] = ()


class Deletions:
    """Trainings without one example each (and its duplicates), in a fixed order, along a run that may grow.

    Args:
        held: What each training leaves out.
        renormalize: Whether the others get the weight of those left out.
    """

    def __init__(self, held: list[Int[Tensor, "c"]], *, renormalize: bool = True) -> None:
        self._held, self._renormalize = held, renormalize
        self.steps: list[int] = []
        """Steps before which weights are kept."""
        self._blocks: list[tuple[int, Retrained]] = []

    def follow(self, run: Run, steps: Sequence[int]) -> None:
        """Keep weights at these steps too, and take the trainings so far along."""
        self.steps = list(steps)
        blocks, self._blocks, start = self._blocks, [], 0
        for stop, trained in blocks:
            self._train(run, start, stop, trained)
            start = stop

    def weights(
        self, run: Run, k: int, count: int
    ) -> tuple[Float[Tensor, "count d"], list[dict[str, Tensor]], tuple[str, ...]]:
        """Weights of the first trainings before step k, any buffers of theirs, and what was taken over from the run."""
        done = self._blocks[-1][0] if self._blocks else 0
        if done < count:
            self._train(run, done, count)
        blocks = [trained for _, trained in self._blocks]
        found = torch.cat([trained.kept[k] for trained in blocks])[:count]
        buffers = [each for trained in blocks for each in trained.buffers.get(k, ())][:count]
        return found, buffers, tuple(dict.fromkeys(note for trained in blocks for note in trained.notes))

    def _train(self, run: Run, start: int, stop: int, resume: Retrained | None = None) -> None:
        members = members_without(run.num_examples, self._held[start:stop], renormalize=self._renormalize)
        steps = self.steps
        trained = retrain(run, members, keep=steps, stop=max(steps), resume=resume, progress=None)
        self._blocks.append((stop, trained))


def control_order(examples: Int[Tensor, "m"], n: int, seed: int) -> Int[Tensor, "m"]:
    """Positions of the examples in the random order in which they become controls.

    >>> order = control_order(torch.arange(5), 5, seed=0)
    >>> sorted(order.tolist()), torch.equal(order, torch.arange(5))
    ([0, 1, 2, 3, 4], False)
    """
    place = torch.empty(n, dtype=torch.long)
    place[shuffled(n, seed, "examples")] = torch.arange(n)
    return place[examples.cpu()].argsort()


def corrected_gap(
    predicted: Float[Tensor, "m"], real: Float[Tensor, "k"], rows: Int[Tensor, "k"]
) -> tuple[float, float, float]:
    """Mean gap of all m examples, its standard error from the choice of the controls, and the share λ of predictions.

    The error is widened from a normal's to that of a t distribution with k - 1 degrees of freedom, and by one more
    difference like the largest one.

    >>> predicted = torch.arange(20.0, dtype=torch.float64)
    >>> rows = torch.arange(0, 20, 2)
    >>> corrected_gap(predicted, predicted[rows] + 1, rows)  # all predictions too low by 1
    (10.5, 0.0, 1.0)
    """
    m, k = len(predicted), len(rows)
    g = predicted[rows]
    others = max(k - 1, 1)
    sums = [x.sum() - x for x in (g, real, g * g, g * real)]  # of all the others
    spread, together = sums[2] - sums[0].square() / others, sums[3] - sums[0] * sums[1] / others
    slope = torch.where(spread > 0, together / spread.clamp(min=torch.finfo(g.dtype).tiny), 0.0).clamp(0, 1)
    each = real - slope * (g - predicted.mean())
    if not 1 < k < m:  # there is nothing left to predict
        return real.mean().item(), 0.0, slope.mean().item()
    mean = each.mean()
    widened = each.var().item() / k * (k - 1) / max(k - 3, 1) + ((each - mean).abs().max().item() / k) ** 2
    return mean.item(), math.sqrt(widened * (1 - k / m)), slope.mean().item()


def controlled_risk(
    training: Float[Tensor, "n"],
    own: Float[Tensor, "m"],
    predicted: Float[Tensor, "m"],
    control: Control,
    mistake: float,
    *,
    smooth: bool = False,
) -> tuple[float, float, float, float]:
    """The risk with the predicted gaps corrected, its standard error, the part of the controls in it, and ``moved``.

    Args:
        training: Losses of all training examples.
        own: Of those with a prediction, by the model of the run.
        predicted: Of those, as if they had not been seen.
        control: The real deletions.
        mistake: What one unseen mistake would add.
        smooth: Whether the run is smooth enough for ``control.moved`` to be a jackknife variance.
    """
    gaps, real, seen = predicted - own, control.losses, own[control.rows]
    gap, uncertain, share = corrected_gap(gaps, real - seen, control.rows)
    value = training.mean().item() + gap
    moved = control.moved / value if smooth and value > 0 else ROUGH_MOVED
    pairs = (own, own + share * gaps), (seen, real)
    error = max(corrected_risk_error(training, *pair, mistake, sampled=len(gaps), moved=moved) for pair in pairs)
    return value, error, uncertain, moved


def as_many_as_needed(make: Callable[[int], T], enough: Callable[[T], bool], first: int, most: int) -> T:
    """The result with so many controls at first, and twice as many each time until they are enough."""
    count = min(first, most)
    while True:
        found = make(count)
        if count >= most or enough(found):
            return found
        count = min(2 * count, most)


def deleted_outputs(
    run: Run, examples: Int[Tensor, "k"], weights: Float[Tensor, "k d"], buffers: Sequence[dict[str, Tensor]]
) -> Float[Tensor, "k *out"]:
    """Outputs of each deleted example under the model that was trained without it."""
    inputs = take_examples(run.problem.inputs, examples.to(run.problem.device))
    alone = tuple(x.unsqueeze(1) for x in inputs) if isinstance(inputs, tuple) else inputs.unsqueeze(1)
    return member_outputs(run, weights, alone, own=True, buffers=tuple(buffers) or None).squeeze(1)


def most_controls(m: int) -> int:
    """Largest number of deletions for the exclusion of m examples: a quarter of the arithmetic that it takes."""
    return min(m, max(FIRST_CONTROLS, m // 2))


def moved_by(run: Run, weights: Float[Tensor, "k d"], own: Float[Tensor, "d"], loss: ExampleLoss) -> float:
    r"""How far the model depends on its sample: the jackknife variance of its predictions at new inputs, as a loss.

    .. math:: (n - 1) \cdot \text{mean of } \ell(u + \Delta) - \ell(u) - \nabla\ell(u) \cdot \Delta

    over the deletions and over new inputs, each put together from the features of two examples: nothing was fitted
    there. 0 for inputs that are not real numbers.
    """
    x, n = run.problem.inputs, run.num_examples
    if isinstance(x, tuple) or not x.is_floating_point():
        return 0.0
    generator = generator_for(0, "mixed inputs")
    pairs = torch.randint(n, (2, _MIXED), generator=generator).to(x.device)
    features = (torch.rand(_MIXED, *x.shape[1:], generator=generator) < 0.5).to(x.device)
    mixed = torch.where(features, x[pairs[0]], x[pairs[1]])
    u, moved = (member_outputs(run, w, mixed).double() for w in (own.unsqueeze(0).to(weights), weights))
    y = run.problem.targets[pairs[0]].to(u.device)
    y = y.double() if y.is_floating_point() else y
    slopes = vmap(grad(loss))(u[0], y)
    found = [
        example_losses_of(loss, v, y)
        - example_losses_of(loss, u[0], y)
        - (slopes * (v - u[0])).reshape(len(y), -1).sum(1)
        for v in moved
    ]
    return (n - 1) * float(torch.stack(found).mean())
