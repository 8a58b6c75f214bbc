r"""Signal channel and reservoir of a run, and the two transfers measured per root of dissipation.

Everything here follows from three matrices: a factor R of the dissipation gramian :math:`W = R^\top R`, the train
transfer D and the test transfer G. It is computed in the eigenbasis V of W, from the singular values σ of R:

.. math:: C_S V = D V \sigma^{-1}, \qquad C_Q V = G V \sigma^{-1}

so that only D V and G V are needed: D and G may be matrices or operators known by their products, and V all of the
signal channel or its leading part.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import Channels as SpectralChannels
from poprisk._core.linalg import LinearOperator, OrthogonalProjector, Spectrum, epsilon_projectors, spectrum_of_factor
from poprisk.errors import DataError, HyperparameterError

Transfer = Float[Tensor, "_ _"] | LinearOperator
"""A matrix, or an operator known by its products."""

# Roots of W below this many rounding errors of the largest one are left to the reservoir: C = D/σ, whose numerator is
# known to rounding of ‖D‖, has four digits at the last direction kept.
_ROOT_MARGIN = 1e4
# A singular value of C_S counts when it is this many times what rounding errors of size eps·‖D‖ in D would make.
_RANK_MARGIN = 20.0


@dataclass(frozen=True, eq=False)
class DissipationChannels:
    r"""Signal channel, reservoir and the dissipation-normalized channels of a window (``def:normalized_channels``).

    .. math:: C_S = D W^{\dagger/2}, \qquad C_Q = G W^{\dagger/2}, \qquad \Gamma_Q = C_Q^\top C_Q

    Made by ``dissipation_channels``. Columns named *reduced* are coordinates in the eigenbasis V of the signal
    channel; the full matrices are properties.
    """

    spectrum: Spectrum
    """All that is known of W: roots σ of its eigenvalues and their vectors, largest first."""
    cutoff: float
    """Eigenvalues of W up to this, in the units of W, belong to the reservoir."""
    train_transfer: Transfer
    """D."""
    test_transfer: Transfer
    """G."""
    reduced_train: Float[Tensor, "N r"]
    """C_S V."""
    reduced_test: Float[Tensor, "M r"]
    """C_Q V."""
    train_left: Float[Tensor, "N r"]
    """Left singular vectors of C_S on the signal channel."""
    train_roots: Float[Tensor, "r"]
    """Singular values of C_S on the signal channel, largest first, zeros included."""
    train_right: Float[Tensor, "r r"]
    """Right singular vectors of C_S V, one per column."""
    train_rank: int
    """Singular values of C_S above rounding error, or above the requested cutoff."""

    @property
    def rank(self) -> int:
        """Dimension of the signal channel."""
        return self.reduced_train.shape[1]

    @property
    def roots(self) -> Float[Tensor, "r"]:
        """σ on the signal channel."""
        return self.spectrum.roots[: self.rank]

    @property
    def vectors(self) -> Float[Tensor, "N r"]:
        """V, an orthonormal basis of the signal channel."""
        return self.spectrum.vectors[:, : self.rank]

    @property
    def signal(self) -> OrthogonalProjector:
        """The projector onto the signal channel, range(W) down to the cut-off."""
        return OrthogonalProjector(self.vectors)

    @property
    def reservoir(self) -> OrthogonalProjector:
        """The projector onto the reservoir, what the signal channel leaves."""
        return self.signal.complement()

    def split_at(self, epsilon: float) -> SpectralChannels:
        r"""The spectral projectors :math:`P_{>\varepsilon}` and :math:`P_{\le\varepsilon}` of ``def:signal_channel``.

        Args:
            epsilon: Threshold in the units of W, not relative.

        Raises:
            DataError: a negative threshold, or one below what is known of the spectrum.
        """
        return epsilon_projectors(self.spectrum, epsilon)

    @property
    def train_channel(self) -> Float[Tensor, "N N"]:
        """C_S."""
        return self.reduced_train @ self.vectors.T

    @property
    def test_channel(self) -> Float[Tensor, "M N"]:
        """C_Q."""
        return self.reduced_test @ self.vectors.T

    @property
    def visibility_gramian(self) -> Float[Tensor, "N N"]:
        r""":math:`\Gamma_Q = W^{\dagger/2} G^\top G W^{\dagger/2}`."""
        C_Q = self.test_channel
        return C_Q.T @ C_Q

    @cached_property
    def visibility_spectrum(self) -> Float[Tensor, "k"]:
        r"""The eigenvalues of :math:`\Gamma_Q` that can be above 0, largest first."""
        return torch.linalg.svdvals(self.reduced_test).square()

    @property
    def visibility_norm(self) -> float:
        r""":math:`\|\Gamma_Q\|`, the most squared test displacement per unit of dissipation; 0 for an empty channel.

        Over the signal channel: where a cut-off leaves directions out, ``complete`` has the norm over all of them.
        """
        return self.visibility_spectrum[0].item() if len(self.visibility_spectrum) else 0.0

    @property
    def transfer_projector(self) -> OrthogonalProjector:
        r""":math:`P_{tr} = C_S^\dagger C_S`, onto the row space of C_S.

        Differs from the paper, which says "column space" beside the same formula.
        """
        return OrthogonalProjector(self.vectors @ self.train_right[:, : self.train_rank])

    @property
    def smallest_train_root(self) -> float:
        r""":math:`\sigma_{min}(C_S)` over the signal channel: how far D is from losing a direction that dissipated.

        0 for an empty signal channel. Where it is no more than rounding, ``unresolved`` is above 0.
        """
        return self.train_roots[-1].item() if self.rank else 0.0

    @property
    def unresolved(self) -> int:
        """Directions of the signal channel whose train displacement cannot be distinguished from 0."""
        return self.rank - self.train_rank

    @cached_property
    def complete(self) -> "DissipationChannels":
        r"""The same window with every direction of W above rounding error in its signal channel.

        A cut-off chooses a part of W to work on. What bounds all directions, such as :math:`\|G h\|^2 \le
        \|\Gamma_Q\|\, h^\top W h`, needs :math:`\Gamma_Q` on all of them.

        Raises:
            DataError: only a leading part of W is known.

        >>> R, G = torch.diag(torch.tensor([1.0, 0.1])), torch.tensor([[1.0, 1.0]])
        >>> part = dissipation_channels(R, torch.eye(2), G, cutoff=0.5)
        >>> part.rank, part.complete.rank, round(part.complete.visibility_norm / part.visibility_norm)
        (1, 2, 101)
        """
        if self.spectrum.rest > 0:
            raise DataError(
                f"this needs all of W, got its eigenvalues above {self.spectrum.rest:.3g} only: take "
                "TopChannels.prediction_bound, which bounds what the rest can do, or the dense operators"
            )
        if self.spectrum.count_above(_threshold(self.spectrum, None)) <= self.rank:
            return self
        return dissipation_channels(self.spectrum, self.train_transfer, self.test_transfer)

    def whiten(self, X: Transfer) -> Float[Tensor, "rows r"]:
        r""":math:`X W^{\dagger/2} V = X V \sigma^{-1}` for any other map X of the output gradient.

        >>> channels = dissipation_channels(2 * torch.eye(2), torch.eye(2), torch.eye(2))
        >>> channels.whiten(torch.tensor([[4.0, 0.0]])).abs()
        tensor([[2., 0.]])
        """
        return _product(X, self.vectors, "a map to whiten") / self.roots

    def dissipation(self, h: Float[Tensor, "N"]) -> float:
        r""":math:`h^\top W h`, from the roots.

        >>> dissipation_channels(2 * torch.eye(2), torch.eye(2), torch.eye(2)).dissipation(torch.tensor([0.0, 3.0]))
        36.0
        """
        require_length(h, self.vectors.shape[0], "h")
        return (self.spectrum.roots * (self.spectrum.vectors.T @ h)).square().sum().item()


def dissipation_channels(
    factor: Float[Tensor, "m n"] | Spectrum,
    train_transfer: Transfer,
    test_transfer: Transfer,
    *,
    cutoff: float | None = None,
    rank_cutoff: float | None = None,
) -> DissipationChannels:
    r"""Signal channel, reservoir, C_S and C_Q of a window, from a factor of W.

    W itself is never formed: its eigenvalues are squares of the singular values of R, which are known to eps·σ_1, so
    the spectrum reaches twice as many digits down as ``eigh(W)`` would.

    Args:
        factor: R with :math:`W = R^\top R`, for instance a TSQR factor of the stacked :math:`\tilde M_j^{1/2} F_j`; or
            a spectrum (``spectrum_of_eigenpairs`` for the leading part of an operator).
        train_transfer: D [N, N].
        test_transfer: G [M, N].
        cutoff: Eigenvalues of W at most this share of the largest one belong to the reservoir. By default (1e4 eps)²,
            or, where the spectrum is known less far down than that, down to where it is known.
        rank_cutoff: Singular values of C_S at most this share of the largest one count as 0 in its pseudo-inverse. By
            default those that rounding errors of D could make: :math:`s_j \le 20\,eps\,\|D\|\,\|\sigma^{-1} z_j\|`
            for the right singular vector :math:`z_j`. A relative cut-off cannot do this, as rounding of D weighs
            more the smaller σ.

    Raises:
        DataError: shapes, dtypes or devices that do not fit, or values that are not finite.
        HyperparameterError: a cut-off outside [0, 1).

    >>> R = torch.diag(torch.tensor([2.0, 1.0, 0.0]))
    >>> D, G = torch.diag(torch.tensor([4.0, 3.0, 0.0])), torch.tensor([[2.0, 3.0, 0.0]])
    >>> channels = dissipation_channels(R, D, G)
    >>> channels.rank, channels.train_roots, channels.test_channel.abs(), channels.visibility_norm
    (2, tensor([3., 2.]), tensor([[1., 3., 0.]]), 10.0)
    """
    spectrum = factor if isinstance(factor, Spectrum) else spectrum_of_factor(factor)
    threshold = _threshold(spectrum, cutoff)
    rank = spectrum.count_above(threshold)
    V, roots = spectrum.vectors[:, :rank], spectrum.roots[:rank]
    _require_transfers(train_transfer, test_transfer, spectrum.vectors)
    DV, GV = _product(train_transfer, V, "train_transfer"), _product(test_transfer, V, "test_transfer")
    reduced_train = DV / roots
    U, s, Zt = torch.linalg.svd(reduced_train, full_matrices=False)
    return DissipationChannels(
        spectrum=spectrum,
        cutoff=threshold,
        train_transfer=train_transfer,
        test_transfer=test_transfer,
        reduced_train=reduced_train,
        reduced_test=GV / roots,
        train_left=U,
        train_roots=s,
        train_right=Zt.T,
        # Up to the first one that fails: all that is kept then is larger than all that is not.
        train_rank=int((s > _rank_thresholds(DV, roots, s, Zt.T, rank_cutoff)).long().cumprod(0).sum()),
    )


def operator_norm(X: Float[Tensor, "rows columns"]) -> float:
    """The largest singular value; 0 for a matrix without entries.

    >>> operator_norm(torch.diag(torch.tensor([3.0, -4.0])))
    4.0
    """
    return torch.linalg.matrix_norm(X, 2).item() if X.numel() else 0.0


def require_shape(X: Transfer, shape: tuple[int, int], what: str) -> None:
    """Refuse a matrix of another shape.

    >>> require_shape(torch.ones(2, 3), (2, 2), "A")
    Traceback (most recent call last):
    poprisk.errors.DataError: A must be a matrix [2, 2], got [2, 3]
    """
    if tuple(X.shape) != shape:
        raise DataError(f"{what} must be a matrix {list(shape)}, got {list(X.shape)}")


def require_length(x: Tensor, length: int, what: str) -> None:
    """Refuse a vector of another length.

    >>> require_length(torch.ones(2, 1), 2, "g")
    Traceback (most recent call last):
    poprisk.errors.DataError: g must be a vector [2], got [2, 1]: outputs are stacked example by example
    """
    if tuple(x.shape) != (length,):
        raise DataError(
            f"{what} must be a vector [{length}], got {list(x.shape)}: outputs are stacked example by example"
        )


def _threshold(spectrum: Spectrum, cutoff: float | None) -> float:
    if cutoff is None:
        rounding = _ROOT_MARGIN * torch.finfo(spectrum.roots.dtype).eps
        return max(max(spectrum.resolution, rounding**2) * spectrum.largest, spectrum.rest)
    _require_share("cutoff", cutoff)
    return cutoff * spectrum.largest


def _rank_thresholds(DV: Tensor, roots: Tensor, s: Tensor, Z: Tensor, rank_cutoff: float | None) -> Tensor:
    if rank_cutoff is not None:
        _require_share("rank_cutoff", rank_cutoff)
        return rank_cutoff * s[:1]
    if not len(s):
        return s
    noise_of_D = torch.finfo(DV.dtype).eps * torch.linalg.matrix_norm(DV, 2)
    return _RANK_MARGIN * noise_of_D * (Z / roots.unsqueeze(1)).norm(dim=0)


def _require_share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise HyperparameterError(f"{name} must lie in [0, 1), relative to the largest value, got {value}")


def _require_transfers(D: Transfer, G: Transfer, V: Tensor) -> None:
    N = V.shape[0]
    require_shape(D, (N, N), "train_transfer, for a factor with as many columns,")
    require_shape(G, (G.shape[0], N), "test_transfer, for a factor with as many columns,")
    for name, X in (("train_transfer", D), ("test_transfer", G)):
        if X.dtype != V.dtype or X.device != V.device:
            raise DataError(
                f"{name} and the factor of W must agree, got {X.dtype} on {X.device} and {V.dtype} on {V.device}: "
                "convert one of them"
            )


def _product(X: Transfer, V: Tensor, what: str) -> Tensor:
    XV = X @ V
    if not torch.isfinite(XV).all():
        raise DataError(f"{what} must be finite, got NaN or infinity: check the run behind it")
    return XV
