r"""Traces and diagonals from a few products: Hutchinson, Hutch++, XTrace and XDiag, each with standard errors.

All are unbiased for any square operator. For a spectrum that decays, the error of a trace falls like the root of the
number of products for Hutchinson, like the number itself for Hutch++, and faster for XTrace, which uses every product
twice. At most ``products`` products with vectors are made; the ``cost`` of an estimate is how many there were.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.estimate import Estimate
from poprisk._core.linalg.operator import LinearOperator
from poprisk._core.linalg.random_vectors import Distribution, probes
from poprisk.errors import DataError, HyperparameterError

# Leave-one-out samples: given the other probes each has the right mean, so only effects of two or more probes together
# correlate them, and those of two can at most double the variance of the mean.
_LEAVE_ONE_OUT_VARIANCE = 2.0

# With fewer samples the spread says too little about the error.
_FEWEST_SAMPLES = 5


def hutchinson_trace(
    A: LinearOperator, products: int, *, generator: torch.Generator, distribution: Distribution = "rademacher"
) -> Estimate:
    r"""Hutchinson's estimate :math:`\frac1m \sum_i \omega_i^\top A \omega_i`.

    >>> from poprisk._core.linalg import diagonal
    >>> A = diagonal(torch.tensor([1.0, 2.0, 3.0]))  # random signs are exact for a diagonal
    >>> print(hutchinson_trace(A, 6, generator=torch.Generator().manual_seed(0)))
    6 ± 0 (valid)
    """
    n = _check_square(A, products, fewest=2)
    Omega = probes(n, products, distribution, generator, _blank(A))
    return _from_samples((Omega * A.matmat(Omega).detach()).sum(dim=0), products)


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
    n = _check_square(A, products, fewest=6)
    if products >= n:
        return _exactly(A.to_dense().trace(), n)
    m = products // 3
    S = probes(n, m, "rademacher", generator, _blank(A))
    Q = torch.linalg.qr(A.matmat(S).detach())[0]
    Omega = probes(n, m, distribution, generator, _blank(A))
    rest = Omega - Q @ (Q.T @ Omega)
    AQ, A_rest = A.matmat(torch.cat([Q, rest], dim=1)).detach().split([Q.shape[1], m], dim=1)
    samples = (Q * AQ).sum() + (rest * A_rest).sum(dim=0)
    return _from_samples(samples, m + Q.shape[1] + m)


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
    n = _check_square(A, products, fewest=4)
    if products >= n:
        return _exactly(A.to_dense().trace(), n)
    k = products // 2
    Omega = probes(n, k, "sphere", generator, _blank(A))
    Q, R = torch.linalg.qr(A.matmat(Omega).detach())
    AQ = A.matmat(Q).detach()
    if not torch.isfinite(R).all():
        return _not_finite(R.new_zeros(()), 2 * k)
    S = _leave_one_out_directions(R)
    H, QtOmega, OmegatAQ = Q.T @ AQ, Q.T @ Omega, Omega.T @ AQ
    X = QtOmega - S * (S * QtOmega).sum(dim=0)  # coordinates in Q of each probe's projection on its own Q_(i)
    on_range = H.trace() - (S * (H @ S)).sum(dim=0)
    # ωᵀ(I - P)A(I - P)ω, term by term: ωᵀAω - ωᵀAPω - ωᵀPAω + ωᵀPAPω
    residual = (QtOmega * R).sum(dim=0) - (OmegatAQ.T * X).sum(dim=0) - (X * R).sum(dim=0) + (X * (H @ X)).sum(dim=0)
    length = Omega.square().sum(dim=0) - X.square().sum(dim=0)
    samples = on_range + residual * (n - k + 1) / length
    return _from_samples(samples, 2 * k, variance_factor=_LEAVE_ONE_OUT_VARIANCE)


def hutchinson_diagonal(A: LinearOperator, products: int, *, generator: torch.Generator) -> Estimate:
    r"""The mean of :math:`\omega_i \odot A \omega_i` over random signs ω (Bekas, Kokiopoulou and Saad 2007).

    The variance of an entry is the sum of squares of its row off the diagonal, over the number of products.

    >>> from poprisk._core.linalg import diagonal
    >>> hutchinson_diagonal(diagonal(torch.tensor([1.0, 2.0])), 5, generator=torch.Generator()).value
    tensor([1., 2.])
    """
    n = _check_square(A, products, fewest=2)
    Omega = probes(n, products, "rademacher", generator, _blank(A))
    return _from_samples(Omega * A.matmat(Omega).detach(), products)


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
    n = _check_square(A, products, fewest=4)
    if products >= n:
        return _exactly(A.to_dense().diagonal(), n)
    k = products // 2
    Omega = probes(n, k, "rademacher", generator, _blank(A))
    Q, R = torch.linalg.qr(A.matmat(Omega).detach())
    AtQ = A.adjoint().matmat(Q).detach()
    if not torch.isfinite(R).all():
        return _not_finite(AtQ[:, 0], 2 * k)
    S = _leave_one_out_directions(R)
    QS = Q @ S
    # (I - Q_(i) Q_(i)ᵀ) A ω_i = Q s_i (s_iᵀ r_i), since A ω_i = Q r_i
    on_range = (Q * AtQ).sum(dim=1, keepdim=True) - QS * (AtQ @ S)
    samples = on_range + Omega * QS * (S * R).sum(dim=0)
    return _from_samples(samples, 2 * k, variance_factor=_LEAVE_ONE_OUT_VARIANCE)


def _check_square(A: LinearOperator, products: int, fewest: int) -> int:
    """Size of a square operator, once it is known that the budget reaches."""
    n, columns = A.shape
    if n != columns or n == 0:
        raise DataError(f"a trace or diagonal needs a square operator with entries, got {A!r}: transpose or compose it")
    if products < fewest:
        raise HyperparameterError(f"this estimator needs at least {fewest} products, got {products}: try 30")
    return n


def _blank(A: LinearOperator) -> Tensor:
    """An empty tensor with the operator's dtype and device."""
    return torch.empty(0, dtype=A.dtype, device=A.device)


