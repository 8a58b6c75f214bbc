r"""The gradient-flow limit of the paper: the same operators along :math:`\dot w = -J_S^\top g`, to second order.

The weights follow the flow by classical Runge–Kutta; in each interval of length h the kernel and the loss curvature are
those at its middle, where the linear propagator equation is solved exactly:

.. math:: P_{k+1} = e^{-h B K} P_k, \quad P_{k+1/2} = e^{-h B K/2} P_k, \quad
   W = \sum_k h\, P_{k+1/2}^\top K P_{k+1/2}, \quad D = \sum_k h\, K P_{k+1/2}, \quad G = \sum_k h\, K_{QS} P_{k+1/2}

All errors fall as h². For a linear model P is exact, and W, D and G converge to Prop. ``linear_operators``.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.autodiff import FlatModel
from poprisk.autodiff.flat import Inputs
from poprisk.errors import HyperparameterError
from poprisk.linalg import tsqr_append
from poprisk.operators.dense import Operators, Sources


def gradient_flow_operators(
    model: FlatModel,
    inputs: Inputs,
    targets: Tensor,
    *,
    time: float,
    intervals: int,
    test_inputs: Inputs | None = None,
    weights: Float[Tensor, "d"] | None = None,
) -> Operators:
    """The dense operators of gradient flow over [0, time], from the model's weights or given ones.

    Args:
        model: Network and loss, best in float64.
        inputs: Training inputs.
        targets: Their targets.
        time: Length T of the window.
        intervals: Into how many the window is cut; errors fall with its square.
        test_inputs: The test set Q.
        weights: Where the flow starts.

    Raises:
        HyperparameterError: a window without length or intervals.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False).double(), "squared")
    >>> one = torch.ones(1, 1).double()
    >>> ops = gradient_flow_operators(model, one, one, time=1.0, intervals=4)
    >>> torch.allclose(ops.propagator, torch.tensor([[-1.0]]).double().exp())
    True
    """
    if not time > 0 or intervals < 1:
        raise HyperparameterError(f"a flow needs time > 0 and at least one interval, got {time} and {intervals}")
    h = time / intervals
    w = model.weights if weights is None else weights
    start, count = w, targets.shape[0]
    N = model.outputs(w, inputs).numel()
    P = torch.eye(N, dtype=w.dtype, device=w.device)
    R, D, G = P.new_zeros(0, N), torch.zeros_like(P), None
    for _ in range(intervals):
        middle = _flow(model, w, inputs, targets, h / 2)
        J = model.output_jacobian(middle, inputs).flatten(0, 1)
        B = torch.block_diag(*model.output_hessian(middle, inputs, targets)) / count
        half = torch.linalg.matrix_exp(-h / 2 * B @ (J @ J.T))
        pulled = J.T @ (half @ P)
        R = tsqr_append(R, h**0.5 * pulled)
        D = D + h * J @ pulled
        if test_inputs is not None:
            moved = h * model.output_jacobian(middle, test_inputs).flatten(0, 1) @ pulled
            G = moved if G is None else G + moved
        P = half @ (half @ P)
        w = _flow(model, w, inputs, targets, h)
    return _operators(model, start, w, inputs, targets, test_inputs, P, R, D, P.new_zeros(0, N) if G is None else G)


def _operators(
    model: FlatModel,
    start: Tensor,
    end: Tensor,
    inputs: Inputs,
    targets: Tensor,
    test_inputs: Inputs | None,
    P: Tensor,
    R: Tensor,
    D: Tensor,
    G: Tensor,
) -> Operators:
    def moved(where: Inputs) -> Tensor:
        return (model.outputs(end, where) - model.outputs(start, where)).reshape(-1)

    def loss(w: Tensor) -> float:
        return model.per_example_losses(w, inputs, targets).mean().item()

    none = P.new_zeros(len(P))
    return Operators(
        propagator=P,
        factor=R,
        train_transfer=D,
        test_transfer=G,
        sources=Sources(none, P.new_zeros(len(G)), none),
        output_gradient=model.output_gradient(start, inputs, targets).reshape(-1) / targets.shape[0],
        train_displacement=moved(inputs),
        test_displacement=P.new_zeros(0) if test_inputs is None else moved(test_inputs),
        losses=(loss(start), loss(end)),
        num_examples=targets.shape[0],
    )


def _flow(model: FlatModel, w: Tensor, inputs: Inputs, targets: Tensor, h: float) -> Tensor:
    """One classical Runge–Kutta step of the flow: fourth order, so that the operators' second order is what shows."""

    def velocity(at: Tensor) -> Tensor:
        return -model.per_example_gradients(at, inputs, targets).mean(0)

    k1 = velocity(w)
    k2 = velocity(w + h / 2 * k1)
    k3 = velocity(w + h / 2 * k2)
    k4 = velocity(w + h * k3)
    return w + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
