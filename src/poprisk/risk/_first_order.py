r"""The first-order estimate of population risk from one run, and what checks it.

.. math:: \mathcal L_{pop} = \widehat{\mathcal L}_S + \frac{1}{n-1} \operatorname{tr}(\mathsf J_\Psi C_n)

Every derivative by an example's weight is proportional to its residual along the run, so that at interpolation the
estimate tends to the training loss, whatever the risk is. J itself does not show it; exclusion does, which keeps higher
orders, and so do a few real trainings, the remainder of Cor. ``self_influence_diagonal``.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, take_examples
from poprisk._core.estimate import Estimate
from poprisk._core.linalg import LowRank, hutchinson_trace, hutchpp_trace, identity, xtrace
from poprisk.errors import HyperparameterError
from poprisk.risk._exclusion import MOST_EXAMPLES, Exclusion, choose_examples, exclusion
from poprisk.risk._influence.matrix import (
    evaluation_model,
    exact_estimate,
    influence_matrix,
    influence_on,
    influence_operator,
)
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import retrain
from poprisk.risk._verdict import (
    FEWEST_TRAINED,
    LARGEST_REMAINDER,
    Found,
    RiskEstimate,
    judge_first_order,
    judge_trained_first_order,
)
from poprisk.runs import Run

TraceMethod = Literal["xtrace", "hutchpp", "hutchinson"]


def generalization_gap(
    run: Run | Unrolled,
    *,
    loss: str | ExampleLoss | None = None,
    centred: bool = True,
    products: int | None = None,
    method: TraceMethod = "xtrace",
    seed: int = 0,
) -> Estimate:
    r"""The first-order generalization gap.

    .. math:: \frac{1}{n-1}\operatorname{tr}(\mathsf J C_n) \quad\text{or}\quad \frac1n \operatorname{tr}\mathsf J

    The centred form removes an example and gives its weight to the others (:math:`\nu^{(i)}`); the other form
    (Cor. ``self_influence_diagonal``) lets the total weight fall. They differ by the effect of a common rescaling of
    the loss on training, of order 1/n.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        loss: Ψ; default: the loss that was trained.
        centred: Whether to use the centred form.
        products: Number of products to estimate the trace from; default: the exact trace, from n products.
        method: The trace estimator, "xtrace", "hutchpp" or "hutchinson".
        seed: Seed for the probes.

    Returns:
        The trace with the standard error of its estimation, 0 where it is exact. This is not the error of the gap as an
        estimate of the generalization gap. The cost is in directions through the run.
    """
    unrolled = as_unrolled(run)
    n = unrolled.num_examples
    if products is None:
        J = influence_matrix(unrolled, loss=loss)
        value = (J.diagonal().sum() - J.sum() / n) / (n - 1) if centred else J.diagonal().mean()
        return exact_estimate(value, unrolled)
    operator, divisor = influence_operator(unrolled, loss=loss), float(n)
    if centred:
        one = torch.full((n, 1), n**-0.5, dtype=unrolled.dtype, device=unrolled.device)
        centre = identity(n, dtype=unrolled.dtype, device=unrolled.device) - LowRank(one)
        operator, divisor = centre @ operator @ centre, float(n - 1)
    estimators = {"xtrace": xtrace, "hutchpp": hutchpp_trace, "hutchinson": hutchinson_trace}
    if method not in estimators:
        raise HyperparameterError(f"method must be one of {sorted(estimators)}, got {method!r}")
    found = estimators[method](operator, products, generator=torch.Generator().manual_seed(seed))
    scaled = float(found.value) / divisor, float(found.standard_error) / divisor
    return Estimate(*scaled, found.valid, found.reason, found.cost)


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


def first_order_risk(
    run: Run | Unrolled,
    remainder: TaylorRemainder | None = None,
    *,
    loss: str | ExampleLoss | None = None,
    examples: int | Int[Tensor, "m"] | None = None,
    seed: int = 0,
) -> RiskEstimate:
    r""":math:`\mathcal L_{pop}`, the training loss plus the centred first-order gap: the risk of this model.

    :func:`~poprisk.risk.population_risk` with ``method="first_order"`` returns the same estimate.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        remainder: Real trainings to check the first order by, from :func:`taylor_remainder` of this run; default: the
            first order is checked by exclusion, which trains nothing.
        loss: Ψ; default: the loss that was trained.
        examples: Indices of the examples, or a number of them to draw at random; default: all, up to 256.
        seed: Seed for the random draw.

    Returns:
        The risk with the standard error of the risk by exclusion, to which the remainder adds its own, and a verdict.
        The cost is in directions through the run.
    """
    unrolled = as_unrolled(run)
    chosen = choose_examples(unrolled.num_examples, examples, seed, most=MOST_EXAMPLES)
    return first_order_of(unrolled, exclusion(unrolled, chosen, loss=loss), remainder, loss=loss)


def first_order_of(
    unrolled: Unrolled,
    reference: Exclusion,
    remainder: TaylorRemainder | None = None,
    *,
    loss: str | ExampleLoss | None = None,
) -> RiskEstimate:
    """The risk to first order from the examples of an exclusion at the run's end, which checks it."""
    n, chosen = unrolled.num_examples, reference.examples
    J = influence_on(unrolled, take_examples(unrolled.inputs, chosen), unrolled.targets[chosen], loss=loss)
    gaps = (J[torch.arange(len(chosen)), chosen] - J.mean(1)).double() * (n / (n - 1))
    excluded = reference.risk
    training, error = excluded.training_loss, float(excluded.standard_error)
    found = Found(
        value=training + gaps.mean().item(),
        error=error
        if remainder is None
        else math.hypot(error, float(remainder.remainder.std(correction=1)) / len(remainder.examples) ** 0.5),
        method="first_order",
        target="this model",
        training_loss=training,
        cost=2.0 * len(chosen),
        examples=len(chosen),
        of=n,
    )
    if remainder is None:
        return judge_first_order(found, excluded)
    return judge_trained_first_order(found, len(remainder.examples), remainder.trainings, remainder.relative)
