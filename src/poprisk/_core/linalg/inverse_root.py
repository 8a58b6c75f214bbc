r"""The pseudo-inverse square root :math:`W^{\dagger/2}` with a stated cut-off, and the two spaces it tells apart."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg.factor import Spectrum, as_spectrum
from poprisk._core.linalg.operator import SymmetricOperator
from poprisk._core.linalg.projectors import OrthogonalProjector, relative_threshold


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
