r"""What a summary of r directions loses of the test motion: at worst, at best, and on the run at hand.

The realized test operator obeys :math:`R^{-1/2} G^\top G R^{-1/2} \preceq \|\Gamma_Q\| C_R`; the worst case is taken
over every operator :math:`\mathsf A` that does. Since :math:`\mathsf A \mapsto (I-M)\mathsf A(I-M)` preserves order,
the supremum is at :math:`\mathsf A = \|\Gamma_Q\| C_R`:

.. math:: \mathcal E(M) = \|\Gamma_Q\|\,\|(I - M) C_R (I - M)\| = \|\Gamma_Q\|\,\|C_R^{1/2}(I - M)\|^2
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import LinearOperator, LowRank
from poprisk.errors import DataError
from poprisk.operators import Bound, Transfer, require_length, require_shape
from poprisk.theory.directions import SignalDirections

Summary = Float[Tensor, "N N"] | LinearOperator
"""A projector or contraction on the whitened space."""
# Rounding errors of the sizes involved that a side may be off, per root of its dimension.
_MARGIN = 100.0


def worst_lost_motion(directions: SignalDirections, summary: Summary, visibility: float) -> float:
    r"""The worst-case lost test motion :math:`\mathcal E(M)` of a projector or contraction M, in closed form.

    Exact where all directions are listed; with leading ones only, an upper bound by ``spectrum.rest`` times the
    visibility.

    Args:
        directions: C_R.
        summary: M on the whitened space, :math:`0 \preceq M \preceq I`; ``directions.projector(r)`` is the best.
        visibility: :math:`\|\Gamma_Q\|` (``channels.visibility_norm``, or ``visibility_limit`` of a large window).

    Raises:
        DataError: M is of another size.

    >>> from poprisk.theory import euclidean_metric, signal_directions
    >>> directions = signal_directions(torch.diag(torch.tensor([10.0, 1.0])), euclidean_metric(2, dtype=torch.float32))
    >>> [worst_lost_motion(directions, torch.diag(torch.tensor(m)), 1.0) for m in ([1.0, 0.0], [0.5, 0.0])]
    [1.0, 25.0]
    """
    lost = _lost_root(directions, summary)
    return visibility * (torch.linalg.matrix_norm(lost, 2).item() ** 2 + directions.spectrum.rest)


def attaining_transfer(directions: SignalDirections, summary: Summary, visibility: float) -> LowRank:
    r"""An admissible operator of rank one that loses as much as the worst case says (proof of the theorem).

    .. math:: \mathsf A_M = \|\Gamma_Q\|\, C^{1/2} u u^\top C^{1/2}, \qquad u = C^{1/2} v / \|C^{1/2} v\|

    with v the leading eigenvector of :math:`(I-M) C (I-M)`. The paper's v lies in the range of I - M, which makes
    :math:`(I-M)v = v`; for a contraction :math:`(I-M) v` stands in its place.

    >>> from poprisk.theory import euclidean_metric, signal_directions
    >>> directions = signal_directions(torch.diag(torch.tensor([10.0, 1.0])), euclidean_metric(2, dtype=torch.float32))
    >>> attaining_transfer(directions, directions.projector(1), 2.0).to_dense().round(decimals=3)
    tensor([[0., 0.],
            [0., 2.]])
    """
    lost = _lost_root(directions, summary)
    left = torch.linalg.svd(lost, full_matrices=False)[0][:, :1]  # u in the eigenbasis, where C^½ is diagonal
    spectrum = directions.spectrum
    return LowRank(visibility**0.5 * spectrum.vectors @ (spectrum.roots[:, None] * left))


def minimax_lost_motion(directions: SignalDirections, r: int, visibility: float) -> float:
    r"""The least worst case over rank-r projectors, :math:`\|\Gamma_Q\|\,\lambda_{r+1}` (Eq. ``signal_filter_opt``).

    It is also the least over contractions of rank r, of which many attain it: diag(1, 0) and diag(0.9, 0) for
    :math:`C_R` = diag(100, 1).

    >>> from poprisk.theory import euclidean_metric, signal_directions
    >>> directions = signal_directions(torch.diag(torch.tensor([10.0, 1.0])), euclidean_metric(2, dtype=torch.float32))
    >>> minimax_lost_motion(directions, 1, visibility=3.0)
    3.0
    """
    return visibility * directions.value_after(r)


@dataclass(frozen=True, eq=False)
class LostMotionPath:
    """What r = 0, 1, … directions lose of the test motion, against the bound."""

    ranks: list[int]
    realized: Float[Tensor, "ranks"]
    r""":math:`\|G (I - \Pi_r) R^{-1/2}\|^2`: the most that the run's own test operator loses, per complexity."""
    bound: Float[Tensor, "ranks"]
    r""":math:`\|\Gamma_Q\|\,\lambda_{r+1}`."""

    @property
    def tightness(self) -> Float[Tensor, "ranks"]:
        """Realized over bound; 0 where the bound is 0."""
        return torch.where(self.bound > 0, self.realized / self.bound, 0.0)


