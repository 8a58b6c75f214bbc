r"""Orthogonal projectors onto parts of a spectrum: range (signal channel), null space (reservoir), and ε-versions."""

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


def relative_threshold(spectrum: Spectrum, cutoff: float | None) -> float:
    """The absolute threshold of a relative cut-off; by default what rounding leaves, and above what is not known."""
    if cutoff is None:
        return max(spectrum.resolution * spectrum.largest, spectrum.rest)
    if not 0 <= cutoff < 1:
        raise HyperparameterError(f"cutoff must lie in [0, 1), relative to the largest eigenvalue, got {cutoff}")
    return cutoff * spectrum.largest


def _leading(spectrum: Spectrum, threshold: float) -> OrthogonalProjector:
    return OrthogonalProjector(spectrum.vectors[:, : spectrum.count_above(threshold)])
