r"""What a training step costs, and the optimizer's share of it."""

from dataclasses import dataclass

from poprisk_lab.costs.cost import OperationCost


@dataclass(frozen=True)
class StateBytes:
    """Bytes that each weight has in the weights, gradients and states of AdamW or PopRiskAdamW.

    >>> StateBytes().moved, StateBytes(s=0).moved, StateBytes(v=2, s=2).held
    (36, 28, 16)
    """

    p: int = 4
    """Weights."""
    g: int = 4
    """Gradients."""
    m: int = 4
    """First moment."""
    v: int = 4
    """Second moment."""
    s: int = 4
    """Variance of the gradient: PopRiskAdamW's own; 0 stands for AdamW."""

    @property
    def moved(self) -> int:
        """Gradients are read, all else is read and written: 2 (p + m + v + s) + g."""
        return 2 * (self.p + self.m + self.v + self.s) + self.g

    @property
    def held(self) -> int:
        """All of it."""
        return self.p + self.g + self.m + self.v + self.s


def optimizer_step(weights: float, states: StateBytes | None = None, *, ranks: int = 1) -> OperationCost:
    r"""One fused step: one pass over weights, gradients and states.

    .. math:: \text{moved} = \frac{d}{R} \big(2 (p + m + v + s) + g\big), \qquad
              \text{held} = \frac{d}{R} (p + g + m + v + s)

    Assumes that nothing is kept in caches from one step to the next, that states are sharded over the ranks (FSDP2)
    and evenly so, and a gate by element: then ranks tell each other nothing.

    Args:
        weights: d.
        states: Bytes of each; default: all float32.
        ranks: R, over which weights and states are sharded.

    >>> optimizer_step(10.0).bytes_moved
    360.0
    """
    states = states or StateBytes()
    own = weights / ranks
    return OperationCost(bytes_moved=own * states.moved, bytes_held=own * states.held, launches=1)


def training_step(weights: float, tokens: float, *, first: float = 0.0, itemsize: int = 2) -> OperationCost:
    r"""Forward and backward pass: :math:`6\,d` operations for each token, less :math:`2\,d_1` of the first layer.

    .. math:: \text{flops} = (6 d - 2 d_1) \cdot \text{tokens}, \qquad \text{moved} \approx 3 d \cdot \text{itemsize}

    Assumes that every weight is used once for each token (attention's own products are left out) and that activations
    are kept, not computed again. Weights are read twice and gradients written once; activations are not counted.

    Args:
        weights: d.
        tokens: Number of tokens in the batch on this machine.
        first: Weights of the first layer, where its inputs need no gradient.
        itemsize: Bytes of a number; 2 counts as half precision.
    """
    flops = (6 * weights - 2 * first) * tokens
    moved = 3 * weights * itemsize
    if itemsize == 2:
        return OperationCost(half_flops=flops, bytes_moved=moved, bytes_held=2 * weights * itemsize)
    return OperationCost(flops=flops, bytes_moved=moved, bytes_held=2 * weights * itemsize)


def sharded_messages(weights: float, ranks: int, *, weight_bytes: int = 2, gradient_bytes: int = 4) -> OperationCost:
    r"""What FSDP2 itself sends in a step: weights gathered twice, gradients reduced and scattered once.

    .. math:: \text{sent by a rank} = \frac{R - 1}{R}\, d\, (2\, b_p + b_g)

    Assumes ring algorithms, and weights that are gathered again for the backward pass.
    """
    return OperationCost(bytes_sent=(ranks - 1) / ranks * weights * (2 * weight_bytes + gradient_bytes))


def rank_variance(weights: float, ranks: int, *, sharded: bool = True) -> OperationCost:
    r"""The second collective of :class:`~poprisk.optim._estimators.RankVariance`, of the gradients' size, in float32.

    .. math:: \text{sent by a rank} = 4 d\, \frac{R - 1}{R} \text{ (FSDP2: an all-to-all of gradients)}, \quad
              8 d\, \frac{R - 1}{R} \text{ (DDP: an all-reduce of squared deviations)}

    Beside it each rank squares deviations: gradients are read, squares written and read again. Kept until the step are
    a float32 for every weight (DDP), or the spread and a float64 sum for every weight of the shard (FSDP2).

    >>> rank_variance(8.0, 2).bytes_sent, rank_variance(8.0, 2, sharded=False).bytes_sent
    (16.0, 32.0)
    """
    sent = (1 if sharded else 2) * 4 * weights * (ranks - 1) / ranks
    held = 12 * weights / ranks if sharded else 4 * weights
    return OperationCost(bytes_moved=12 * weights, bytes_held=held, bytes_sent=sent, launches=1)
