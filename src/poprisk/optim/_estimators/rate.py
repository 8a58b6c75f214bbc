r"""The population-risk rate :math:`\Omega_B(M)` of a step, from gradients or from kernel blocks."""

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


def kernel_blocks(J: Float[Tensor, "b p d"], M: Preconditioner) -> Float[Tensor, "b p b p"]:
    r"""The pairwise kernel blocks :math:`K_{ac}^M = J_a M J_c^\top` of a batch, block (a, c) at ``[a, :, c, :]``.

    Reshaped to [bp, bp] it is the train kernel of the batch.

    >>> kernel_blocks(torch.tensor([[[1.0, 0.0]], [[1.0, 2.0]]]), 1.0).reshape(2, 2)
    tensor([[1., 1.],
            [1., 5.]])
    """
    b, p, d = J.shape
    flat = J.reshape(b * p, d)
    # Row (c, j) of precondition is M J_cj, so the product has J_ai M J_cj at (ai, cj), also when M is not symmetric.
    return (flat @ precondition(M, flat).T).reshape(b, p, b, p)


def population_rate_from_kernel(K: Float[Tensor, "b p b p"], residuals: Float[Tensor, "b p"]) -> Float[Tensor, ""]:
    r"""The same rate from function space: agreement of distinct examples, Eq. ``off_diagonal_kernel_rate``.

    .. math:: \Omega_B(M) = \frac{1}{b(b-1)} \sum_{a \ne c} r_a^\top K_{ac}^M r_c

    Args:
        K: Kernel blocks, as ``kernel_blocks`` returns them.
        residuals: Output gradient r_a of each example.

    Raises:
        DataError: fewer than two examples.

    >>> population_rate_from_kernel(torch.ones(2, 1, 2, 1), torch.tensor([[3.0], [2.0]]))
    tensor(6.)
    """
    b = _batch_size(residuals)
    agreement = torch.einsum("ai,aicj,cj->ac", residuals, K, residuals)
    # Self-use terms are left out, not subtracted: they can be larger than all the others together.
    return agreement.masked_fill(torch.eye(b, dtype=torch.bool, device=K.device), 0).sum() / (b * (b - 1))


def _batch_size(rows: Tensor) -> int:
    b = rows.shape[0]
    if b < 2:
        raise DataError(
            f"a population rate needs at least 2 examples, got {b}: leaving one out must leave one to train on"
        )
    return b
