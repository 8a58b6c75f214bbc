r"""Symmetric low-rank matrices :math:`M = F F^\top`, and the product of any preconditioner with rows of vectors."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg.operator import SymmetricOperator
from poprisk.errors import DataError


@dataclass(frozen=True, eq=False)
class LowRank(SymmetricOperator):
    r"""A positive semidefinite matrix :math:`M = F F^\top` kept as its factor.

    >>> import torch
    >>> M = LowRank(torch.tensor([[1.0], [2.0]]))
    >>> M.matvec(torch.tensor([1.0, 1.0]))
    tensor([3., 6.])
    """

    factor: Float[Tensor, "d r"]
    """F, one column for each dimension of the range."""

    @property
    def rank(self) -> int:
        """Number of columns of the factor."""
        return self.factor.shape[1]

    @property
    def _like(self) -> Tensor:
        return self.factor

    def _matmat(self, X: Tensor) -> Tensor:
        return self.factor @ (self.factor.T @ X)  # 2dr multiplications for each column

    def to_dense(self, block_size: int | None = None) -> Float[Tensor, "d d"]:
        """The d×d matrix; for tests and small problems. The factor is at hand, so no blocks are needed."""
        return self.factor @ self.factor.T


# M as a multiple of the identity, a diagonal, a dense matrix or a low-rank one; `precondition` checks the size.
Preconditioner = float | Float[Tensor, "*M"] | LowRank


def precondition(M: Preconditioner, rows: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
    """M v for every row v, whatever form M has.

    >>> import torch
    >>> rows = torch.tensor([[1.0, 2.0]])
    >>> precondition(2.0, rows), precondition(torch.tensor([3.0, 0.0]), rows)
    (tensor([[2., 4.]]), tensor([[3., 0.]]))
    """
    d = rows.shape[-1]
    if isinstance(M, LowRank):
        if M.shape == (d, d):
            return (rows @ M.factor) @ M.factor.T
    elif not isinstance(M, Tensor) or M.shape in ((), (d,)):
        return rows * M
    elif M.shape == (d, d):
        return rows @ M.T
    raise DataError(
        f"M must be a scalar, a diagonal [{d}], a matrix [{d}, {d}] or a low-rank factor of that size, got shape "
        f"{list(M.shape)}: build it for the same flat parameters as the gradients"
    )
