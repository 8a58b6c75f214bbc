r"""The first-order estimate of population risk from one run, and what checks it.

.. math:: \mathcal L_{pop} = \widehat{\mathcal L}_S + \frac{1}{n-1} \operatorname{tr}(\mathsf J_\Psi C_n)

Every derivative by an example's weight is proportional to its residual along the run, so at interpolation the estimate
tends to the training loss whatever the truth is. Nothing in J itself says so: that takes a few real trainings, the
remainder of Cor. ``self_influence_diagonal``.
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
from poprisk.risk._examples import choose_examples
from poprisk.risk._influence.matrix import evaluation_model, exact_estimate, influence_matrix, influence_operator
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import retrain
from poprisk.risk._risk_error import corrected_risk_error, unseen_mistake
from poprisk.runs import Run

TraceMethod = Literal["xtrace", "hutchpp", "hutchinson"]

# Beyond this share of the change that trainings show, the first-order value is not to be believed.
TOLERANCE = 0.2
# Examples below which trainings say too little.
FEWEST_TRIED = 5


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

    The centred form removes an example and gives its weight to the others (:math:`\nu^{(i)}`); the other one
    (Cor. ``self_influence_diagonal``) lets the total weight fall. They differ by what a common rescaling of the loss
    does to training, of order 1/n.

    Args:
        run: Or the run made differentiable, with options of your own.
        loss: Ψ; default: the loss that was trained.
        centred: Which of the two.
        products: Estimate the trace from so many products; default: exactly, from n.
        method: Of estimation.
        seed: Of the probes.

    Returns:
        The trace with the standard error of its estimation, 0 where it is exact; not an error of what it stands for.
        Cost in directions through the run.
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
    r"""What removal really does to an example's own loss, beside what the derivative says.

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
        """How far the mean of the first-order changes is from the mean change, as a share of the latter."""
        scale = max(abs(float(self.full.mean())), torch.finfo(self.full.dtype).tiny)
        return abs(float(self.remainder.mean())) / scale

    @property
    def valid(self) -> bool:
        """Whether the first-order estimate may be believed: enough examples were tried, and it missed little."""
        return len(self.examples) >= FEWEST_TRIED and bool(self.full.isfinite().all()) and self.relative <= TOLERANCE

    def corrected_gap(self, gap: float) -> Estimate:
        """A first-order gap plus the mean remainder of the examples that were tried, with its standard error."""
        m = len(self.examples)
        value = gap + float(self.remainder.mean())
        if m < FEWEST_TRIED:
            return Estimate(
                value, float("nan"), False, f"{m} examples are too few for a standard error", self.trainings
            )
        return Estimate(value, float(self.remainder.std()) / m**0.5, cost=self.trainings)


def taylor_remainder(
    run: Run | Unrolled,
    examples: int | Int[Tensor, "m"] = 5,
    *,
    loss: str | ExampleLoss | None = None,
    centred: bool = True,
    seed: int = 0,
) -> TaylorRemainder:
    r"""Trains twice for each of a few examples, with half its weight and with none, and compares with the derivative.

    Args:
        run: Or the run made differentiable, with options of your own.
        examples: Which, or how many, drawn at random.
        loss: Ψ; default: the loss that was trained.
        centred: Give the example's weight to the others, as the centred gap does.
        seed: Of the draw.

    Returns:
        The changes; the cost is two trainings for each example.

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
    run: Run | Unrolled, remainder: TaylorRemainder | None = None, *, loss: str | ExampleLoss | None = None
) -> Estimate:
    r""":math:`\mathcal L_{pop}`, the training loss plus the centred first-order gap; the risk of this model.

    Args:
        run: Or the run made differentiable, with options of your own.
        remainder: Of :func:`taylor_remainder` for this run. Without it nothing says whether the first order is enough,
            and the estimate is not valid.
        loss: Ψ; default: the loss that was trained.

    Returns:
        The estimate; its standard error is that of the mean over examples of
        :math:`\psi_i + \frac{n}{n-1}(\mathsf J C_n)_{ii}`. Cost in directions through the run.
    """
    unrolled = as_unrolled(run)
    n = unrolled.num_examples
    J = influence_matrix(unrolled, loss=loss)
    model = evaluation_model(unrolled, loss)
    losses = model.per_example_losses(unrolled.last_weights, unrolled.inputs, unrolled.targets)
    corrected = losses + (J.diagonal() - J.mean(1)) * (n / (n - 1))
    value = float(corrected.mean())
    outputs = model.batch_outputs(unrolled.last_weights, unrolled.inputs)
    mistake = unseen_mistake(model.loss, outputs, unrolled.targets, n)
    error = corrected_risk_error(losses, losses, corrected, mistake)
    if not torch.tensor([value, error]).isfinite().all():
        return Estimate(value, float("nan"), False, "losses or their derivatives are not finite", n)
    if remainder is None:
        reason = "not checked: first order dies at interpolation; pass taylor_remainder(run, 5), ten trainings"
        return Estimate(value, error, False, reason, n)
    error = math.hypot(error, float(remainder.remainder.std()) / len(remainder.examples) ** 0.5)
    share = f"{100 * remainder.relative:.3g}% of the change that {remainder.trainings:.0f} trainings show is missed"
    believed = remainder.valid and math.isfinite(error)
    return Estimate(value, error, believed, f"first order: {share}", n)
