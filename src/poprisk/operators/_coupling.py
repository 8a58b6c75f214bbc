r"""What the training displacement says about the test displacement: the best linear predictor and what it misses.

.. math:: A_\circ = C_Q C_S^\dagger, \qquad R_\perp = C_Q (I - C_S^\dagger C_S), \qquad G = A_\circ D + R_\perp W^{1/2}

In discrete time :math:`R_\perp = 0` is no theorem (steps that overshoot can bring a training output back to where it
was while a test output has moved), and in floating point it is decided against the smallest singular value of C_S:
read ``remainder_norm`` beside ``channels.smallest_train_root`` and ``channels.unresolved``.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import inverse_square_root
from poprisk.errors import HyperparameterError
from poprisk.operators._channels import DissipationChannels, operator_norm, require_length, require_shape


@dataclass(frozen=True, eq=False)
class Coupling:
    r"""The optimal linear predictor :math:`A_\circ` and the irreducible remainder :math:`R_\perp` of a window.

    Eq. ``Aopt_def``. Kept as thin factors; ``matrix`` and ``remainder`` are made when asked for.

    >>> from poprisk.operators import dissipation_channels
    >>> R, D = torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([4.0, 0.0]))
    >>> coupling = Coupling(dissipation_channels(R, D, torch.tensor([[2.0, 3.0]])))
    >>> coupling.matrix.abs(), coupling.remainder.abs()  # the second direction moves no training output
    (tensor([[0.5000, 0.0000]]), tensor([[0., 3.]]))
    """

    channels: DissipationChannels

    @cached_property
    def _weights(self) -> Float[Tensor, "M k"]:
        """The coefficients of A_o on the left singular vectors of C_S."""
        c, k = self.channels, self.channels.train_rank
        return c.reduced_test @ c.train_right[:, :k] / c.train_roots[:k]

    @property
    def matrix(self) -> Float[Tensor, "M N"]:
        r""":math:`A_\circ`."""
        return self._weights @ self.channels.train_left[:, : self.channels.train_rank].T

    @cached_property
    def reduced_remainder(self) -> Float[Tensor, "M r"]:
        r""":math:`R_\perp V`."""
        c = self.channels
        Z = c.train_right[:, : c.train_rank]
        return c.reduced_test - (c.reduced_test @ Z) @ Z.T

    @property
    def remainder(self) -> Float[Tensor, "M N"]:
        r""":math:`R_\perp`."""
        return self.reduced_remainder @ self.channels.vectors.T

    @property
    def coupling_remainder(self) -> Float[Tensor, "M N"]:
        r""":math:`R_\perp` by its full name, the same as ``remainder``."""
        return self.remainder

    @cached_property
    def remainder_norm(self) -> float:
        r""":math:`\|R_\perp\|`, the error no predictor can avoid, per root of dissipation."""
        return operator_norm(self.reduced_remainder)

    @property
    def relative_remainder(self) -> float:
        r""":math:`\|R_\perp\| / \|C_Q\|`, in [0, 1]; 0 where C_Q is 0."""
        return ratio(self.remainder_norm, self.channels.visibility_norm**0.5)

    @property
    def transfer_mismatch(self) -> float:
        r""":math:`\|(G - A_\circ D) P_{sig}\| / \|G P_{sig}\|`: the remainder where it counts, weighed by dissipation.

        A direction that hardly dissipated and whose train displacement drowned in rounding weighs fully in
        ``relative_remainder`` and hardly here.
        """
        c = self.channels
        missed = c.reduced_test - self._weights @ (c.train_left[:, : c.train_rank].T @ c.reduced_train)
        return ratio(operator_norm(missed * c.roots), operator_norm(c.reduced_test * c.roots))

    def predict(
        self,
        train_displacement: Float[Tensor, "N"],
        train_source: Float[Tensor, "N"] | None = None,
        test_source: Float[Tensor, "M"] | None = None,
    ) -> Float[Tensor, "M"]:
        r"""The test displacement that the training displacement implies (``thm:train_test_coupling``).

        .. math:: \hat{\Delta u_Q} = A_\circ (\Delta u_S - source_S) + source_Q

        Differs from the paper by the sources: what decay and a momentum buffer carried in did, whatever the gradient.

        Args:
            train_displacement: :math:`\Delta u_S`, as it happened.
            train_source: What of it is no linear function of the gradient at the start; default: none.
            test_source: The same for the test outputs.

        Raises:
            DataError: vectors of another length.
        """
        M, N = self.channels.reduced_test.shape[0], self.channels.reduced_train.shape[0]
        require_length(train_displacement, N, "train_displacement")
        x = train_displacement
        if train_source is not None:
            require_length(train_source, N, "train_source")
            x = x - train_source
        y = self._weights @ (self.channels.train_left[:, : self.channels.train_rank].T @ x)
        if test_source is not None:
            require_length(test_source, M, "test_source")
            y = y + test_source
        return y


def whitened_error(channels: DissipationChannels, A: Float[Tensor, "M N"]) -> Float[Tensor, "M r"]:
    r""":math:`(C_Q - A C_S) V`, whose norm is Err(A) of a linear predictor A.

    Raises:
        DataError: A does not map train to test outputs.
    """
    require_shape(A, (channels.reduced_test.shape[0], channels.reduced_train.shape[0]), "A")
    return channels.reduced_test - A @ channels.reduced_train


def path_error(channels: DissipationChannels, A: Float[Tensor, "M N"]) -> Float[Tensor, "M M"]:
    r"""The on-trajectory error of a linear predictor, Eq. ``path_error``.

    .. math:: \mathcal D_A^{vis} = (G - A D) W^\dagger (G - A D)^\top

    Raises:
        DataError: A does not map train to test outputs.

    >>> from poprisk.operators import dissipation_channels
    >>> channels = dissipation_channels(torch.eye(2), torch.eye(2), torch.tensor([[2.0, 3.0]]))
    >>> path_error(channels, torch.tensor([[2.0, 0.0]]))
    tensor([[9.]])
    """
    E = whitened_error(channels, A)
    return E @ E.T


def anchored_coupling(
    cross_kernel: Float[Tensor, "M columns"], train_kernel: Float[Tensor, "N N2"], *, cutoff: float | None = None
) -> Float[Tensor, "M N"]:
    r"""The predictor of kernel regression with the kernel at the start of the window.

    .. math:: A_s = K_{QS}(s) K_{SS}(s)^\dagger

    The cut-off is a share of the largest eigenvalue, by default N·eps; from the Jacobians themselves,
    ``anchored_coupling_of_jacobians`` reaches twice as many digits down.

    Raises:
        DataError: shapes do not fit, or a kernel that is not positive semidefinite.

    >>> anchored_coupling(torch.tensor([[2.0, 0.0]]), torch.diag(torch.tensor([4.0, 0.0])))
    tensor([[0.5000, 0.0000]])
    """
    N = train_kernel.shape[1]
    require_shape(train_kernel, (N, N), "train_kernel")
    require_shape(cross_kernel, (cross_kernel.shape[0], N), "cross_kernel")
    root = inverse_square_root(train_kernel, cutoff)
    return (root @ (root @ cross_kernel.T)).T


def anchored_coupling_of_jacobians(
    test_jacobian: Float[Tensor, "M d"], train_jacobian: Float[Tensor, "N d2"], *, cutoff: float | None = None
) -> Float[Tensor, "M N"]:
    r"""The same predictor from the Jacobians, :math:`A_s = J_Q J_S^\dagger`; no kernel is formed.

    With a preconditioner M pass :math:`J M^{1/2}` for both.

    The cut-off is a share of the largest singular value of J_S, by default 10·max(N, d)·eps.

    >>> anchored_coupling_of_jacobians(torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]]))
    tensor([[0.5000]])
    """
    require_shape(test_jacobian, (test_jacobian.shape[0], train_jacobian.shape[1]), "test_jacobian")
    U, s, Vt = torch.linalg.svd(train_jacobian, full_matrices=False)
    k = rank_of(s, train_jacobian, cutoff)
    return ((test_jacobian @ Vt[:k].T) / s[:k]) @ U[:, :k].T


def rank_of(s: Tensor, X: Tensor, cutoff: float | None) -> int:
    share = 10 * max(X.shape) * torch.finfo(X.dtype).eps if cutoff is None else cutoff
    if not 0 <= share < 1:
        raise HyperparameterError(f"a cut-off must lie in [0, 1), relative to the largest value, got {cutoff}")
    return int((s > share * s[:1]).sum())


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
