r"""The path error of a linear predictor as the sum of what all of them pay and what this one pays in addition."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from poprisk.operators._channels import operator_norm
from poprisk.operators._coupling import Coupling, path_error, ratio


@dataclass(frozen=True, eq=False)
class PathErrorSplit:
    r"""Eq. ``path_error_pyth``: the path error of A, and the two parts it is the sum of."""

    total: Float[Tensor, "M M"]
    r""":math:`\mathcal D_A^{vis}`."""
    irreducible: Float[Tensor, "M M"]
    r""":math:`R_\perp R_\perp^\top`, what every linear predictor pays."""
    penalty: Float[Tensor, "M M"]
    r""":math:`(A - A_\circ) D W^\dagger D^\top (A - A_\circ)^\top`, what A pays for not being the best."""

    @property
    def mismatch(self) -> float:
        """How far total is from the sum of the parts, relative to it."""
        return ratio(operator_norm(self.total - self.irreducible - self.penalty), operator_norm(self.total))


def path_error_split(coupling: Coupling, A: Float[Tensor, "M N"]) -> PathErrorSplit:
    r"""The split of ``thm:path_error_split``, each part computed on its own.

    >>> import torch
    >>> from poprisk.operators import dissipation_channels
    >>> R, D = torch.diag(torch.tensor([2.0, 1.0])), torch.diag(torch.tensor([4.0, 0.0]))
    >>> coupling = Coupling(dissipation_channels(R, D, torch.tensor([[2.0, 3.0]])))
    >>> split = path_error_split(coupling, torch.tensor([[1.5, 7.0]]))
    >>> split.total, split.irreducible, split.penalty
    (tensor([[13.]]), tensor([[9.]]), tensor([[4.]]))
    """
    R_perp = coupling.reduced_remainder
    excess = (A - coupling.matrix) @ coupling.channels.reduced_train
    return PathErrorSplit(path_error(coupling.channels, A), R_perp @ R_perp.T, excess @ excess.T)
