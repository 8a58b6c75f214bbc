r"""The first-order estimate of population risk from one run, checked by exclusion.

.. math:: \mathcal L_{pop} = \widehat{\mathcal L}_S + \frac{1}{n-1} \operatorname{tr}(\mathsf J_\Psi C_n)

Every derivative by an example's weight is proportional to its residual along the run, so that at interpolation the
estimate tends to the training loss, whatever the risk is. J itself does not show this; exclusion, which keeps higher
orders, does.
"""

import warnings
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, take_examples
from poprisk._core.estimate import Estimate
from poprisk._core.linalg import LowRank, hutchinson_trace, hutchpp_trace, identity, xtrace
from poprisk._core.seeds import generator_for
from poprisk.risk._exclusion import MOST_EXAMPLES, Exclusion, choose_examples, exclusion
from poprisk.risk._influence.matrix import exact_estimate, influence_matrix, influence_on, influence_operator
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.risk._verdict import Found, RiskEstimate, judge_first_order
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
    found = estimators[method](operator, products, generator=generator_for(seed, "probes"))
    scaled = float(found.value) / divisor, float(found.standard_error) / divisor
    return Estimate(*scaled, found.valid, found.reason, found.cost)


def first_order_risk(
    run: Run | Unrolled,
    remainder: Any = None,
    *,
    loss: str | ExampleLoss | None = None,
    examples: int | Int[Tensor, "m"] | None = None,
    controls: int | None = None,
    seed: int = 0,
) -> RiskEstimate:
    r""":math:`\mathcal L_{pop}`, the training loss plus the centred first-order gap: the risk of this model.

    :func:`~poprisk.risk.population_risk` with ``method="first_order"`` returns the same estimate.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        remainder: Deprecated; use ``remainder.risk(run)`` of the lab's ``taylor_remainder``.
        loss: Ψ; default: the loss that was trained.
        examples: Indices of the examples, or a number of them to draw at random; default: all, up to 256.
        controls: Number of the examples that are left out in a real training, to check the exclusion that checks this.
        seed: Seed for the random draw.

    Returns:
        The risk with the standard error of the risk by exclusion, and a verdict by comparison with it. The cost is in
        directions through the run.
    """
    if remainder is not None:
        message = "first_order_risk(run, remainder) is now remainder.risk(run); the argument goes in version 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return remainder.risk(run, loss=loss, examples=examples, seed=seed)
    unrolled = as_unrolled(run)
    chosen = choose_examples(unrolled.num_examples, examples, seed, most=MOST_EXAMPLES)
    return first_order_of(unrolled, exclusion(unrolled, chosen, loss=loss, controls=controls, seed=seed), loss=loss)


def first_order_of(unrolled: Unrolled, reference: Exclusion, *, loss: str | ExampleLoss | None = None) -> RiskEstimate:
    """The risk to first order from the examples of an exclusion at the run's end, which checks it."""
    n, chosen = unrolled.num_examples, reference.examples
    J = influence_on(unrolled, take_examples(unrolled.inputs, chosen), unrolled.targets[chosen], loss=loss)
    gaps = (J[torch.arange(len(chosen)), chosen] - J.mean(1)).double() * (n / (n - 1))
    excluded, m = reference.risk, len(chosen)
    training, error = excluded.training_loss, float(excluded.standard_error)
    value = training + gaps.mean().item()
    return judge_first_order(
        Found(value, error, "first_order", "this model", training, cost=m + reference.cost, examples=m, of=n), excluded
    )
