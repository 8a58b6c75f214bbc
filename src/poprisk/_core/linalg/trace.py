r"""Traces from a few products: Hutchinson, Hutch++ and XTrace, each with a standard error.

All three are unbiased for any square operator. For a spectrum that decays, the error falls like the root of the number
of products for Hutchinson, like the number itself for Hutch++, and faster for XTrace, which uses every product twice.
At most ``products`` products with vectors are made; the ``cost`` of an estimate is how many there were.
"""

import torch

from poprisk._core.estimate import Estimate
from poprisk._core.linalg.operator import LinearOperator
from poprisk._core.linalg.random_vectors import Distribution, probes
from poprisk._core.linalg.sampling import (
    LEAVE_ONE_OUT_VARIANCE,
    blank,
    check_square,
    exactly,
    from_samples,
    leave_one_out_directions,
    not_finite,
)


def hutchinson_trace(
    A: LinearOperator, products: int, *, generator: torch.Generator, distribution: Distribution = "rademacher"
) -> Estimate:
    r"""Hutchinson's estimate :math:`\frac1m \sum_i \omega_i^\top A \omega_i`.

    >>> from poprisk._core.linalg import diagonal
    >>> A = diagonal(torch.tensor([1.0, 2.0, 3.0]))  # random signs are exact for a diagonal
    >>> print(hutchinson_trace(A, 6, generator=torch.Generator().manual_seed(0)))
    6 ± 0 (valid)
    """
    n = check_square(A, products, fewest=2)
    Omega = probes(n, products, distribution, generator, blank(A))
    return from_samples((Omega * A.matmat(Omega).detach()).sum(dim=0), products)


def hutchpp_trace(
    A: LinearOperator, products: int, *, generator: torch.Generator, distribution: Distribution = "rademacher"
) -> Estimate:
    r"""Hutch++ (Meyer, Musco, Musco and Woodruff 2021): the trace on a sketched range, and Hutchinson on the rest.

    .. math:: \operatorname{tr}(Q^\top A Q) + \frac1m \sum_i \omega_i^\top (I - Q Q^\top) A (I - Q Q^\top) \omega_i

    with :math:`Q = \operatorname{orth}(A S)` for a random S.

    A third of the products makes the sketch, a third the first term, a third the second, whose spread gives the
    standard error. Exact when the sketch holds the whole range.

    >>> from poprisk._core.linalg import LowRank
    >>> A = LowRank(torch.ones(40, 1))
    >>> round(hutchpp_trace(A, 15, generator=torch.Generator().manual_seed(0)).value, 3)
    40.0
    """
    n = check_square(A, products, fewest=6)
    if products >= n:
        return exactly(A.to_dense().trace(), n)
    m = products // 3
    S = probes(n, m, "rademacher", generator, blank(A))
    Q = torch.linalg.qr(A.matmat(S).detach())[0]
    Omega = probes(n, m, distribution, generator, blank(A))
    rest = Omega - Q @ (Q.T @ Omega)
    AQ, A_rest = A.matmat(torch.cat([Q, rest], dim=1)).detach().split([Q.shape[1], m], dim=1)
    samples = (Q * AQ).sum() + (rest * A_rest).sum(dim=0)
    return from_samples(samples, m + Q.shape[1] + m)


def xtrace(A: LinearOperator, products: int, *, generator: torch.Generator) -> Estimate:
    r"""XTrace (Epperly, Tropp and Webber 2024): every probe serves the sketch of all others and its own residual.

    With :math:`Q_{(i)} = \operatorname{orth}(A \omega_j : j \ne i)` the estimate is the mean of the exchangeable

    .. math:: \operatorname{tr}(Q_{(i)}^\top A Q_{(i)})
        + \omega_i^\top (I - Q_{(i)} Q_{(i)}^\top) A (I - Q_{(i)} Q_{(i)}^\top) \omega_i

    All leave-one-out projectors come from one factorization :math:`A \Omega = Q R`, as
    :math:`Q (I - s_i s_i^\top) Q^\top` with s_i the normalized columns of :math:`R^{-\top}`. The residual of each probe
    is rescaled to its expected length, which leaves the estimate unbiased and takes out the spread of the length.
    Exact when the rank is below the number of probes.

    Differs from the paper: its standard error takes the leave-one-out estimates as independent, which is too small when
    the spectrum decays slowly. Here it is larger by √2, the most that effects of two probes together can do.

    >>> from poprisk._core.linalg import LowRank
    >>> A = LowRank(torch.ones(40, 1))
    >>> round(xtrace(A, 10, generator=torch.Generator().manual_seed(0)).value, 3)
    40.0
    """
    n = check_square(A, products, fewest=4)
    if products >= n:
        return exactly(A.to_dense().trace(), n)
    k = products // 2
    Omega = probes(n, k, "sphere", generator, blank(A))
    Q, R = torch.linalg.qr(A.matmat(Omega).detach())
    AQ = A.matmat(Q).detach()
    if not torch.isfinite(R).all():
        return not_finite(R.new_zeros(()), 2 * k)
    S = leave_one_out_directions(R)
    H, QtOmega, OmegatAQ = Q.T @ AQ, Q.T @ Omega, Omega.T @ AQ
    X = QtOmega - S * (S * QtOmega).sum(dim=0)  # coordinates in Q of each probe's projection on its own Q_(i)
    on_range = H.trace() - (S * (H @ S)).sum(dim=0)
    # ωᵀ(I - P)A(I - P)ω, term by term: ωᵀAω - ωᵀAPω - ωᵀPAω + ωᵀPAPω
    residual = (QtOmega * R).sum(dim=0) - (OmegatAQ.T * X).sum(dim=0) - (X * R).sum(dim=0) + (X * (H @ X)).sum(dim=0)
    length = Omega.square().sum(dim=0) - X.square().sum(dim=0)
    samples = on_range + residual * (n - k + 1) / length
    return from_samples(samples, 2 * k, variance_factor=LEAVE_ONE_OUT_VARIANCE)
