r"""What others use where there is no validation set: criteria and estimates to hold ours against.

None of these follows the run; all look at its last weights. Two are estimates of population risk
(:func:`takeuchi_risk`, :func:`kernel_gcv_risk`), two are signals to stop by (:func:`evidence_criterion`,
:func:`gradient_disparity`).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk.errors import DataError, HyperparameterError


def evidence_criterion(model: FlatModel, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor) -> float:
    r"""The empirical-Bayes stopping criterion of Mahsereci et al. (2017): stop when it is positive.

    .. math:: 1 - \frac1d \sum_k \frac{n\,\bar g_k^2}{\hat\Sigma_{kk}}

    with the mean and the variance (n - 1 in the denominator) of the examples' gradients. It is positive when the mean
    gradient is no larger than its sampling error. Coordinates without variance are left out.

    Raises:
        DataError: fewer than two examples, or no coordinate whose gradient varies.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False), lambda u, y: (u * y).sum())
    >>> evidence_criterion(model, torch.zeros(1), torch.ones(2, 1), torch.tensor([[1.0], [-1.0]]))  # pure noise
    1.0
    """
    _require_examples(targets, 2)
    g = model.per_example_gradients(w, inputs, targets)
    variance = g.var(0)
    seen = variance > 0
    if not seen.any():
        raise DataError("no gradient differs between the examples: the criterion is undefined at these weights")
    return 1 - (len(g) * g.mean(0)[seen].square() / variance[seen]).mean().item()


def gradient_disparity(
    model: FlatModel, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor, *, batches: int = 5, seed: int = 0
) -> float:
    r"""The mean distance between gradients of disjoint batches (Forouzesh and Thiran, 2021): stop when it rises.

    .. math:: \frac{2}{s(s-1)} \sum_{i<j} \|g_{B_i} - g_{B_j}\|_2

    Args:
        model: The model and its loss.
        w: Weights to look at.
        inputs: The training inputs.
        targets: Their targets.
        batches: s, into how many batches of equal size the examples are dealt.
        seed: Seed for the assignment of examples to groups.

    Raises:
        DataError: fewer examples than batches.
        HyperparameterError: fewer than two batches.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False), lambda u, y: (u * y).sum())
    >>> gradient_disparity(model, torch.zeros(1), torch.ones(2, 1), torch.tensor([[1.0], [-1.0]]), batches=2)
    2.0
    """
    if batches < 2:
        raise HyperparameterError(f"a distance needs at least 2 batches, got {batches}")
    _require_examples(targets, batches)
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed)).to(targets.device)
    rows = order[: len(order) // batches * batches].view(batches, -1)
    g = torch.stack(
        [model.per_example_gradients(w, take_examples(inputs, r), targets[r]).mean(0) for r in rows.unbind()]
    )
    return torch.pdist(g).mean().item()


def takeuchi_risk(
    model: FlatModel, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor, *, damping: float = 1e-3
) -> float:
    r"""Takeuchi's information criterion as a risk, for a model at its optimum.

    .. math:: \hat L_S + \frac1n \operatorname{tr}\bigl((H + \delta I)^{-1} C\bigr), \qquad
              H = \tfrac1n \textstyle\sum_i J_i^\top \Lambda_i J_i, \quad C = \tfrac1n \sum_i g_i g_i^\top

    H is the Gauss–Newton matrix and :math:`\delta` = ``damping`` times its largest eigenvalue: away from an optimum H
    is singular and the criterion depends on the damping. Works in the space of the outputs, N × d numbers are held.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False).double(), "squared")
    >>> x = torch.ones(100, 1, dtype=torch.float64)
    >>> y = torch.linspace(-1, 1, 100, dtype=torch.float64)[:, None]
    >>> risk, fit = takeuchi_risk(model, torch.zeros(1, dtype=torch.float64), x, y), y.square().mean().item() / 2
    >>> round((risk - fit) / fit * 100, 2)  # one weight, n = 100: 2 d / n of the training loss, damped by 1e-3
    2.0
    """
    _require_examples(targets, 2)
    n = len(targets)
    losses, g = model.losses_and_gradients(w, inputs, targets)
    A = _scaled_jacobian(model, w, inputs, targets) / math.sqrt(n)
    values, U = torch.linalg.eigh(A @ A.T)
    values = values.clamp(min=0)
    delta = damping * values[-1]
    seen = (g @ A.T) @ U  # (H + δ)⁻¹ = (I - Aᵀ (A Aᵀ + δ)⁻¹ A) / δ
    inside = (seen.square() / (values + delta)).sum(1)
    trace = ((g.square().sum(1) - inside) / delta).mean()
    return (losses.mean() + trace / n).item()


def kernel_gcv_risk(
    model: FlatModel, w: Float[Tensor, "d"], start: Float[Tensor, "d"], inputs: Inputs, targets: Tensor
) -> float:
    r"""Generalized cross-validation on the tangent kernel at the last weights, for squared loss.

    The model is taken as ridge regression in its tangent features, centred on the first weights, with the ridge
    :math:`\mu` that leaves the training loss the run has; then

    .. math:: \hat L_S \Big/ \Bigl(\tfrac1N \operatorname{tr}\, \mu (K + \mu I)^{-1}\Bigr)^2

    Args:
        model: With the squared loss.
        w: Last weights.
        start: First weights.
        inputs: The training inputs.
        targets: Their targets, shaped like the outputs.

    Returns:
        The estimate; infinite where the training loss is 0 (no ridge is left) and NaN where no ridge fits.

    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
    >>> x, y = torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    >>> w = torch.full((2,), 0.5, dtype=torch.float64)
    >>> round(kernel_gcv_risk(model, w, torch.zeros(2, dtype=torch.float64), x, y), 9)  # half-way: 1/8 over (1/2)²
    0.5
    """
    J = model.output_jacobian(w, inputs).flatten(0, 1)
    residual = targets.reshape(-1) - model.outputs(w, inputs).reshape(-1)
    loss = residual.square().sum().item() / (2 * len(targets))
    if loss == 0:
        return math.inf
    values, U = torch.linalg.eigh(J @ J.T)
    values = values.clamp(min=0)
    aim = (U.T @ (residual + J @ (w - start))).square()
    wanted = residual.square().sum()
    low, high = math.log(values[-1].item()) - 40, math.log(values[-1].item()) + 40
    shrink = values.new_zeros(())
    for _ in range(200):  # bisection: what ridge leaves grows with the ridge
        middle = (low + high) / 2
        shrink = math.exp(middle) / (values + math.exp(middle))
        low, high = (middle, high) if (aim * shrink.square()).sum() < wanted else (low, middle)
    reached = (aim * shrink.square()).sum()
    if not torch.isclose(reached, wanted, rtol=1e-3):
        return math.nan
    return loss / shrink.mean().item() ** 2


def _scaled_jacobian(model: FlatModel, w: Tensor, inputs: Inputs, targets: Tensor) -> Float[Tensor, "N d"]:
    r""":math:`\Lambda^{1/2} J`, example by example."""
    values, V = torch.linalg.eigh(model.output_hessian(w, inputs, targets))
    root = values.clamp(min=0).sqrt().unsqueeze(-1) * V.mT
    return (root @ model.output_jacobian(w, inputs)).flatten(0, 1)


def _require_examples(targets: Tensor, least: int) -> None:
    if len(targets) < least:
        raise DataError(f"at least {least} examples are needed, got {len(targets)}")
