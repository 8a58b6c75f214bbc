r"""What minibatches did to the test outputs: drift, diffusion, and the curvature that first order leaves out.

Every batch gradient is its mean over the draw plus a fluctuation, :math:`\hat g_k = \mu_k + \xi_k`. A recorded step is
affine in the gradients up to its own (:class:`~poprisk.runs.AffineStep`), so the two can be followed through momentum,
preconditioner and gate to the weights, and from there to the test outputs with the Jacobian at the step's start.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, SegmentJacobian, gauss_legendre, take_examples
from poprisk._core.linalg import from_functions, top_singular_triplets
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._batch_law import BatchLaw, Sampling, batch_laws
from poprisk.operators._bound import Bound
from poprisk.operators._channels import operator_norm
from poprisk.operators._step_maps import scale_rows
from poprisk.operators._trajectory import Trajectory, check_run
from poprisk.runs import AffineStep

Lipschitz = Literal["directional", "operator"]

# Below this many entries the difference of two Jacobians is formed and its norm taken by a decomposition.
_DENSE_ENTRIES = 2**22
# Rounding errors of the outputs' size that a sum over steps may be off.
_MARGIN = 100.0


@dataclass(frozen=True, eq=False)
class DriftDiffusion:
    r"""The parts of a window's test displacement, step by step; see :func:`drift_diffusion`.

    Row k of each is what step ``start + k`` contributed.
    """

    drift_steps: Float[Tensor, "steps M"]
    diffusion_steps: Float[Tensor, "steps M"]
    source_steps: Float[Tensor, "steps M"]
    remainder_steps: Float[Tensor, "steps M"]
    displacement: Float[Tensor, "M"]
    """U_Q at the end minus U_Q at the start, by two evaluations of the network."""

    @property
    def drift(self) -> Float[Tensor, "M"]:
        r""":math:`\Delta_Q^{drift}`: what the mean gradients did."""
        return self.drift_steps.sum(0)

    @property
    def diffusion(self) -> Float[Tensor, "M"]:
        r"""What the fluctuations did, with its sign: the paper's :math:`-\Delta_Q^{diff}`."""
        return self.diffusion_steps.sum(0)

    @property
    def source(self) -> Float[Tensor, "M"]:
        """What no gradient of the window did: weight decay, and momentum carried in."""
        return self.source_steps.sum(0)

    @property
    def curvature_remainder(self) -> Float[Tensor, "M"]:
        r""":math:`\mathcal R_Q`, of second order in the steps."""
        return self.remainder_steps.sum(0)

    @property
    def closure(self) -> float:
        """How far the four parts miss the displacement, relative to their sizes: rounding for an exact record."""
        parts = (self.drift, self.diffusion, self.source, self.curvature_remainder)
        size = sum(part.norm().item() for part in parts)
        return (sum(parts) - self.displacement).norm().item() / size if size else 0.0


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