def _from_samples(samples: Float[Tensor, "*entries m"], products: int, *, variance_factor: float = 1.0) -> Estimate:
    """Mean and standard error over the last axis; the factor is how much larger the variance is than if independent."""
    m = samples.shape[-1]
    value, error = samples.mean(dim=-1), samples.std(dim=-1) * (variance_factor / m) ** 0.5
    if not (torch.isfinite(value).all() and torch.isfinite(error).all()):
        return _not_finite(value, products)
    if m < _FEWEST_SAMPLES:
        return Estimate(
            value, error, False, f"{m} samples are too few for a standard error: use more products", products
        )
    return Estimate(value, error, cost=products)


def _exactly(value: Float[Tensor, "*entries"], products: int) -> Estimate:
    """The result where the budget covers the whole matrix."""
    if not torch.isfinite(value).all():
        return _not_finite(value, products)
    return Estimate(value, torch.zeros_like(value), reason="exact: the budget covers the whole matrix", cost=products)


def _not_finite(value: Float[Tensor, "*entries"], products: int) -> Estimate:
    """The answer to NaN or infinity: nothing is known."""
    nan = torch.full_like(value, torch.nan)
    return Estimate(nan, nan, False, "products with the operator are not finite", products)


def _leave_one_out_directions(R: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    r"""Unit vectors s_i orthogonal to all columns of R but the i-th: the normalized columns of :math:`R^{-\top}`.

    A diagonal within rounding of 0 (the operator's rank is below the number of probes) is lifted to rounding size:
    the leave-one-out range is then the whole range whichever direction is taken out.

    >>> _leave_one_out_directions(torch.tensor([[2.0, 3.0], [0.0, 4.0]]))
    tensor([[ 0.8000,  0.0000],
            [-0.6000,  1.0000]])
    """
    scale = R.abs().max()
    smallest = R.shape[0] * torch.finfo(R.dtype).eps * torch.where(scale > 0, scale, 1.0)
    d = R.diagonal()
    lifted = torch.where(d.abs() > smallest, d, torch.where(d < 0, -smallest, smallest))
    eye = torch.eye(R.shape[0], dtype=R.dtype, device=R.device)
    S = torch.linalg.solve_triangular((R + torch.diag(lifted - d)).T, eye, upper=False)
    return S / S.norm(dim=0)
