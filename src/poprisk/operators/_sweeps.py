r"""The two sweeps over a window from which every operator of a run is made (Prop. ``forward_backward``).

Forward, with a block H of directions for the output gradient at the start of the window:

.. math::
   z_s = H, \quad F = J_k^\top S_k z, \quad V \leftarrow \beta V + \kappa F, \quad X = M(aV + bF), \quad
   y = \bar J_S X, \quad z \leftarrow z - \bar B y

gives :math:`P H = z_T`, :math:`D H = \sum y`, :math:`G H = \sum \bar J_Q X`. Backward is its transpose, line by line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError
from poprisk.operators._step_maps import Block, StepMaps, scale_rows
from poprisk.runs import AffineStep, PerWeight


@dataclass(frozen=True)
class Swept:
    """What a forward sweep leaves behind."""

    gradient: Block
    """P H."""
    train: Block
    """D H."""
    test: Block
    """G H, without rows if there is no test set."""
    momentum: Block
    """The momentum after the last step."""


def forward_sweep(
    steps: Sequence[StepMaps],
    H: Float[Tensor, "N k"],
    *,
    momentum: Float[Tensor, "d k"] | None = None,
    test: bool = True,
    watch: Callable[[int, Block], None] | None = None,
    watch_rows: Callable[[int, Block], None] | None = None,
) -> Swept:
    """P H, D H and G H in one pass over the steps.

    Args:
        steps: The window's steps in order.
        H: Directions of the output gradient at its start.
        momentum: Directions of the momentum carried in, beside each of H; none stands for 0.
        test: Whether G H is wanted; it costs one more push per step.
        watch: Called with each step's number and F_j H, the change of its gradient.
        watch_rows: Called with each step's number and the rows of z, for its batch, that F_j H is made of.
    """
    z, V = H, momentum
    train, reached = H.new_zeros(H.shape), None
    for j, maps in enumerate(steps):
        rows = maps.gather(z)
        F = maps.pull_gathered(rows)
        if watch is not None:
            watch(j, F)
        if watch_rows is not None:
            watch_rows(j, rows)
        X, V = step_direction(maps.step, F, V)
        y = maps.push(X)
        train = train + y
        z = z - maps.bend(y)
        if test:
            moved = maps.push_test(X)
            reached = moved if reached is None else reached + moved
    if V is None:
        raise DataError("a window needs at least one step, got none")
    return Swept(z, train, H.new_zeros(0, H.shape[1]) if reached is None else reached, V)


def step_direction(step: AffineStep, F: Block, V: Block | None) -> tuple[Block, Block]:
    """X = M (a V + b F) and the new momentum V, from the gradient's change F and the momentum before."""
    V = (
        scale_rows(step.new_gradient, F)
        if V is None
        else scale_rows(step.momentum, V) + scale_rows(step.new_gradient, F)
    )
    E = V if _is(step.buffer_share, 1.0) else scale_rows(step.buffer_share, V)
    if not _is(step.direct_share, 0.0):
        E = E + scale_rows(step.direct_share, F)
    return step.preconditioner[:, None] * E, V


def backward_sweep(
    steps: Sequence[StepMaps],
    *,
    like: Block,
    gradient: Float[Tensor, "N k"] | None = None,
    train: Float[Tensor, "N k"] | None = None,
    test: Float[Tensor, "M k"] | None = None,
    momentum: Float[Tensor, "d k"] | None = None,
    on_gradients: Callable[[int], Block] | None = None,
    on_momentum: Callable[[Block], None] | None = None,
) -> Float[Tensor, "N k"]:
    r"""The transpose of the forward sweep: :math:`P^\top A + D^\top B + G^\top C + \sum_j F_j^\top Y_j`.

    Args:
        steps: The same steps, in order of time.
        like: A block [N, k] whose shape, dtype and device the result has.
        gradient: A, weights of P H.
        train: B, weights of D H.
        test: C, weights of G H.
        momentum: Weights of the momentum after the last step.
        on_gradients: Y_j for each step, weights of the F_j H that a forward sweep shows.
        on_momentum: Called with the other half of the transpose, the weights of the momentum carried in.
    """
    dz = like.new_zeros(like.shape) if gradient is None else gradient
    dV = momentum
    for j in range(len(steps) - 1, -1, -1):
        maps = steps[j]
        step = maps.step
        dy = -maps.bend(dz) if train is None else train - maps.bend(dz)
        dX = maps.push_adjoint(dy)
        if test is not None:
            dX = dX + maps.push_test_adjoint(test)
        dE = step.preconditioner[:, None] * dX
        shared = scale_rows(step.buffer_share, dE)
        dV = shared if dV is None else dV + shared
        dF = scale_rows(step.new_gradient, dV)
        if not _is(step.direct_share, 0.0):
            dF = dF + scale_rows(step.direct_share, dE)
        if on_gradients is not None:
            dF = dF + on_gradients(j)
        dz = dz + maps.pull_adjoint(dF)
        dV = scale_rows(step.momentum, dV)
    if on_momentum is not None and dV is not None:
        on_momentum(dV)
    return dz


def _is(share: PerWeight, value: float) -> bool:
    return not isinstance(share, Tensor) and share == value
