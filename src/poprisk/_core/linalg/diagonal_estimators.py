r"""Diagonals from a few products, with a standard error for every entry."""

import torch

from poprisk._core.estimate import Estimate
from poprisk._core.linalg.operator import LinearOperator
from poprisk._core.linalg.random_vectors import probes
from poprisk._core.linalg.sampling import (
    LEAVE_ONE_OUT_VARIANCE,
    blank,
    check_square,
    exactly,
    from_samples,
    leave_one_out_directions,
    not_finite,
)


def hutchinson_diagonal(A: LinearOperator, products: int, *, generator: torch.Generator) -> Estimate:
    r"""The mean of :math:`\omega_i \odot A \omega_i` over random signs ω (Bekas, Kokiopoulou and Saad 2007).

    The variance of an entry is the sum of squares of its row off the diagonal, over the number of products.

    >>> from poprisk._core.linalg import diagonal
    >>> hutchinson_diagonal(diagonal(torch.tensor([1.0, 2.0])), 5, generator=torch.Generator()).value
    tensor([1., 2.])
    """
    n = check_square(A, products, fewest=2)
    Omega = probes(n, products, "rademacher", generator, blank(A))
    return from_samples(Omega * A.matmat(Omega).detach(), products)


def xdiag(A: LinearOperator, products: int, *, generator: torch.Generator) -> Estimate:
    r"""XDiag (Epperly, Tropp and Webber 2024): the diagonal on a sketched range, leave-one-out probes on the rest.

    .. math:: \frac1k \sum_i \Big[ \operatorname{diag}(Q_{(i)} Q_{(i)}^\top A)
        + \omega_i \odot (I - Q_{(i)} Q_{(i)}^\top) A \omega_i \Big]

    with random signs ω and the leave-one-out ranges of ``xtrace``. Exact when the rank is below the number of probes.

    The operator needs an adjoint, with which half of the products are made. Standard errors are as in ``xtrace``.

    >>> from poprisk._core.linalg import LowRank
    >>> A = LowRank(torch.arange(1.0, 41).unsqueeze(1))
    >>> xdiag(A, 10, generator=torch.Generator().manual_seed(0)).value[:3].round(decimals=2)
    tensor([1., 4., 9.])
    """
    n = check_square(A, products, fewest=4)
    if products >= n:
        return exactly(A.to_dense().diagonal(), n)
    k = products // 2
    Omega = probes(n, k, "rademacher", generator, blank(A))
    Q, R = torch.linalg.qr(A.matmat(Omega).detach())
    AtQ = A.adjoint().matmat(Q).detach()
    if not torch.isfinite(R).all():
        return not_finite(AtQ[:, 0], 2 * k)
    S = leave_one_out_directions(R)
    QS = Q @ S
    # (I - Q_(i) Q_(i)ᵀ) A ω_i = Q s_i (s_iᵀ r_i), since A ω_i = Q r_i
    on_range = (Q * AtQ).sum(dim=1, keepdim=True) - QS * (AtQ @ S)
    samples = on_range + Omega * QS * (S * R).sum(dim=0)
    return from_samples(samples, 2 * k, variance_factor=LEAVE_ONE_OUT_VARIANCE)
