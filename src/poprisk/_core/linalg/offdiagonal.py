r"""The projector on the positive part of :math:`H^\top (11^\top - I) H`, from a b×b eigenproblem.

The matrix :math:`11^\top - I` has one positive eigenvalue, b-1, and by Sylvester's law of inertia no congruence gives
it a second one. So the positive part of the off-diagonal rate matrix has rank one at most, whatever the gradients are.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg.low_rank import LowRank
from poprisk.errors import DataError


@dataclass(frozen=True, eq=False)
class OffDiagonalProjector(LowRank):
    r""":math:`M^\star = f f^\top` of Eq. ``full_psd_projector``, or the zero matrix, and what it attains."""

    rate: Float[Tensor, ""]
    r"""Attained :math:`\operatorname{tr}(M^\star A)`: the positive eigenvalue of :math:`P^{1/2} A P^{1/2}`, or 0."""


def offdiagonal_projector(G: Float[Tensor, "b d"], P: float | Float[Tensor, "*P"] = 1.0) -> OffDiagonalProjector:
    r"""The maximizer of :math:`\operatorname{tr}(M A)` over :math:`0 \preceq M \preceq P`, Eq. ``full_psd_projector``.

    .. math:: M^\star = P^{1/2} 1_{(0,\infty)}(P^{1/2} A P^{1/2}) P^{1/2}, \qquad A = G^\top (11^\top - I) G / (b(b-1))

    With the reduced factorization :math:`P^{1/2} G^\top = Q R` the nonzero eigenvalues are those of the small matrix
    :math:`R (11^\top - I) R^\top / (b(b-1))`, and its eigenvector y gives :math:`f = P^{1/2} Q y`: nothing is inverted
    and no Gram matrix is rooted, so rank-deficient gradients need no special case.

    Differs from the paper: Theorem ``thm:kernel_increment`` calls the maximizer unique; any M that only adds directions
    of the null space of A attains the same value. This one adds none. Its rank is at most one.

    P is a diagonal or one number, not negative. An eigenvalue within rounding of 0 counts as 0.

    >>> M = offdiagonal_projector(torch.tensor([[3.0, 0.0], [2.0, 0.0]]), P=0.5)
    >>> M.matvec(torch.tensor([1.0, 1.0])), round(M.rate.item(), 4)  # one shared direction, of rate 0.5 * (3 * 2)
    (tensor([0.5000, 0.0000]), 3.0)
    """
    b, d = G.shape
    if b < 2:
        raise DataError(f"the off-diagonal rate needs at least 2 examples, got {b}: there is no pair to compare")
    G = G.to(torch.promote_types(G.dtype, torch.float32))
    root = _diagonal_root(P, G)
    H = G * root
    # Squares of very small or large gradients would leave the range of float32; the projector does not depend on scale.
    scale = H.abs().max() if d else H.new_zeros(())
    if not torch.isfinite(scale):
        raise DataError("gradients must be finite, got NaN or infinity: lower the learning rate or leave the batch out")
    scale = torch.where(scale > 0, scale, 1.0)
    Q, R = torch.linalg.qr((H / scale).T)
    R_1 = R.sum(dim=1)
    values, vectors = torch.linalg.eigh((torch.outer(R_1, R_1) - R @ R.T) / (b * (b - 1)))
    rounding = b * torch.finfo(G.dtype).eps
    if not d or values[-1] <= rounding * values.abs().max():
        return OffDiagonalProjector(factor=G.new_zeros(d, 0), rate=G.new_zeros(()))
    f = (root * (Q @ vectors[:, -1])).unsqueeze(1)
    return OffDiagonalProjector(factor=f, rate=values[-1] * scale.square())


def _diagonal_root(P: float | Tensor, G: Tensor) -> Tensor:
    P = torch.as_tensor(P, dtype=G.dtype, device=G.device)
    d = G.shape[1]
    if P.shape not in ((), (d,)):
        raise DataError(
            f"P must be one number or a diagonal [{d}], got shape {list(P.shape)}: full matrices are not taken"
        )
    if not (torch.isfinite(P) & (P >= 0)).all():
        raise DataError(
            f"P must be finite and not negative, got a minimum of {P.min().item()}: check the preconditioner"
        )
    return P.sqrt()