def drift_diffusion(
    trajectory: Trajectory,
    model: FlatModel,
    inputs: Inputs,
    targets: Tensor,
    test_inputs: Inputs,
    *,
    start: int = 0,
    stop: int | None = None,
    sampling: Sampling = "independent",
) -> DriftDiffusion:
    r"""Split the test displacement of a recorded window, Eq. ``drift_diffusion_decomposition``.

    .. math::
       U_Q(w_T) - U_Q(w_s) &= \sum_k J_Q(w_k) (x_k^\mu + x_k^\xi + x_k^\sigma) + \mathcal R_Q, \qquad
       \mathcal R_Q = \sum_k (\bar J_{Q,k} - J_Q(w_k)) (w_{k+1} - w_k) \\
       v_k^\mu &= \beta v_{k-1}^\mu + \kappa \mu_k, \qquad x_k^\mu = -M_k (a v_k^\mu + b \mu_k)

    and in the same way for :math:`\xi`. The third part starts from the momentum that is carried in and has the decay:
    :math:`x_k^\sigma = -M_k (a v_k^\sigma + b \lambda^c w_k) - \lambda w_k + \sigma_k`. :math:`\bar J_Q` is the
    Jacobian averaged over the step, so :math:`\bar J_Q (w_{k+1} - w_k)` is the outputs' change, which is how the
    remainder is computed: it holds all orders above the first, and the four parts add up to rounding (``closure``).

    In what sense the diffusion is a martingale: for SGD without momentum, where :math:`J_Q(w_k) M_k` is fixed before
    the batch is drawn, exactly, if ``sampling`` is how the batches were drawn. With momentum a fluctuation is seen
    through later Jacobians, which it moved: exact for outputs linear in the weights, else up to that motion. The
    preconditioner of Adam and of a gate is recorded after the step and knows the batch, and so does a clip factor:
    there the split is an attribution along the realized run.

    Args:
        trajectory: The run.
        model: Network and loss as functions of flat weights, in float64 for exact work.
        inputs: All n training inputs, in the order of the steps' example indices.
        targets: Their targets.
        test_inputs: Q.
        start: First step of the window.
        stop: The step after its last; the run's end by default.
        sampling: How batches were drawn. ``"independent"`` and ``"replacement"`` have the full training gradient as
            mean; ``"epochs"`` has the mean over what the epoch has left.

    Raises:
        DataError: an empty window, another number of examples than recorded, or batches that contradict ``sampling``.
        RunError: no exact analysis is possible, or inputs were augmented.
        HyperparameterError: an unknown way of sampling.

    Differs from the paper: real optimizers in place of :math:`w_{k+1} = w_k - \eta M_k \hat g_k`, hence the source; the
    learning rate is inside M; the diffusion carries its minus sign, so that the parts add up; and for batches dealt out
    in epochs the conditional mean given the past is not the full gradient, which the paper does not say.

    >>> from poprisk.operators._gradient_descent import gradient_descent
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
    >>> x, y = torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    >>> split = drift_diffusion(gradient_descent(model, x, y, lr=0.5, steps=3), model, x, y, x)
    >>> torch.allclose(split.drift, split.displacement)  # full batches do not fluctuate, a linear model does not bend
    True
    """
    check_run(trajectory, targets)
    start, stop = window_limits(trajectory, start, stop)
    laws = batch_laws(trajectory, targets.shape[0], start=start, stop=stop, sampling=sampling)
    first = in_dtype_of(model, trajectory.buffer(start))
    V = torch.stack([torch.zeros_like(first), torch.zeros_like(first), first], dim=1)
    w = in_dtype_of(model, trajectory.weights(start))
    parts: list[Tensor] = []
    remainders: list[Tensor] = []
    begin = u = model.outputs(w, test_inputs).reshape(-1)
    for k, law in enumerate(laws, start):
        step, after = step_in_dtype_of(model, trajectory.step(k)), in_dtype_of(model, trajectory.weights(k + 1))
        mean, drawn = batch_gradients(model, w, inputs, targets, step, law)
        E = torch.stack([mean, drawn - mean, step.coupled_decay * w], dim=1)
        V = scale_rows(step.momentum, V) + scale_rows(step.new_gradient, E)
        X = -step.preconditioner[:, None] * (scale_rows(step.buffer_share, V) + scale_rows(step.direct_share, E))
        X[:, 2] += step.source - step.decay * w
        pushed = model.jvp(w, test_inputs, torch.cat([X, (after - w)[:, None]], dim=1))
        moved = model.outputs(after, test_inputs).reshape(-1)
        parts.append(pushed[:, :3].T)
        remainders.append(moved - u - pushed[:, 3])
        w, u = after, moved
    drift, diffusion, source = torch.stack(parts, dim=1)
    return DriftDiffusion(drift, diffusion, source, torch.stack(remainders), u - begin)


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


def batch_gradients(
    model: FlatModel, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor, step: AffineStep, law: BatchLaw
) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"]]:
    r"""The mean :math:`\mu_k` that the law gives, and the gradient :math:`\hat g_k` that was drawn.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False), "squared")
    >>> x, y = torch.ones(2, 1), torch.tensor([[1.0], [3.0]])
    >>> step = AffineStep(torch.tensor([1]), torch.tensor([2.0]), torch.ones(1))
    >>> batch_gradients(model, torch.zeros(1), x, y, step, BatchLaw(torch.arange(2), size=1, scale=1.0))
    (tensor([-2.]), tensor([-3.]))
    """
    pool = law.pool.to(w.device)
    chosen = take_examples(inputs, pool)
    residuals = model.output_gradient(w, chosen, targets[pool])
    # The batch lies in the pool: one backward pass serves both.
    share = w.new_zeros(targets.shape[0]).index_add_(0, step.batch, step.selection / targets.shape[0])[pool]
    weights = torch.stack([torch.full_like(share, law.scale / len(pool)), share], dim=1)
    mean, drawn = model.vjp(w, chosen, (residuals[:, :, None] * weights[:, None, :]).flatten(0, 1)).T
    return mean, drawn


def window_limits(trajectory: Trajectory, start: int, stop: int | None) -> tuple[int, int]:
    """First step of a window and the one after its last.

    Raises:
        DataError: the window is empty or outside the run.
    """
    stop = trajectory.num_steps if stop is None else stop
    if not 0 <= start < stop <= trajectory.num_steps:
        raise DataError(
            f"a window needs 0 ≤ start < stop ≤ {trajectory.num_steps}, the run's steps, got {start} and {stop}"
        )
    return start, stop


def in_dtype_of(model: FlatModel, x: Tensor) -> Tensor:
    """A flat vector in the dtype and on the device of a model's weights."""
    like = next(iter(model.parameters.values()))
    return x.to(like.device, like.dtype)


def step_in_dtype_of(model: FlatModel, step: AffineStep) -> AffineStep:
    """A step with its tensors in the dtype and on the device of a model's weights."""
    changed = {
        name: value.to(next(iter(model.parameters.values())).device) if name == "batch" else in_dtype_of(model, value)
        for name, value in vars(step).items()
        if isinstance(value, Tensor)
    }
    return AffineStep(**{**vars(step), **changed})


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
