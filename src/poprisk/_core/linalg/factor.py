r"""Positive semidefinite matrices kept as factors :math:`W = R^\top R`, and their spectra.

The singular values of R carry errors of eps·σ_1, so they resolve the eigenvalues σ² of W down to eps²·λ_1; from the
Gram matrix W itself nothing below eps·λ_1 is left.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg.norms import frobenius_norm
from poprisk._core.linalg.operator import require_real
from poprisk._core.linalg.spectra import Eigenpairs
from poprisk.errors import DataError

_ROWS_AT_A_TIME = 1024


@dataclass(frozen=True, eq=False)
class Spectrum:
    r"""Eigenvalues :math:`\lambda_i = \sigma_i^2` of a positive semidefinite matrix and their vectors, largest first.

    Made by ``spectrum_of_factor``, ``spectrum_of_matrix`` or ``spectrum_of_eigenpairs``. What is not listed is null
    space, or, for leading pairs only, not above ``rest``.
    """

    roots: Float[Tensor, "r"]
    """σ, the roots of the eigenvalues."""
    vectors: Float[Tensor, "n r"]
    """Orthonormal eigenvectors, one per column."""
    resolution: float
    """Eigenvalue, relative to the largest one, below which there is only rounding (or lack of convergence)."""
    rest: float = 0.0
    """Bound on the eigenvalues that are not listed."""

    @property
    def values(self) -> Float[Tensor, "r"]:
        """The eigenvalues λ."""
        return self.roots.square()

    @property
    def largest(self) -> float:
        """The largest eigenvalue; 0 for an empty spectrum."""
        return self.roots[0].item() ** 2 if len(self.roots) else 0.0

    def count_above(self, threshold: float) -> int:
        """Number of eigenvalues above an absolute threshold.

        Raises:
            DataError: the threshold is negative or lies below ``rest``, so that eigenvalues that were not computed
                may be above it.
        """
        if not threshold >= 0:
            raise DataError(f"a threshold on eigenvalues must not be negative, got {threshold}")
        if threshold < self.rest:
            raise DataError(
                f"eigenvalues are known down to {self.rest:.3g} only, got a threshold of {threshold:.3g}: compute more "
                "eigenpairs or raise the threshold"
            )
        # Compared as roots: squares of what a factor resolves can leave the range of float32.
        return int((self.roots.double() > threshold**0.5).sum())


def tsqr_append(R: Float[Tensor, "m n"] | None, rows: Float[Tensor, "r n"]) -> Float[Tensor, "p n"]:
    r"""The triangular factor of :math:`R^\top R + F^\top F`, where F are new rows.

    .. math:: \begin{pmatrix} R \\ F \end{pmatrix} = Q R', \qquad R'^\top R' = R^\top R + F^\top F

    Only orthogonal transformations touch the numbers: appending block after block (the sequential TSQR) keeps W to
    eps·σ_1 in its singular values, at the memory of one triangle and one block.

    R is None to start. The result is upper triangular with a diagonal that is not negative, and has min(m + r, n) rows.

    >>> tsqr_append(torch.tensor([[3.0]]), torch.tensor([[4.0]]))
    tensor([[5.]])
    """
    require_real(rows.dtype, "rows of a factor")
    if not torch.isfinite(rows).all():
        raise DataError("rows of a factor must be finite, got NaN or infinity: check the run behind them")
    n = rows.shape[1]
    factor: Tensor = rows.new_empty(0, n) if R is None else R
    if factor.dtype != rows.dtype or factor.device != rows.device:
        raise DataError(
            f"factor and rows must agree, got {factor.dtype} on {factor.device} and {rows.dtype} on {rows.device}: "
            "convert one of them"
        )
    for block in rows.split(max(n, _ROWS_AT_A_TIME)):
        factor = torch.linalg.qr(torch.cat([factor, block]), mode="r")[1]
    signs = torch.where(factor.diagonal() < 0, -1.0, 1.0).to(factor.dtype)
    return (signs.unsqueeze(1) * factor).triu()


def spectrum_of_factor(R: Float[Tensor, "m n"]) -> Spectrum:
    r"""Eigenvalues and vectors of :math:`W = R^\top R`, from the singular values of R; W is never formed.

    >>> spectrum_of_factor(torch.tensor([[0.0, 2.0], [1e-5, 0.0]])).values
    tensor([4.0000e+00, 1.0000e-10])
    """
    _check_finite(R, "a factor")
    _, roots, Vt = torch.linalg.svd(R, full_matrices=False)
    resolution = max(R.shape) * torch.finfo(R.dtype).eps
    return Spectrum(roots, Vt.T, resolution**2)


def spectrum_of_matrix(W: Float[Tensor, "n n"]) -> Spectrum:
    """Eigenvalues and vectors of a positive semidefinite matrix; negative ones within rounding become 0.

    >>> spectrum_of_matrix(torch.tensor([[2.0, 2.0], [2.0, 2.0]])).roots.round(decimals=3)
    tensor([2., 0.])
    """
    _check_finite(W, "a matrix")
    n, eps = W.shape[0], torch.finfo(W.dtype).eps
    size, asymmetry = frobenius_norm(W), frobenius_norm(W - W.T)
    if asymmetry > eps**0.5 * size:
        raise DataError(
            f"W must be symmetric, got ‖W - Wᵀ‖ = {asymmetry:.2g} for ‖W‖ = {size:.2g}: check how it is made"
        )
    values, V = torch.linalg.eigh((W + W.T) / 2)
    if n and values[0] < -10 * n * eps * size - asymmetry:
        raise DataError(
            f"W must be positive semidefinite, got an eigenvalue of {values[0]:.3g} beside ‖W‖ = {size:.2g}: check how "
            "it is made"
        )
    return Spectrum(values.clamp(min=0).sqrt().flip(0), V.flip(1), n * eps)


def spectrum_of_eigenpairs(pairs: Eigenpairs) -> Spectrum:
    r"""The leading part of a spectrum, from ``top_eigenpairs`` of a positive semidefinite operator.

    What was not computed is at most the last value plus its residual; thresholds below that are refused.

    >>> from poprisk._core.linalg import diagonal, top_eigenpairs
    >>> pairs = top_eigenpairs(diagonal(torch.tensor([4.0, 1.0, 0.0, 0.0])), k=3)
    >>> spectrum_of_eigenpairs(pairs).count_above(0.5)
    2
    """
    values, residuals = pairs.values, pairs.residuals
    if (values < -residuals).any() or (values.diff() > 0).any():
        raise DataError(
            f"leading eigenpairs of a positive semidefinite operator descend to 0, got {values.tolist()}: ask for "
            'which="largest"'
        )
    n, k = pairs.vectors.shape
    largest = values[0].item()
    rest = 0.0 if k == n else max(values[-1].item(), 0.0) + residuals[-1].item()
    resolution = residuals.max().item() / largest if largest > 0 else 0.0
    return Spectrum(values.clamp(min=0).sqrt(), pairs.vectors, resolution, rest)


def as_spectrum(W: Float[Tensor, "n n"] | Spectrum) -> Spectrum:
    """A spectrum as it is, a matrix decomposed."""
    return W if isinstance(W, Spectrum) else spectrum_of_matrix(W)


def _check_finite(X: Tensor, what: str) -> None:
    if not torch.isfinite(X).all():
        raise DataError(f"the spectrum of {what} needs finite entries, got NaN or infinity: check the run behind it")
