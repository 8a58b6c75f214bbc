r"""The preconditioner of greatest population rate, :math:`M^\star`."""

from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import OffDiagonalProjector, offdiagonal_projector


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

    >>> import torch
    >>> M = population_projector(torch.tensor([[1.0, 1.0], [1.0, -1.0], [1.0, 0.0]]))
    >>> M.to_dense().diag().round(decimals=4), round(M.rate.item(), 4)  # the shared coordinate, not the contested one
    (tensor([1., 0.]), 1.0)
    >>> population_projector(torch.tensor([[1.0, 2.0], [-1.0, -2.0]])).rank  # nothing is shared
    0
    """
    return offdiagonal_projector(G, P)
