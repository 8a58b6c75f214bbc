r"""What the first order of population risk leaves out, by real trainings (Cor. ``self_influence_diagonal``).

Every derivative by an example's weight is proportional to its residual along the run, so that the first order fails at
interpolation. A few trainings with less of an example, or without it, show by how much.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, take_examples
from poprisk.risk import Estimate, Members, RiskEstimate, Unrolled, first_order_risk, retrain
from poprisk.risk._exclusion import choose_examples
from poprisk.risk._influence.matrix import evaluation_model
from poprisk.risk._influence.sensitivity import as_unrolled
from poprisk.runs import Run

LARGEST_REMAINDER = 0.2
"""Share of the change in real trainings that the first order may miss."""
FEWEST_TRAINED = 5
"""Number of examples below which real trainings do not check the first order."""


@dataclass(frozen=True)
class TaylorRemainder:
    r"""The change of an example's own loss when it is removed, in real trainings and to first order.

    :math:`q_i(\lambda)` is the loss at i of the run trained with weights :math:`1 - \lambda\nu^{(i)}`.
    """

    examples: Int[Tensor, "m"]
    first_order: Float[Tensor, "m"]
    """q'(0)."""
    half: Float[Tensor, "m"]
    """q(1/2) - q(0)."""
    full: Float[Tensor, "m"]
    """q(1) - q(0)."""
    trainings: float
    note: str = ""

    @property
    def remainder(self) -> Float[Tensor, "m"]:
        r""":math:`\int_0^1 (1-\lambda) q''(\lambda)\, d\lambda = q(1) - q(0) - q'(0)`."""
        return self.full - self.first_order

    @property
    def relative(self) -> float:
        """Difference between the mean first-order change and the mean change, as a share of the latter."""
        scale = max(abs(float(self.full.mean())), torch.finfo(self.full.dtype).tiny)
        return abs(float(self.remainder.mean())) / scale

    @property
    def valid(self) -> bool:
        """Whether the first-order estimate is valid: enough examples were tried, and it missed little."""
        enough = len(self.examples) >= FEWEST_TRAINED
        return enough and bool(self.full.isfinite().all()) and self.relative <= LARGEST_REMAINDER

    def corrected_gap(self, gap: float) -> Estimate:
        """A first-order gap plus the mean remainder of the examples that were tried, with its standard error."""
        m = len(self.examples)
        value = gap + float(self.remainder.mean())
        if m < FEWEST_TRAINED:
            why = f"{m} examples are too few for a standard error (limit {FEWEST_TRAINED}). Use more examples."
            return Estimate(value, math.nan, False, why, self.trainings)
        return Estimate(value, float(self.remainder.std()) / m**0.5, cost=self.trainings)

    def risk(
        self,
        run: Run | Unrolled,
        *,
        loss: str | ExampleLoss | None = None,
        examples: int | Int[Tensor, "m"] | None = None,
        seed: int = 0,
    ) -> RiskEstimate:
        """The risk to first order, with the verdict of these trainings instead of that of exclusion.

        Arguments as in :func:`poprisk.risk.first_order_risk`. The standard error includes that of the remainder.
        """
        found = first_order_risk(run, loss=loss, examples=examples, seed=seed)
        tried, missed = (
            len(self.examples),
            f"{100 * self.relative:.3g}% of the change in {self.trainings:.0f} trainings",
        )
        error = math.hypot(float(found.standard_error), float(self.remainder.std(correction=1)) / tried**0.5)
        reason = ""
        if tried < FEWEST_TRAINED:
            reason = (
                f"the first order was checked on {tried} examples, too few (limit {FEWEST_TRAINED}). "
                f"Use taylor_remainder(run, {FEWEST_TRAINED})."
            )
        elif not math.isfinite(float(found.value) + error):
            reason = "losses or their derivatives are not finite. Use an earlier step or a lower learning rate."
        elif not self.relative <= LARGEST_REMAINDER:
            reason = (
                f"the first order misses {missed} (limit {100 * LARGEST_REMAINDER:.0f}%). Use method='exclusion', or "
                "k_fold(run)."
            )
        return replace(found, standard_error=error, valid=not reason, reason=reason or f"misses {missed}")


def taylor_remainder(
    run: Run | Unrolled,
    examples: int | Int[Tensor, "m"] = 5,
    *,
    loss: str | ExampleLoss | None = None,
    centred: bool = True,
    seed: int = 0,
) -> TaylorRemainder:
    r"""Train twice for each of a few examples, with half its weight and with none, and compare with the derivative.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        examples: Indices of the examples, or a number of them to draw at random.
        loss: Ψ; default: the loss that was trained.
        centred: Give the example's weight to the others, as the centred gap does.
        seed: Seed for the random draw.

    Returns:
        The changes. It takes two trainings for each example.

    Raises:
        DataError: an example that does not exist.
        RunError: the run allows no exact analysis, or cannot be trained again.

    >>> from poprisk import Problem, train
    >>> y = torch.tensor([[0.0], [0.0], [3.0]])
    >>> problem = Problem(torch.nn.Linear, "squared", torch.ones(3, 1), y,
    ...                   arguments={"in_features": 1, "out_features": 1, "bias": False})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=60, progress=False)
    >>> found = taylor_remainder(run, torch.tensor([2]))
    >>> found.trainings, bool(found.full > found.half)
    (2.0, True)
    """
    unrolled = as_unrolled(run)
    n = unrolled.num_examples
    chosen = choose_examples(n, examples, seed)
    at = take_examples(unrolled.inputs, chosen), unrolled.targets[chosen]
    model, w = evaluation_model(unrolled, loss), unrolled.last_weights
    direction = torch.zeros(len(chosen), n, dtype=unrolled.dtype).scatter_(1, chosen[:, None], 1.0).to(unrolled.device)
    if centred:
        direction = (direction - 1 / n) * (n / (n - 1))
    found = unrolled.adjoint(model.per_example_gradients(w, *at).T).weights
    assert found is not None
    alpha = torch.cat([1 - direction / 2, 1 - direction]).clamp(min=0)
    trained = retrain(unrolled.run, Members(alpha), keep=[unrolled.stop], dtype=unrolled.dtype, progress=False)
    ends = trained.kept[unrolled.stop].view(2, len(chosen), -1)
    before = model.per_example_losses(w, *at)
    half, full = (model.per_example_losses(end, *at) - before for end in ends)
    first = -(found * direction).sum(1)
    return TaylorRemainder(chosen, first, half, full, trained.trainings, "; ".join(trained.notes))