def lost_motion_path(
    directions: SignalDirections, test_transfer: Transfer, visibility: float, *, max_rank: int | None = None
) -> LostMotionPath:
    r"""The lost test motion of the run itself along the ranks, and the minimax bound.

    Args:
        directions: C_R.
        test_transfer: G, a matrix or an operator with few rows (it is transposed and whitened row by row).
        visibility: :math:`\|\Gamma_Q\|`.
        max_rank: Largest r; default: all known directions.

    Raises:
        DataError: G does not act on the same outputs.

    >>> from poprisk.theory import euclidean_metric, signal_directions
    >>> directions = signal_directions(torch.diag(torch.tensor([10.0, 1.0])), euclidean_metric(2, dtype=torch.float32))
    >>> lost_motion_path(directions, torch.tensor([[5.0, 1.0]]), visibility=1.25).realized
    tensor([26.,  1.,  0.])
    """
    X = _whitened_rows(directions, test_transfer)
    known = directions.whitened.shape[1]
    top = known if max_rank is None else min(max_rank, known)
    coordinates = X @ directions.whitened
    rest = X - coordinates @ directions.whitened.T
    # From the end: what is small is added to what is small, and nothing cancels.
    gram = rest @ rest.T + coordinates[:, top:] @ coordinates[:, top:].T
    realized = [_largest(gram)]
    for r in reversed(range(top)):
        gram = gram + coordinates[:, r : r + 1] @ coordinates[:, r : r + 1].T
        realized.append(_largest(gram))
    ranks = list(range(top + 1))
    bound = [minimax_lost_motion(directions, r, visibility) for r in ranks]
    return LostMotionPath(ranks, X.new_tensor(realized[::-1]), X.new_tensor(bound))


def admissible_bound(directions: SignalDirections, test_transfer: Transfer, visibility: float) -> Bound:
    r"""The realized test operator is in the admissible class, Eq. ``minimax_signal_admissible``.

    .. math:: R^{-1/2} G^\top G R^{-1/2} \preceq \|\Gamma_Q\|\, C_R

    The left side is the largest eigenvalue of the difference, the right side 0; every direction must be listed.

    Raises:
        DataError: G does not act on the same outputs, or only leading directions are known.
    """
    if directions.spectrum.rest > 0:
        raise DataError("the admissible class is checked on all directions: compute them from a factor of the gramian")
    X = _whitened_rows(directions, test_transfer)
    V, values = directions.whitened, directions.values
    largest = torch.linalg.eigvalsh(X.T @ X - visibility * (V * values) @ V.T)[-1].item()
    rounding = _share(directions, X) * torch.linalg.matrix_norm(X, 2).item() ** 2
    return Bound("admissible class", "eq:minimax_signal_admissible", "algebra", largest, 0.0, rounding)


def tail_bound(
    directions: SignalDirections, test_transfer: Transfer, visibility: float, r: int, h: Float[Tensor, "N"]
) -> Bound:
    r"""What test outputs lose of one output gradient h beyond r directions, Eq. ``minimax_signal_tail``.

    .. math:: \|G (I - \Pi_r) h\|^2 \le \|\Gamma_Q\|\, \lambda_{r+1}\, h^\top R (I - \Pi_r) h

    Args:
        directions: C_R.
        test_transfer: G.
        visibility: :math:`\|\Gamma_Q\|`.
        r: Directions kept.
        h: An output gradient, for instance that of the window's start.

    Raises:
        DataError: sizes do not fit.
    """
    require_length(h, directions.metric.size, "h")
    X = _whitened_rows(directions, test_transfer)
    whole = directions.metric.root @ h
    z = directions.projector(r).complement() @ whole
    right = minimax_lost_motion(directions, r, visibility) * z.square().sum().item()
    left = (X @ z).square().sum().item()
    off = _share(directions, X) * torch.linalg.matrix_norm(X, 2).item() * whole.norm().item()  # of G(I - Π)h
    return Bound("signal tail", "eq:minimax_signal_tail", "algebra", left, right, 2 * right**0.5 * off + off**2)


def _whitened_rows(directions: SignalDirections, test_transfer: Transfer) -> Tensor:
    r""":math:`G R^{-1/2}`, row by row."""
    require_shape(test_transfer, (test_transfer.shape[0], directions.metric.size), "test_transfer")
    if isinstance(test_transfer, Tensor):
        return (directions.metric.inverse_root @ test_transfer.T).T
    return (test_transfer @ directions.metric.inverse_root).adjoint().to_dense().T


def _lost_root(directions: SignalDirections, summary: Summary) -> Tensor:
    r""":math:`\Lambda^{1/2} V^\top (I - M)`, whose norm is that of :math:`C^{1/2}(I - M)`."""
    N = directions.metric.size
    if tuple(summary.shape) != (N, N):
        raise DataError(f"a summary must be a matrix [{N}, {N}] on the whitened outputs, got {list(summary.shape)}")
    V = directions.whitened
    return (directions.spectrum.roots * (V - summary.T @ V)).T


def _largest(gram: Tensor) -> float:
    return max(torch.linalg.eigvalsh(gram)[-1].item(), 0.0)


def _share(directions: SignalDirections, X: Tensor) -> float:
    """What rounding may change, relative to the sizes involved."""
    return _MARGIN * directions.metric.size**0.5 * max(torch.finfo(X.dtype).eps, directions.metric.accuracy)
