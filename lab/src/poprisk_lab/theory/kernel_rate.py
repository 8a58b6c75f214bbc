r"""The population-risk rate :math:`\Omega_B(M)` of a step in function space, from kernel blocks.

The library computes the same rate from gradients: :func:`poprisk.optim.population_rate`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import Preconditioner, precondition
from poprisk.errors import DataError


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
    b = residuals.shape[0]
    if b < 2:
        raise DataError(f"a population rate needs at least 2 examples, got {b}: pass a larger batch")
    agreement = torch.einsum("ai,aicj,cj->ac", residuals, K, residuals)
    # Self-use terms are left out, not subtracted: they can be larger than all the others together.
    return agreement.masked_fill(torch.eye(b, dtype=torch.bool, device=K.device), 0).sum() / (b * (b - 1))
