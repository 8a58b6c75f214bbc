r"""What operators of a recorded run, influence through it, retraining it and recording it cost.

T steps of b examples, d weights, f operations of a forward pass of one example, :math:`f_1` those of the first layer,
A activations of an example, p outputs. Numbers have 4 bytes. How often memory is passed over was counted operation by
operation (``tests/scaling``).
"""

from poprisk_lab.costs.cost import OperationCost
from poprisk_lab.costs.kernels import BLOCK_BYTES, product_blocks
from poprisk_lab.costs.network import Network

_NUMBER = 4


def window_gramian(
    network: Network, *, steps: float, batch: float, examples: float, columns: float, nodes: float = 1
) -> OperationCost:
    r"""W times k columns: a sweep forward and one back, each a pull and a push at every step.

    .. math:: \text{flops} = T \Big[(b + q n)\big(2 k (2f - f_1) + 2f + f_1\big) + 4 n k p^2 + 2 k d + 2 n p k\Big],
              \qquad \text{moved} = 4 T \big((42 + 17\, q c)\, k d + 17\, k (n + b) A + 68 d + 3 (n + b) A\big)

    Linear in steps, examples, columns and weights, as long as examples are not cut into more stretches c
    (:func:`~poprisk_lab.costs.product_blocks`). Assumes the steps' gradients are held (``memory``): T k d numbers.

    Args:
        network: The model.
        steps: T.
        batch: b.
        examples: n, all training examples.
        columns: k.
        nodes: q, quadrature nodes of each step.
    """
    d, p, a = network.weights, network.outputs, network.activations
    seen = batch + nodes * examples
    passed = 2 * columns * network.derivative_flops + 2 * network.forward_flops + network.first_flops
    closed = 4 * examples * columns * p**2 + 2 * columns * d + 2 * examples * p * columns
    rows, widths = product_blocks(network, examples, columns)
    moved = (42 + 17 * nodes * rows) * columns * d + 17 * columns * seen * a + 68 * d + 3 * seen * a
    held = _NUMBER * columns * ((steps + 5) * d + 4 * examples * p) + BLOCK_BYTES
    return OperationCost(
        flops=steps * (seen * passed + closed),
        bytes_moved=_NUMBER * steps * moved,
        bytes_held=held,
        launches=steps * (1 + nodes * rows * widths) / 2,
    )


def window_transfer(
    network: Network,
    *,
    steps: float,
    batch: float,
    examples: float,
    test_examples: float,
    columns: float,
    nodes: float = 1,
) -> OperationCost:
    r"""G times k columns: one sweep forward, pushed to m test examples too.

    .. math:: \text{flops} = T \Big[b \big(k (2f - f_1) + f\big) + q (n + m) \big(k (2f - f_1) + f + f_1\big)
              + 2 n k p^2 + 4 k d\Big], \qquad
              \text{moved} = 4 T \big((12 + 8.5\, q c + 8.5\, q c_m)\, k d + 10.5\, k (n + b + m) A + 55 d\big)

    in c stretches of training examples and :math:`c_m` of test examples (:func:`~poprisk_lab.costs.product_blocks`).
    """
    d, p, a = network.weights, network.outputs, network.activations
    pulled = columns * network.derivative_flops + network.forward_flops
    pushed = nodes * (examples + test_examples) * (pulled + network.first_flops)
    closed = 2 * examples * columns * p**2 + 4 * columns * d
    seen = batch + nodes * (examples + test_examples)
    stretches = [product_blocks(network, count, columns) for count in (examples, test_examples) if count]
    cut, launched = sum(rows for rows, _ in stretches), sum(rows * widths for rows, widths in stretches)
    moved = (12 + 8.5 * nodes * cut) * columns * d + 10.5 * columns * seen * a + 55 * d
    held = _NUMBER * columns * (5 * d + 4 * (examples + test_examples) * p) + BLOCK_BYTES
    return OperationCost(
        flops=steps * (batch * pulled + pushed + closed),
        bytes_moved=_NUMBER * steps * moved,
        bytes_held=held,
        launches=steps * (1 + nodes * launched) / 3,
    )


def adjoint(network: Network, *, steps: float, batch: float, queries: float, states: float = 1) -> OperationCost:
    r"""Q queries through T steps of a stack of linear layers: one product with each batch's Hessian.

    .. math:: \text{flops} = T b \big[Q (6f - 4 f_1 + 2 p^2) + 3f\big] \approx 12\, d\, b\, Q\, T, \qquad
              \text{moved} = 4 T \big(31\, Q d + 28\, Q b A + 30 d\big)

    Linear in each. Counted for SGD with momentum; an optimizer with more states passes over them too. Networks of other
    layers take automatic differentiation, which holds the activations of every query.

    Args:
        network: The model.
        steps: T.
        batch: b.
        queries: Q.
        states: Vectors of the optimizer's state for each weight.
    """
    d, p, a = network.weights, network.outputs, network.activations
    flops = 6 * network.forward_flops - 4 * network.first_flops + 2 * p**2
    moved = 31 * queries * d + 28 * queries * batch * a + 30 * d
    held = _NUMBER * (queries * d * (6 + states) + queries * batch * a)
    return OperationCost(
        flops=steps * batch * (queries * flops + 3 * network.forward_flops),
        bytes_moved=_NUMBER * steps * moved,
        bytes_held=held,
        launches=steps,
    )


def retraining(network: Network, *, steps: float, batch: float, members: float) -> OperationCost:
    r"""K members trained again in one stacked computation.

    .. math:: \text{flops} = K T b\, (3f - f_1) \approx 6\, d\, b\, K\, T, \qquad
              \text{moved} = 4 K \big(T (14 d + 14\, b A) + 6 d\big)

    Linear in each: stacking saves launches, no arithmetic. Counted for SGD with momentum.
    """
    d, a = network.weights, network.activations
    moved = members * (steps * (14 * d + 14 * batch * a) + 6 * d)
    held = _NUMBER * members * (13 * d + 4 * batch * a)
    flops = members * steps * batch * network.gradient_flops
    return OperationCost(flops=flops, bytes_moved=_NUMBER * moved, bytes_held=held, launches=steps)


def recording(weights: float, *, steps: float, segment_steps: float, dense: bool = True, states: int = 2) -> float:
    r"""Bytes on disk of a recorded run of Adam.

    .. math:: 4 d\, \Big(3 T \text{ if dense} + (1 + \text{states}) \frac{T}{\text{segment}} + 1\Big)

    A dense run has weights, preconditioner and momentum of every step, and after each segment a checkpoint of weights
    and states; a sparse one has the checkpoints alone, and replays between them. The first weights are in both.

    Args:
        weights: d.
        steps: T.
        segment_steps: Between checkpoints.
        dense: Whether every step is recorded.
        states: Vectors of the optimizer's state.

    >>> recording(1e9, steps=1000, segment_steps=1000, dense=False) / 1e9
    16.0
    """
    return _NUMBER * weights * (3 * steps * dense + (1 + states) * steps / segment_steps + 1)
