r"""The gradient-flow limit of the paper: the same operators along :math:`\dot w = -M J_S^\top g`, to second order.

The weights follow the flow by classical Runge–Kutta; in each interval of length h the kernel and the loss curvature are
those at its middle, where the linear propagator equation is solved exactly:

.. math:: P_{k+1} = e^{-h B K} P_k, \quad P_{k+1/2} = e^{-h B K/2} P_k, \quad
   W = \sum_k h\, P_{k+1/2}^\top K P_{k+1/2}, \quad D = \sum_k h\, K P_{k+1/2}, \quad G = \sum_k h\, K_{QS} P_{k+1/2}

with :math:`K = J_S M J_S^\top`, :math:`K_{QS} = J_Q M J_S^\top`, and M = I unless a preconditioner is given. All errors
fall as h²; how large they are on the flow that happened is ``Operators.discretization``. For a linear model P is exact,
and W, D and G converge to Prop. ``linear_operators``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs
from poprisk._core.linalg import tsqr_append
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._cumulative import CumulativeError, flow_cumulative_error
from poprisk.operators._dense import Discretization, Operators, Sources

Preconditioner = Float[Tensor, "d"] | float
"""The diagonal of M, constant in time, or one number for all weights."""


def gradient_flow_operators(
    model: FlatModel,
    inputs: Inputs,
    targets: Tensor,
    *,
    time: float,
    intervals: int,
    test_inputs: Inputs | None = None,
    weights: Float[Tensor, "d"] | None = None,
    preconditioner: Preconditioner | None = None,
) -> Operators:
    r"""The dense operators of gradient flow over [0, time], from the model's weights or given ones.

    Args:
        model: Network and loss, best in float64.
        inputs: Training inputs.
        targets: Their targets.
        time: Length T of the window.
        intervals: Into how many the window is cut; errors fall with its square.
        test_inputs: The test set Q.
        weights: Where the flow starts.
        preconditioner: M of :math:`\dot w = -M \nabla L`, not negative; P, W, D and G are then those with
            :math:`K^M = J M J^\top`. None is M = I.

    Returns:
        The operators; its ``discretization`` is how far the displacements and the loss drop of the flow are from what
        the operators say of them.

    Raises:
        HyperparameterError: a window without length or intervals, or a preconditioner that is negative or not finite.
        DataError: a preconditioner of another length than the weights.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False).double(), "squared")
    >>> one = torch.ones(1, 1).double()
    >>> ops = gradient_flow_operators(model, one, one, time=1.0, intervals=4)
    >>> torch.allclose(ops.propagator, torch.tensor([[-1.0]]).double().exp())
    True
    """
    start = model.weights if weights is None else weights
    N, M = (0 if x is None else model.outputs(start, x).numel() for x in (inputs, test_inputs))
    end, P = start, torch.eye(N, dtype=start.dtype, device=start.device)
    R, D, G = P.new_zeros(0, N), torch.zeros_like(P), P.new_zeros(M, N)
    for node in _nodes(model, inputs, targets, time, intervals, test_inputs, start, preconditioner):
        pulled = node.train_jacobian.T @ node.propagator
        R = tsqr_append(R, node.weight**0.5 * pulled)
        D = D + node.weight * node.train_jacobian @ pulled
        G = G + node.weight * node.test_jacobian @ pulled
        P, end = node.end_propagator, node.end_weights
    before, after = (model.per_example_losses(w, inputs, targets).mean().item() for w in (start, end))
    g = model.output_gradient(start, inputs, targets).reshape(-1) / targets.shape[0]
    train, test = (
        P.new_zeros(0) if x is None else (model.outputs(end, x) - model.outputs(start, x)).reshape(-1)
        for x in (inputs, test_inputs)
    )
    none = P.new_zeros(N)
    return Operators(
        propagator=P,
        factor=R,
        train_transfer=D,
        test_transfer=G,
        sources=Sources(none, P.new_zeros(M), none),
        output_gradient=g,
        train_displacement=train,
        test_displacement=test,
        losses=(before, after),
        num_examples=targets.shape[0],
        discretization=Discretization(
            train=(train + D @ g).norm().item(),
            test=(test + G @ g).norm().item(),
            # A flow descends; what Runge-Kutta and rounding make of a loss that no longer moves may be below 0.
            root_dissipation=abs((R @ g).norm().item() - max(before - after, 0.0) ** 0.5),
        ),
    )


@dataclass(frozen=True, eq=False)
class FlowPath:
    r"""Kernels and propagators of a flow at the middles of its intervals: the sums that its operators are.

    .. math:: W = \sum_k h_k P_k^\top K_k P_k, \qquad D = \sum_k h_k K_k P_k, \qquad G = \sum_k h_k K_{QS,k} P_k
    """

    weights: Float[Tensor, "m"]
    """h, the lengths of the intervals."""
    train_kernels: Float[Tensor, "m N N"]
    """K_SS, with the preconditioner inside."""
    cross_kernels: Float[Tensor, "m M N"]
    """K_QS, with the preconditioner inside."""
    propagators: Float[Tensor, "m N N"]
    """P_g(τ, s)."""

    def cumulative_error(self, A: Float[Tensor, "M N"], *, cutoff: float | None = None) -> CumulativeError:
        r""":math:`\mathcal D_A = \mathcal D_A^{vis} + \mathcal N_A`; see :func:`flow_cumulative_error`.

        Raises:
            DataError: A does not map train to test outputs.
        """
        return flow_cumulative_error(
            self.weights, self.train_kernels, self.cross_kernels, self.propagators, A, cutoff=cutoff
        )


def flow_path(
    model: FlatModel,
    inputs: Inputs,
    targets: Tensor,
    *,
    time: float,
    intervals: int,
    test_inputs: Inputs | None = None,
    weights: Float[Tensor, "d"] | None = None,
    preconditioner: Preconditioner | None = None,
) -> FlowPath:
    """What the operators of a flow are made of, for its cumulative errors; arguments as of gradient_flow_operators.

    Raises:
        HyperparameterError: a window without length or intervals, or a preconditioner that is negative or not finite.
        DataError: a preconditioner of another length than the weights.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False).double(), "squared")
    >>> one = torch.ones(1, 1).double()
    >>> path = flow_path(model, one, one, time=1.0, intervals=4, test_inputs=2 * one)
    >>> path.cumulative_error(torch.tensor([[2.0]]).double()).total  # twice the training output: always right
    tensor([[0.]], dtype=torch.float64)
    """
    start = model.weights if weights is None else weights
    lengths, train, cross, propagators = [], [], [], []
    for node in _nodes(model, inputs, targets, time, intervals, test_inputs, start, preconditioner):
        lengths.append(node.weight)
        train.append(node.train_jacobian @ node.train_jacobian.T)
        cross.append(node.test_jacobian @ node.train_jacobian.T)
        propagators.append(node.propagator)
    return FlowPath(start.new_tensor(lengths), torch.stack(train), torch.stack(cross), torch.stack(propagators))


@dataclass(frozen=True, eq=False)
class _Node:
    """The middle of one interval, and where the interval ends."""

    weight: float
    """h."""
    train_jacobian: Float[Tensor, "N d"]
    r""":math:`J_S M^{1/2}`."""
    test_jacobian: Float[Tensor, "M d"]
    r""":math:`J_Q M^{1/2}`; no rows without a test set."""
    propagator: Float[Tensor, "N N"]
    end_propagator: Float[Tensor, "N N"]
    end_weights: Float[Tensor, "d"]


def _nodes(
    model: FlatModel,
    inputs: Inputs,
    targets: Tensor,
    time: float,
    intervals: int,
    test_inputs: Inputs | None,
    w: Tensor,
    preconditioner: Preconditioner | None,
) -> Iterator[_Node]:
    """The flow, interval by interval; one interval's Jacobians are held at a time."""
    if not time > 0 or intervals < 1:
        raise HyperparameterError(f"a flow needs time > 0 and at least one interval, got {time} and {intervals}")
    M = _diagonal(preconditioner, w)
    h, root = time / intervals, M.sqrt()
    P = torch.eye(model.outputs(w, inputs).numel(), dtype=w.dtype, device=w.device)
    for _ in range(intervals):
        middle = _flow(model, w, inputs, targets, M, h / 2)
        J = model.output_jacobian(middle, inputs).flatten(0, 1) * root
        J_Q = J[:0] if test_inputs is None else model.output_jacobian(middle, test_inputs).flatten(0, 1) * root
        B = torch.block_diag(*model.output_hessian(middle, inputs, targets)) / targets.shape[0]
        half = torch.linalg.matrix_exp(-h / 2 * B @ (J @ J.T))
        halfway = half @ P
        P, w = half @ halfway, _flow(model, w, inputs, targets, M, h)
        yield _Node(h, J, J_Q, halfway, P, w)


