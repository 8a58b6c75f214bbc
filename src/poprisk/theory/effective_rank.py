r"""How many eigenvalues count: a rank that need not be a whole number."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError, HyperparameterError

RankKind = Literal["participation", "entropy", "stable"]


def effective_rank(values: Float[Tensor, "r"], kind: RankKind = "participation") -> float:
    r"""The effective rank of a positive semidefinite matrix, from its eigenvalues.

    .. math:: \frac{(\sum_j \lambda_j)^2}{\sum_j \lambda_j^2}, \qquad
       \exp\Bigl(-\sum_j p_j \log p_j\Bigr),\; p_j = \frac{\lambda_j}{\sum_i \lambda_i}, \qquad
       \frac{\sum_j \lambda_j}{\lambda_1}

    The paper's figure quotes :math:`r_{eff}` without a definition; the participation ratio is taken here, which is r
    for r equal eigenvalues and hardly sees a long tail.

    Args:
        values: Eigenvalues, not negative.
        kind: "participation", "entropy" or "stable", in the order of the formulas.

    Raises:
        DataError: negative values, or none above 0.
        HyperparameterError: another kind.

    >>> effective_rank(torch.tensor([2.0, 2.0, 0.0])), effective_rank(torch.tensor([3.0, 1.0]))
    (2.0, 1.6)
    """
    total = values.double().sum().item()
    if not (total > 0 and (values >= 0).all()):
        raise DataError("an effective rank needs eigenvalues that are not negative and not all 0")
    shares = values.double() / total
    if kind == "participation":
        return 1 / shares.square().sum().item()
    if kind == "entropy":
        return torch.special.entr(shares).sum().exp().item()
    if kind == "stable":
        return 1 / shares.max().item()
    raise HyperparameterError(f"kind must be 'participation', 'entropy' or 'stable', got {kind!r}")
