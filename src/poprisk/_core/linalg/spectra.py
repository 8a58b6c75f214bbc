"""Leading eigenpairs of symmetric operators, null spaces and multiplicities included, each with a certificate."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg.norms import column_norms, frobenius_norm
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

Which = Literal["largest", "smallest", "magnitude"]

# Products that disagree with their transposes by more than this share of the operator's size are no rounding.
_ASYMMETRY = 1e-2


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    r"""Leading eigenpairs :math:`A v_i \approx \lambda_i v_i`, orthonormal, with what is proved about them.

    For symmetric A some eigenvalue lies within ``residuals[i]`` of ``values[i]``; with multiplicities counted, k
    eigenvalues can be paired with the k values so that none is further off than ``joint_bound``. That these are the
    leading ones is not proved by residuals. It rests on the random start, which has a component along every
    eigenvector with probability one, and holds down to the tolerance: eigenvalues about as small as the tolerance
    times the largest one may still be missing or too small.
    """

    values: Float[Tensor, "k"]
    """Eigenvalues in the order asked for; 0 where they are rounding beside the largest one."""
    vectors: Float[Tensor, "n k"]
    """Orthonormal eigenvectors, one per column, also for eigenvalue 0."""
    residuals: Float[Tensor, "k"]
    r""":math:`\|A v_i - \lambda_i v_i\|` from products made for the purpose at the end."""
    products: int
    """Products of A with a vector, those of the certificate included."""
    converged: bool
    """Whether every residual is within the tolerance."""
    surrogate_products: int = 0
    """Products of the operator searched in A's place, if there was one."""

    @property
    def nonzero(self) -> int:
        """Number of values that are not zero within their residual: below k, the rest is null space up to that."""
        return int((self.values.abs() > self.residuals).sum())

    @property
    def joint_bound(self) -> float:
        r""":math:`(\sum_i \|A v_i - \lambda_i v_i\|^2)^{1/2}`, a bound on the paired error of all k values."""
        return frobenius_norm(self.residuals).item()

    def error_bounds(self, gap: float | Float[Tensor, "k"] | None = None) -> Float[Tensor, "k"]:
        r"""Bound on the distance of each value to the nearest eigenvalue: the residual r, or :math:`\min(r, r^2/gap)`.

        Args:
            gap: Distance from each value to the rest of the spectrum, if it is known (Kato and Temple): for a cluster,
                from the value to all eigenvalues but the nearest one.
        """
        if gap is None:
            return self.residuals
        gap = torch.as_tensor(gap, dtype=self.residuals.dtype, device=self.residuals.device)
        return torch.minimum(self.residuals, torch.where(gap > 0, self.residuals * (self.residuals / gap), torch.inf))


