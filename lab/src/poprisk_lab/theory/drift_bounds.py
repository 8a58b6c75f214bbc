r"""How far drift and the curvature remainder of a window can go: both sides of the paper's bounds, measured."""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, SegmentJacobian, gauss_legendre
from poprisk._core.linalg import from_functions, top_singular_triplets
from poprisk.errors import HyperparameterError
from poprisk.operators._bound import Bound
from poprisk.operators._channels import operator_norm
from poprisk.operators._drift_diffusion import DriftDiffusion, in_dtype_of, window_limits
from poprisk.operators._trajectory import Trajectory

Lipschitz = Literal["directional", "operator"]

# Below this many entries the difference of two Jacobians is formed and its norm taken by a decomposition.
_DENSE_ENTRIES = 2**22
# Rounding errors of the outputs' size that a sum over steps may be off.
_MARGIN = 100.0


@dataclass(frozen=True, eq=False)
class CurvatureBound:
    r"""The second-order remainder against its bound, Eq. ``drift_remainder``."""

    smoothness: Float[Tensor, "steps"]
    r""":math:`\beta_Q` of each step."""
    squared_steps: Float[Tensor, "steps"]
    r""":math:`\|w_{k+1} - w_k\|^2`."""
    per_step: Bound
    r""":math:`\|\mathcal R_Q\| \le \frac12 \sum_k \beta_{Q,k} \|w_{k+1} - w_k\|^2`."""
    uniform: Bound
    r"""The paper's form, with the largest :math:`\beta_{Q,k}` for all steps."""


def drift_bound(split: DriftDiffusion) -> Bound:
    r"""Drift adds up at most linearly, Eq. ``scale_separation``: :math:`\|\Delta_Q^{drift}\| \le N \max_k \|x_k\|`.

    With x the steps' drift, :math:`\eta L_{Q,k} \mu_k` for SGD, the right side is the paper's
    :math:`T \sup_k \|L_{Q,k} \mu_k\|`. It is attained while every step's drift is the same.

    >>> steps, zero = torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)
    >>> print(drift_bound(DriftDiffusion(steps, zero, zero, zero, steps.sum(0))))
    drift (discrete): 4 <= 6 holds
    """
    right = len(split.drift_steps) * split.drift_steps.norm(dim=1).max().item()
    rounding = _MARGIN * torch.finfo(split.drift_steps.dtype).eps * right
    return Bound("drift", "eq:scale_separation", "discrete", split.drift.norm().item(), right, rounding)


