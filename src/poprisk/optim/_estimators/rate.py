r"""The population-risk rate :math:`\Omega_B(M)` of a step, from the gradients of a batch."""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import Preconditioner, precondition
from poprisk.errors import DataError


def rate_matrix(G: Float[Tensor, "b d"]) -> Float[Tensor, "d d"]:
    r"""The off-diagonal rate matrix of a batch, Eq. ``one_step_loo``, dense.

    .. math:: A_B = \bar g_B \bar g_B^\top - \Sigma_B/(b-1), \qquad
        \Sigma_B = b^{-1}\sum_a (g_a - \bar g_B)(g_a - \bar g_B)^\top

    Args:
        G: Gradient of each example's loss, one per row.

    Raises:
        DataError: fewer than two examples.

    >>> rate_matrix(torch.tensor([[3.0, 0.0], [2.0, 0.0]]))  # the product of the two, and nothing of their squares
    tensor([[6., 0.],
            [0., 0.]])
    """
    b = _batch_size(G)
    mean = G.mean(dim=0)
    C = G - mean
    return torch.outer(mean, mean) - C.T @ C / (b * (b - 1))


def population_rate(G: Float[Tensor, "b d"], M: Preconditioner) -> Float[Tensor, ""]:
    r"""First-order decrease of population risk per unit of learning rate, Eq. ``off_diagonal_rate``.

    .. math:: \Omega_B(M) = \operatorname{tr}(M A_B) = \bar g_B^\top M \bar g_B - \operatorname{tr}(M \Sigma_B)/(b-1)

    For an M fixed before the batch was seen this is unbiased for the rate on fresh data. For an M chosen on the same
    batch (a gate, the projector) it is optimistic: positive on average even on pure noise.

    Args:
        G: Gradient of each example's loss, one per row.
        M: The step is -lr M ḡ. A number, a diagonal, a matrix, or a low-rank matrix.

    Raises:
        DataError: fewer than two examples, or an M of another size.

    >>> G = torch.tensor([[3.0, 1.0], [2.0, -1.0]])
    >>> population_rate(G, 1.0), population_rate(G, torch.tensor([1.0, 0.0]))  # 3*2 - 1*1, and the first alone
    (tensor(5.), tensor(6.))
    """
    b = _batch_size(G)
    mean = G.mean(dim=0)
    C = G - mean
    return (mean * precondition(M, mean)).sum() - (C * precondition(M, C)).sum() / (b * (b - 1))


def _batch_size(rows: Tensor) -> int:
    b = rows.shape[0]
    if b < 2:
        raise DataError(
            f"a population rate needs at least 2 examples, got {b}: leaving one out must leave one to train on"
        )
    return b