def top_eigenpairs(
    A: LinearOperator,
    k: int,
    *,
    which: Which = "largest",
    tolerance: float | None = None,
    max_products: int | None = None,
    initial: Float[Tensor, "n j"] | None = None,
    surrogate: LinearOperator | None = None,
    oversampling: int = 5,
    max_basis: int | None = None,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Eigenpairs:
    r"""The k leading eigenpairs of a symmetric operator, by Rayleigh–Ritz on a growing block Krylov space.

    Made for operators whose products are dear and whose null space is large. The space keeps all its history with full
    reorthogonalisation, repeated eigenvalues come with their multiplicity, and for k above the rank the values are 0
    with orthonormal vectors. Eigenvalues are resolved to rounding times the largest one, not to rounding times
    themselves: below ``4√n·eps·|λ_1|`` they are returned as 0. See ``factor`` for twice as many digits.

    Args:
        A: The operator; it must be known to be symmetric (``declare_symmetric`` vouches for it).
        k: Number of pairs.
        which: "largest" and "smallest" eigenvalues, or "magnitude": those furthest from 0.
        tolerance: Largest residual accepted, relative to the largest magnitude met; by default the root of the
            machine epsilon, which for values that are well apart leaves errors of epsilon size.
        max_products: Most products of A with vectors; by default 51 k + 250. Never exceeded; ``converged`` tells. A
            surrogate may use as many.
        initial: Warm start, for instance the vectors of an earlier, similar operator.
        surrogate: A cheaper operator near A, searched in its place. What is returned and certified are A's own pairs
            in the space found, k products with A; if these residuals are too large, the search goes on with A. That
            the pairs are A's leading ones then rests on the surrogate, to within its distance from A.
        oversampling: Pairs followed beyond k; products come in blocks of up to k + oversampling vectors.
        max_basis: Dimension at which the space is compressed to its leading half; memory is twice as many vectors.
        generator: Source of the random start; default: one with a fixed seed.
        progress: Called after every round with the products made and the pairs converged.

    Returns:
        Values, vectors, residuals and the price.

    Raises:
        DataError: the operator is not known to be symmetric, its products show that it is not, or are not finite.
        HyperparameterError: k, tolerance, budget or sizes out of range.

    >>> from poprisk._core.linalg import diagonal
    >>> pairs = top_eigenpairs(diagonal(torch.tensor([3.0, 1.0, 3.0, 0.0, 0.0, 0.0])), k=4)
    >>> (pairs.values.abs() * 1e4).round() / 1e4, pairs.nonzero, pairs.converged
    (tensor([3., 3., 1., 0.]), 3, True)
    """
    if not A.symmetric:
        raise DataError(
            f"top_eigenpairs needs a symmetric operator, got {A!r}, not known to be one: pass declare_symmetric(A), or "
            "use top_singular_triplets"
        )
    check_initial(initial, A.shape[0], A)
    generator = generator or default_generator(A.device)
    options = SearchOptions(tolerance, max_products, oversampling, max_basis, progress)

    def searched(B: LinearOperator, initial: Tensor | None, options: SearchOptions) -> tuple[_SymmetricSpace, float]:
        space = _SymmetricSpace(B, which, generator)
        return space, search(B, space, k, options, initial)

    if surrogate is None:
        space, reached = searched(A, initial, options)
        return _certified(A, space, k, reached, space.products)
    _check_surrogate(A, surrogate)
    # Half of the residual accepted is for the search, half for the distance of the two operators.
    half = None if tolerance is None else max(tolerance / 2, 2 * rounding_level(A))
    space, reached = searched(surrogate, initial, replace(options, tolerance=half))
    found = replace(_certified(A, space, k, tolerance or reached), surrogate_products=space.products)
    affordable = None if max_products is None else max_products - k
    if found.converged or (affordable is not None and affordable < 3 * k + oversampling):
        return found
    if max_basis is not None:  # room for the warm start, which whoever set it could not know of
        max_basis = max(max_basis, 2 * (2 * k + oversampling))
    space, reached = searched(A, found.vectors, replace(options, max_products=affordable, max_basis=max_basis))
    done = _certified(A, space, k, reached, space.products + found.products)
    return replace(done, surrogate_products=found.surrogate_products)


def _check_surrogate(A: LinearOperator, surrogate: LinearOperator) -> None:
    same = surrogate.shape == A.shape and surrogate.dtype == A.dtype and surrogate.device == A.device
    if not (same and surrogate.symmetric):
        raise DataError(
            f"a surrogate must be symmetric, of the operator's shape and dtype and on its device, got {surrogate!r} "
            f"for {A!r}: build both in the same way"
        )


class _SymmetricSpace(RitzSpace):
    """The basis Q with A Q and the small matrix T = QᵀAQ."""

    def __init__(self, A: LinearOperator, which: Which, generator: torch.Generator) -> None:
        super().__init__(A, generator)
        self.which: Which = which
        self.AQ, self.T = self.basis, self.basis.new_empty(0, 0)

    def grow(self, W: Tensor) -> None:
        W = orthonormal_extension(W, self.basis, self.generator)
        AW = self.A.matmat(W).detach()
        self.products += W.shape[1]
        seen_before = self.AQ.T @ W
        self.basis, self.AQ = torch.cat([self.basis, W], dim=1), torch.cat([self.AQ, AW], dim=1)
        columns = self.basis.T @ AW
        _check_products(columns, seen_before, self.T)
        m = self.T.shape[0]
        corner = (columns[m:] + columns[m:].T) / 2
        side = (columns[:m] + seen_before) / 2
        self.T = torch.cat([torch.cat([self.T, side], dim=1), torch.cat([side.T, corner], dim=1)])

    def ritz(self) -> tuple[Tensor, Tensor]:
        """Values and coefficients of all Ritz pairs, leading ones first."""
        values, Y = torch.linalg.eigh(self.T)
        key = {"largest": -values, "smallest": values, "magnitude": -values.abs()}[self.which]
        order = key.argsort(stable=True)
        return values[order], Y[:, order]

    def residuals(self, count: int) -> tuple[Tensor, Tensor]:
        values, Y = self.ritz()
        Y = Y[:, :count]
        return self.AQ @ Y - (self.basis @ Y) * values[:count], values.abs().max()

    def compress(self, keep: int) -> None:
        values, Y = self.ritz()
        Y = Y[:, :keep]
        self.basis, self.AQ, self.T = self.basis @ Y, self.AQ @ Y, values[:keep].diag()


def _check_products(columns: Tensor, seen_before: Tensor, T: Tensor) -> None:
    if not torch.isfinite(columns).all():
        raise DataError("products with the operator must be finite, got NaN or infinity: check the run behind it")
    m = seen_before.shape[0]
    corner = columns[m:]
    asymmetry = frobenius_norm(torch.cat([columns[:m] - seen_before, corner - corner.T]))
    size = torch.maximum(frobenius_norm(T), frobenius_norm(columns))
    if asymmetry > _ASYMMETRY * size:
        raise DataError(
            f"the operator is said to be symmetric, but its products differ from their transposes by {asymmetry:.2g} "
            f"on a scale of {size:.2g}: check the adjoint, or use top_singular_triplets"
        )


def _certified(
    A: LinearOperator, space: _SymmetricSpace, k: int, tolerance: float, products_before: int = 0
) -> Eigenpairs:
    """Values and residuals from new products: nothing of the recurrence is taken on trust."""
    coefficients = space.ritz()[1][:, :k]
    fresh = _SymmetricSpace(A, space.which, space.generator)
    fresh.grow(space.basis @ coefficients)
    values, Y = fresh.ritz()
    V, AV = fresh.basis @ Y, fresh.AQ @ Y
    largest = torch.maximum(values.abs().max(), torch.linalg.eigvalsh(space.T).abs().max())
    values = torch.where(values.abs() > rounding_level(A) * largest, values, 0.0)
    residuals = column_norms(AV - V * values)
    return Eigenpairs(
        values=values,
        vectors=V,
        residuals=residuals,
        products=products_before + fresh.products,
        converged=bool((residuals <= tolerance * largest).all()),
    )
