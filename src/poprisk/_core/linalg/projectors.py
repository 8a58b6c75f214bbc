r"""Projectors onto parts of a spectrum (signal channel, reservoir, ε-versions), and :math:`W^{\dagger/2}` on them."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg.factor import Spectrum, as_spectrum
from poprisk._core.linalg.operator import SymmetricOperator
from poprisk.errors import HyperparameterError


@dataclass(frozen=True, eq=False, repr=False)
class OrthogonalProjector(SymmetricOperator):
    r""":math:`B B^\top` for orthonormal columns B, or :math:`I - B B^\top` for the complement.

    >>> import torch
    >>> P = OrthogonalProjector(torch.tensor([[1.0], [0.0]]))
    >>> P @ torch.tensor([3.0, 4.0]), P.complement() @ torch.tensor([3.0, 4.0])
    (tensor([3., 0.]), tensor([0., 4.]))
    """

    basis: Float[Tensor, "n r"]
    """B, orthonormal."""
    complemented: bool = False
    """Whether this is the projector onto what is orthogonal to B."""

    @property
    def rank(self) -> int:
        """Dimension of the range."""
        n, r = self.basis.shape
        return n - r if self.complemented else r

    @property
    def _like(self) -> Tensor:
        return self.basis

    def complement(self) -> "OrthogonalProjector":
        """I minus this projector."""
        return OrthogonalProjector(self.basis, not self.complemented)

    def _matmat(self, X: Tensor) -> Tensor:
        inside = self.basis @ (self.basis.T @ X)
        return X - inside if self.complemented else inside


class Channels(NamedTuple):
    """Two projectors that add up to the identity."""

    signal: OrthogonalProjector
    """Onto the eigenvectors above the threshold."""
    reservoir: OrthogonalProjector
    """Onto the others."""


def range_projector(W: Float[Tensor, "n n"] | Spectrum, cutoff: float | None = None) -> OrthogonalProjector:
    r"""The projector onto the range of W: the signal channel, for the cumulative dissipation.

    Args:
        W: A positive semidefinite matrix, or its spectrum (from a factor it reaches twice as deep).
        cutoff: Eigenvalues at most this share of the largest one count as 0; by default what rounding leaves.

    Raises:
        HyperparameterError: the cut-off is outside [0, 1).
        DataError: W is not positive semidefinite, or is not known down to the cut-off.

    >>> import torch
    >>> range_projector(torch.diag(torch.tensor([2.0, 1.0, 0.0]))).rank
    2
    """
    spectrum = as_spectrum(W)
    return _leading(spectrum, relative_threshold(spectrum, cutoff))


def null_projector(W: Float[Tensor, "n n"] | Spectrum, cutoff: float | None = None) -> OrthogonalProjector:
    """The projector onto the null space of W, the reservoir: what ``range_projector`` leaves.

    >>> import torch
    >>> null_projector(torch.diag(torch.tensor([2.0, 1.0, 0.0]))) @ torch.ones(3)
    tensor([0., 0., 1.])
    """
    return range_projector(W, cutoff).complement()


def epsilon_projectors(W: Float[Tensor, "n n"] | Spectrum, epsilon: float) -> Channels:
    r"""The spectral projectors :math:`1_{(\varepsilon,\infty)}(W)` and :math:`1_{[0,\varepsilon]}(W)`.

    Args:
        W: A positive semidefinite matrix or its spectrum.
        epsilon: Threshold in the units of W, not relative.

    Raises:
        DataError: a negative threshold, W not positive semidefinite, or not known down to the threshold.

    >>> import torch
    >>> signal, reservoir = epsilon_projectors(torch.diag(torch.tensor([2.0, 1.0, 0.5])), 1.0)
    >>> signal.rank, reservoir.rank
    (1, 2)
    """
    signal = _leading(as_spectrum(W), float(epsilon))
    return Channels(signal, signal.complement())


@dataclass(frozen=True, eq=False, repr=False)
class InverseSquareRoot(SymmetricOperator):
    r""":math:`W^{\dagger/2} = V \operatorname{diag}(\sigma^{-1}) V^\top`, over the eigenvectors above the cut-off."""

    roots: Float[Tensor, "r"]
    r"""σ, the roots of the eigenvalues that were kept."""
    vectors: Float[Tensor, "n r"]
    """V, their eigenvectors."""
    cutoff: float
    """Eigenvalues up to this, in the units of W, were taken as 0."""

    @property
    def rank(self) -> int:
        """Eigenvalues kept."""
        return len(self.roots)

    @property
    def _like(self) -> Tensor:
        return self.vectors

    @property
    def signal(self) -> OrthogonalProjector:
        r"""The projector onto the range, :math:`W^{\dagger/2} W W^{\dagger/2}`."""
        return OrthogonalProjector(self.vectors)

    @property
    def reservoir(self) -> OrthogonalProjector:
        """The projector onto what was cut off."""
        return self.signal.complement()

    def _matmat(self, X: Tensor) -> Tensor:
        return self.vectors @ ((self.vectors.T @ X) / self.roots.unsqueeze(1))


def inverse_square_root(W: Float[Tensor, "n n"] | Spectrum, cutoff: float | None = None) -> InverseSquareRoot:
    r"""The pseudo-inverse square root of a positive semidefinite matrix.

    Args:
        W: The matrix, or its spectrum: ``spectrum_of_factor(R)`` for :math:`W = R^\top R` kept as a factor,
            ``spectrum_of_eigenpairs`` for the leading part of an operator.
        cutoff: Eigenvalues at most this share of the largest one count as 0. By default what rounding leaves: n·eps
            for a matrix, (n·eps)² for a factor; for leading pairs, all that is certain to lie above the rest.

    Raises:
        HyperparameterError: the cut-off is outside [0, 1).
        DataError: W is not positive semidefinite, or is not known down to the cut-off.

    >>> import torch
    >>> root = inverse_square_root(torch.diag(torch.tensor([4.0, 0.0])))
    >>> root @ torch.ones(2), root.rank, root.reservoir @ torch.ones(2)
    (tensor([0.5000, 0.0000]), 1, tensor([0., 1.]))
    """
    spectrum = as_spectrum(W)
    threshold = relative_threshold(spectrum, cutoff)
    rank = spectrum.count_above(threshold)
    return InverseSquareRoot(spectrum.roots[:rank], spectrum.vectors[:, :rank], threshold)


def relative_threshold(spectrum: Spectrum, cutoff: float | None) -> float:
    """The absolute threshold of a relative cut-off; by default what rounding leaves, and above what is not known."""
    if cutoff is None:
        return max(spectrum.resolution * spectrum.largest, spectrum.rest)
    if not 0 <= cutoff < 1:
        raise HyperparameterError(f"cutoff must lie in [0, 1), relative to the largest eigenvalue, got {cutoff}")
    return cutoff * spectrum.largest


def _leading(spectrum: Spectrum, threshold: float) -> OrthogonalProjector:
    return OrthogonalProjector(spectrum.vectors[:, : spectrum.count_above(threshold)])
