r"""The population-risk rate of a step on a batch, and the preconditioner of greatest rate."""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import OffDiagonalProjector, Preconditioner, offdiagonal_projector, precondition
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


def population_projector(G: Float[Tensor, "b d"], P: float | Float[Tensor, "*P"] = 1.0) -> OffDiagonalProjector:
    r"""The M with :math:`0 \preceq M \preceq P` of greatest population rate on the batch, Eq. ``full_psd_projector``.

    .. math:: M^\star = P^{1/2} 1_{(0,\infty)}(P^{1/2} A_B P^{1/2}) P^{1/2}

    The cost is :math:`O(b^2 d)`: only an eigenproblem of the size of the batch is solved.

    Differs from the paper: :math:`A_B = G^\top (11^\top - I) G/(b(b-1))` has at most one positive eigenvalue, so
    :math:`M^\star` has rank one or is zero; it is unique only up to the null space of :math:`A_B`, and its diagonal is
    not the diagonal gate of Corollary ``thm:diagonal_gate``, which is the optimum over diagonal M alone.

    Args:
        G: Gradient of each example's loss, one per row.
        P: Diagonal of the base preconditioner, or one number.

    Returns:
        ``factor`` [d, r] with r ≤ 1, ``rate`` (the attained Ω), ``matvec`` and ``to_dense``.

    Raises:
        DataError: fewer than two examples, values not finite, or a P that is negative or of another size.

    >>> M = population_projector(torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, 0.0]]))
    >>> M.to_dense().diag().round(decimals=4), round(M.rate.item(), 4)  # the shared coordinate, not the contested one
    (tensor([1., 0.]), 1.0)
    >>> population_projector(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).rank  # nothing is shared
    0
    """
    return offdiagonal_projector(G, P)


def _batch_size(rows: Tensor) -> int:
    b = rows.shape[0]
    if b < 2:
        raise DataError(
            f"a population rate needs at least 2 examples, got {b}: leaving one out must leave one to train on"
        )
    return b