def _diagonal(preconditioner: Preconditioner | None, w: Tensor) -> Tensor:
    if preconditioner is None:
        return torch.ones_like(w)
    if isinstance(preconditioner, Tensor) and preconditioner.shape not in ((), w.shape):
        raise DataError(
            f"preconditioner must be a number or a vector [{len(w)}], one entry per weight, got "
            f"{list(preconditioner.shape)}"
        )
    M = torch.as_tensor(preconditioner, dtype=w.dtype, device=w.device).expand_as(w)
    if not torch.isfinite(M).all() or (M < 0).any():
        raise HyperparameterError(
            f"preconditioner must be finite and not negative, got a minimum of {M.min().item():.3g}: W needs its root"
        )
    return M


def _flow(model: FlatModel, w: Tensor, inputs: Inputs, targets: Tensor, M: Tensor, h: float) -> Tensor:
    """One classical Runge–Kutta step of the flow: fourth order, so that the operators' second order is what shows."""

    def velocity(at: Tensor) -> Tensor:
        return -M * model.per_example_gradients(at, inputs, targets).mean(0)

    k1 = velocity(w)
    k2 = velocity(w + h / 2 * k1)
    k3 = velocity(w + h / 2 * k2)
    k4 = velocity(w + h * k3)
    return w + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