def curvature_bound(
    trajectory: Trajectory,
    model: FlatModel,
    test_inputs: Inputs,
    *,
    start: int = 0,
    stop: int | None = None,
    lipschitz: Lipschitz = "directional",
    nodes: int | None = None,
) -> CurvatureBound:
    r"""Both sides of :math:`\|\mathcal R_Q\| \le \frac{\beta_Q}2 \sum_k \|w_{k+1}-w_k\|^2`, Eq. ``drift_remainder``.

    :math:`\beta_Q` is measured along the steps that were taken, at the nodes θ of the Gauss–Legendre rule that
    integrates the step, and at its end:

    .. math::
       \beta_{Q,k} = \max_\theta \frac{\|(J_Q(w_k + \theta\, dw_k) - J_Q(w_k))\, dw_k\|}{\theta\, \|dw_k\|^2}
       \quad\text{or}\quad \max_\theta \frac{\|J_Q(w_k + \theta\, dw_k) - J_Q(w_k)\|_{op}}{\theta\, \|dw_k\|}

    Both are enough for the bound on the realized steps, and a maximum over the nodes is as good as a supremum: with
    weights :math:`\omega_i` the remainder of a step is
    :math:`\sum_i \omega_i (J_Q(w_k + \theta_i dw_k) - J_Q(w_k)) dw_k` and :math:`\sum_i \omega_i \theta_i = 1/2`. What
    the rule itself misses (networks with kinks) is in the bound's ``rounding``.

    Args:
        trajectory: The run; any rule, for only its weights are used.
        model: Network as a function of flat weights.
        test_inputs: Q.
        start: First step of the window.
        stop: The step after its last; the run's end by default.
        lipschitz: ``"directional"`` looks along the step and costs one product per node. ``"operator"`` is the paper's
            operator norm: larger, and a Jacobian per node (large ones by their products).
        nodes: Quadrature nodes per step; by default as many as each step needs.

    Raises:
        DataError: an empty window.
        HyperparameterError: an unknown kind of constant, or no positive number of nodes.

    >>> from poprisk.operators._gradient_descent import gradient_descent
    >>> model = FlatModel.from_function(lambda w, x: x * w**2, torch.ones(1, dtype=torch.float64), "squared")
    >>> x = torch.ones(1, 1, dtype=torch.float64)
    >>> run = gradient_descent(model, x, 0 * x, lr=0.1, steps=1)
    >>> bound = curvature_bound(run, model, x)  # u = w² has J = 2w, so that β = 2 and the remainder is dw²
    >>> round(bound.smoothness.item(), 9), round(bound.per_step.tightness, 9)
    (2.0, 1.0)
    """
    if lipschitz not in get_args(Lipschitz):
        raise HyperparameterError(f"lipschitz must be one of {', '.join(get_args(Lipschitz))}, got {lipschitz!r}")
    start, stop = window_limits(trajectory, start, stop)
    smoothness, squares, allowed = [], [], 0.0
    remainder: Tensor | float = 0.0
    w = in_dtype_of(model, trajectory.weights(start))
    eps = torch.finfo(w.dtype).eps
    for k in range(start, stop):
        after = in_dtype_of(model, trajectory.weights(k + 1))
        segment = SegmentJacobian(model, w, after, test_inputs, nodes=nodes, secant=False)
        first_order = model.jvp(w, test_inputs, segment.step)
        remainder = remainder + (segment.displacement - first_order)
        missed = segment.correction * segment.displacement.norm().item()
        size = model.outputs(w, test_inputs).norm().item() + first_order.norm().item()
        allowed += missed + _MARGIN * eps * size
        smoothness.append(_smoothness(model, w, segment, test_inputs, first_order, lipschitz))
        squares.append(segment.step.square().sum())
        w = after
    beta, squared = torch.tensor(smoothness, dtype=w.dtype), torch.stack(squares).cpu()
    left = torch.as_tensor(remainder).norm().item()
    per_step = (beta @ squared).item() / 2
    uniform = beta.max().item() * squared.sum().item() / 2
    about = ("eq:drift_remainder", "discrete", left)
    return CurvatureBound(
        smoothness=beta,
        squared_steps=squared,
        per_step=Bound(f"curvature remainder, {lipschitz}, each step", *about, per_step, allowed),
        uniform=Bound(f"curvature remainder, {lipschitz}, one constant", *about, uniform, allowed),
    )


def _smoothness(
    model: FlatModel,
    w: Tensor,
    segment: SegmentJacobian,
    test_inputs: Inputs,
    first_order: Tensor,
    lipschitz: Lipschitz,
) -> float:
    length = segment.step.norm().item()
    if not length:
        return 0.0
    worst = 0.0
    for theta in [*(theta for theta, _ in gauss_legendre(segment.nodes)), 1.0]:
        there = w + theta * segment.step
        if lipschitz == "directional":
            change = (model.jvp(there, test_inputs, segment.step) - first_order).norm().item() / length
        else:
            change = _jacobian_change(model, w, there, test_inputs, segment.shape)
        worst = max(worst, change / (theta * length))
    return worst


def _jacobian_change(model: FlatModel, w: Tensor, there: Tensor, inputs: Inputs, shape: tuple[int, int]) -> float:
    r""":math:`\|J(there) - J(w)\|_{op}`."""
    if shape[0] * shape[1] <= _DENSE_ENTRIES:
        return operator_norm((model.output_jacobian(there, inputs) - model.output_jacobian(w, inputs)).flatten(0, 1))
    change = from_functions(
        lambda X: model.jvp(there, inputs, X) - model.jvp(w, inputs, X),
        lambda C: model.vjp(there, inputs, C) - model.vjp(w, inputs, C),
        shape,
        dtype=w.dtype,
        device=w.device,
    )
    top = top_singular_triplets(change, 1, tolerance=1e-4)
    # What the search finds is at most the norm, by about its residual.
    return (top.values + torch.maximum(top.left_residuals, top.right_residuals)).item()
