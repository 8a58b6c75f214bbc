r"""Leading singular triplets of any operator, from products with it and its adjoint, each with a certificate.

The search runs on A itself (block Golub–Kahan): with :math:`A V = U B` the small matrix B is decomposed, never
:math:`A^\top A`, so that singular values are resolved to rounding times the largest one, not to its root.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg.norms import column_norms
from poprisk._core.linalg.operator import LinearOperator
from poprisk._core.linalg.random_vectors import default_generator
from poprisk._core.linalg.ritz import (
    Progress,
    RitzSpace,
    SearchOptions,
    check_initial,
    orthonormal_extension,
    rounding_level,
    search,
)
from poprisk.errors import DataError


@dataclass(frozen=True, eq=False)
class SingularTriplets:
    r"""Leading triplets :math:`A v_i \approx \sigma_i u_i`, :math:`A^\top u_i \approx \sigma_i v_i`, with certificates.

    The pair :math:`(u_i, v_i)/\sqrt 2` is an approximate eigenvector of the symmetric matrix with blocks A and
    :math:`A^\top` off its diagonal, whose eigenvalues are :math:`\pm\sigma` and zeros; so some singular value (or 0)
    lies within ``residuals[i]`` of ``values[i]``.
    """

    left: Float[Tensor, "rows k"]
    """Orthonormal u, one per column."""
    values: Float[Tensor, "k"]
    """Singular values, largest first; 0 where they are rounding beside the largest one."""
    right: Float[Tensor, "columns k"]
    """Orthonormal v, one per column."""
    left_residuals: Float[Tensor, "k"]
    r""":math:`\|A v_i - \sigma_i u_i\|` from products made for the purpose at the end."""
    right_residuals: Float[Tensor, "k"]
    r""":math:`\|A^\top u_i - \sigma_i v_i\|`, likewise."""
    products: int
    """Products of A or its adjoint with a vector, those of the certificate included."""
    converged: bool
    """Whether every residual is within the tolerance."""

    @property
    def residuals(self) -> Float[Tensor, "k"]:
        """Root mean square of the two residuals of each triplet: the bound on its error."""
        return torch.hypot(self.left_residuals, self.right_residuals) / 2**0.5

    @property
    def nonzero(self) -> int:
        """Number of values that are not zero within their residual."""
        return int((self.values > self.residuals).sum())


def top_singular_triplets(
    A: LinearOperator,
    k: int,
    *,
    tolerance: float | None = None,
    max_products: int | None = None,
    initial: Float[Tensor, "columns j"] | None = None,
    oversampling: int = 5,
    max_basis: int | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> SingularTriplets:
    """The k largest singular values of an operator and their vectors.

    Repeated values, values below rounding and k above the rank are treated as in ``top_eigenpairs``, whose arguments
    these are. ``max_products`` counts products with A and with its adjoint; ``initial`` are right vectors.

    Raises:
        DataError: products that are not finite.
        HyperparameterError: k, tolerance, budget or sizes out of range.

    >>> from poprisk._core.linalg import from_dense
    >>> triplets = top_singular_triplets(from_dense(torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0]])), k=2)
    >>> (triplets.values * 1e4).round() / 1e4, triplets.nonzero
    (tensor([2., 0.]), 1)
    """
    check_initial(initial, A.shape[1], A)
    wide = A.shape[0] < A.shape[1]
    # So that the right basis is the one that can be exhausted.
    space = _BilinearSpace(A.adjoint() if wide else A, generator or default_generator(A.device))
    if wide and initial is not None:
        initial = A.matmat(initial).detach()
        space.products += initial.shape[1]
    reached = search(A, space, k, SearchOptions(tolerance, max_products, oversampling, max_basis, progress), initial)
    return _certified(A, space, k, reached, wide)


class _BilinearSpace(RitzSpace):
    """The basis V and an orthonormal U with A V inside the span of U, Aᵀ U, and the small matrix B = UᵀAV."""

    products_per_direction = 2

    def __init__(self, A: LinearOperator, generator: torch.Generator) -> None:
        super().__init__(A, generator)
        self.U = self.basis.new_empty(A.shape[0], 0)
        self.AtU, self.B = self.basis, self.basis.new_empty(0, 0)

    def grow(self, W: Tensor) -> None:
        W = orthonormal_extension(W, self.basis, self.generator)
        AW = self.A.matmat(W).detach()
        if not torch.isfinite(AW).all():
            raise DataError("products with the operator must be finite, got NaN or infinity: check the run behind it")
        new_U = orthonormal_extension(AW, self.U, self.generator)
        self.AtU = torch.cat([self.AtU, self.A.adjoint().matmat(new_U).detach()], dim=1)
        self.products += 2 * W.shape[1]
        m = self.B.shape[0]
        self.basis, self.U = torch.cat([self.basis, W], dim=1), torch.cat([self.U, new_U], dim=1)
        # A V lies in the old U, so that the rows of the new one have nothing to do with the old columns.
        below = self.B.new_zeros(W.shape[1], m)
        self.B = torch.cat([torch.cat([self.B, below]), self.U.T @ AW], dim=1)

    def residuals(self, count: int) -> tuple[Tensor, Tensor]:
        X, values, Yt = torch.linalg.svd(self.B)
        X, Y = X[:, :count], Yt[:count].T
        return self.AtU @ X - (self.basis @ Y) * values[:count], values.max()

    def compress(self, keep: int) -> None:
        X, values, Yt = torch.linalg.svd(self.B)
        X, Y = X[:, :keep], Yt[:keep].T
        self.U, self.AtU, self.basis = self.U @ X, self.AtU @ X, self.basis @ Y
        self.B = values[:keep].diag()


def _certified(A: LinearOperator, space: _BilinearSpace, k: int, tolerance: float, wide: bool) -> SingularTriplets:
    """Values and residuals from new products with A and its adjoint."""
    X, values, Yt = torch.linalg.svd(space.B)
    left, right = space.U @ X[:, :k], space.basis @ Yt[:k].T
    if wide:
        left, right = right, left
    AV, AtU = A.matmat(right).detach(), A.adjoint().matmat(left).detach()
    largest = values.max()
    values = torch.where(values[:k] > rounding_level(A) * largest, values[:k], 0.0)
    left_residuals, right_residuals = column_norms(AV - left * values), column_norms(AtU - right * values)
    worst = torch.maximum(left_residuals.max(), right_residuals.max())
    return SingularTriplets(
        left=left,
        values=values,
        right=right,
        left_residuals=left_residuals,
        right_residuals=right_residuals,
        products=space.products + 2 * k,
        converged=bool(worst <= tolerance * largest),
    )
