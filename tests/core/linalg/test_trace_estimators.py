"""Trace and diagonal estimators: exact cases, the naive leave-one-out loop, bias and calibration over many seeds."""

import pytest
import torch
from torch.testing import assert_close

from poprisk._core.linalg.matrices import diagonal, from_dense, from_functions, identity, zeros
from poprisk._core.linalg.random_vectors import probes
from poprisk._core.linalg.trace import hutchinson_diagonal, hutchinson_trace, hutchpp_trace, xdiag, xtrace
from poprisk.errors import DataError, HyperparameterError

F64 = torch.float64
N = 60
TRACES = [hutchinson_trace, hutchpp_trace, xtrace]
DIAGONALS = [hutchinson_diagonal, xdiag]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symmetric(values: torch.Tensor) -> torch.Tensor:
    U = torch.linalg.qr(torch.randn(N, N, generator=generator(), dtype=F64))[0]
    return U * values @ U.T


POWERS = torch.arange(1, N + 1, dtype=F64)
MATRICES = {
    "flat": symmetric(torch.linspace(1.0, 3.0, N, dtype=F64)),
    "polynomial": symmetric(POWERS**-1.0),
    "exponential": symmetric(0.9**POWERS),
    "indefinite": symmetric(torch.linspace(-1.0, 2.0, N, dtype=F64)),
    "not symmetric": torch.randn(N, N, generator=generator(1), dtype=F64) + torch.eye(N, dtype=F64),
}
LOW_RANK = torch.randn(N, 4, generator=generator(2), dtype=F64) @ torch.randn(4, N, generator=generator(3), dtype=F64)


def truth(estimator, M: torch.Tensor) -> torch.Tensor:
    return M.diag() if estimator in DIAGONALS else M.trace()


def repeat(estimator, M: torch.Tensor, products: int, seeds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Errors and standard errors over independent seeds."""
    estimates = [estimator(from_dense(M), products, generator=generator(100 + seed)) for seed in range(seeds)]
    errors = torch.stack([torch.as_tensor(e.value, dtype=F64) - truth(estimator, M) for e in estimates])
    return errors, torch.stack([torch.as_tensor(e.standard_error, dtype=F64) for e in estimates])


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("estimator", TRACES + DIAGONALS)
def test_unbiased_and_calibrated(estimator, name):
    seeds = 150
    errors, standard_errors = repeat(estimator, MATRICES[name], 24, seeds)
    z = errors.mean(dim=0) / (errors.std(dim=0) / seeds**0.5)
    assert z.abs().max() < (4.5 if estimator in DIAGONALS else 4.0)  # the largest of 60 entries reaches further
    ratio = (errors.square().mean() / standard_errors.square().mean()).sqrt()
    assert 0.55 < ratio < 1.2
    covered = (errors.abs() <= 2 * standard_errors).double().mean()
    assert 0.85 < covered <= 1.0  # 0.92 for eight normal samples; the √2 of leave-one-out estimators adds to it


def test_plain_leave_one_out_errors_would_be_too_small():
    """Why the variance of XTrace's mean is doubled: without it two standard errors cover four cases in five."""
    errors, standard_errors = repeat(xtrace, MATRICES["exponential"], 24, 200)
    assert (errors.square().mean() / (standard_errors / 2**0.5).square().mean()).sqrt() > 1.2


@pytest.mark.parametrize("estimator", [hutchpp_trace, xtrace, xdiag])
def test_exact_below_the_rank(estimator):
    estimate = estimator(from_dense(LOW_RANK), 30, generator=generator())
    assert estimate.valid
    assert_close(torch.as_tensor(estimate.value, dtype=F64), truth(estimator, LOW_RANK), rtol=1e-11, atol=1e-11)
    assert torch.as_tensor(estimate.standard_error).max() < 1e-11


@pytest.mark.parametrize("estimator", [hutchpp_trace, xtrace, xdiag])
@pytest.mark.parametrize("products", [N, 5 * N])
def test_exact_when_the_budget_covers_the_matrix(estimator, products):
    M = MATRICES["not symmetric"]
    estimate = estimator(from_dense(M), products, generator=generator())
    assert_close(torch.as_tensor(estimate.value, dtype=F64), truth(estimator, M))
    assert estimate.cost == N
    assert "exact" in estimate.reason


@pytest.mark.parametrize("estimator", [hutchinson_trace, hutchinson_diagonal])
def test_random_signs_are_exact_for_a_diagonal(estimator):
    entries = torch.arange(1.0, N + 1, dtype=F64)
    estimate = estimator(diagonal(entries), 5, generator=generator())
    assert_close(torch.as_tensor(estimate.value, dtype=F64), truth(estimator, torch.diag(entries)))
    assert torch.as_tensor(estimate.standard_error).max() < 1e-12


@pytest.mark.parametrize("estimator", TRACES + DIAGONALS)
def test_nothing_is_estimated_as_nothing(estimator):
    estimate = estimator(zeros(N, dtype=F64), 20, generator=generator())
    assert estimate.valid
    assert torch.as_tensor(estimate.value).abs().max() == 0
    assert torch.as_tensor(estimate.standard_error).max() == 0


@pytest.mark.parametrize("name", MATRICES)
def test_xtrace_is_the_naive_leave_one_out_loop(name):
    A, k = MATRICES[name], 7
    Omega = probes(N, k, "sphere", generator(5), A)
    samples = []
    for i in range(k):
        others = [j for j in range(k) if j != i]
        Q = torch.linalg.qr(A @ Omega[:, others])[0]
        rest = Omega[:, i] - Q @ (Q.T @ Omega[:, i])
        rest = rest * ((N - k + 1) ** 0.5 / rest.norm())
        samples.append((Q.T @ A @ Q).trace() + rest @ A @ rest)
    samples = torch.stack(samples)
    estimate = xtrace(from_dense(A), 2 * k, generator=generator(5))
    assert estimate.cost == 2 * k
    assert_close(estimate.value, samples.mean().item(), rtol=1e-10, atol=1e-10)
    assert_close(estimate.standard_error, (2 * samples.var() / k).sqrt().item(), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", MATRICES)
def test_xdiag_is_the_naive_leave_one_out_loop(name):
    A, k = MATRICES[name], 7
    Omega = probes(N, k, "rademacher", generator(5), A)
    samples = []
    for i in range(k):
        others = [j for j in range(k) if j != i]
        Q = torch.linalg.qr(A @ Omega[:, others])[0]
        y = A @ Omega[:, i]
        samples.append((Q @ Q.T @ A).diag() + Omega[:, i] * (y - Q @ (Q.T @ y)))
    samples = torch.stack(samples)
    estimate = xdiag(from_dense(A), 2 * k, generator=generator(5))
    assert estimate.cost == 2 * k
    assert_close(estimate.value, samples.mean(dim=0), rtol=1e-10, atol=1e-10)
    assert_close(estimate.standard_error, (2 * samples.var(dim=0) / k).sqrt(), rtol=1e-8, atol=1e-10)


def test_hutchpp_is_its_formula():
    A, m = MATRICES["polynomial"], 6
    source = generator(5)
    S, Omega = (probes(N, m, "rademacher", source, A) for _ in range(2))
    Q = torch.linalg.qr(A @ S)[0]
    P = torch.eye(N, dtype=F64) - Q @ Q.T
    samples = (Q.T @ A @ Q).trace() + (Omega * (P @ A @ P @ Omega)).sum(dim=0)
    estimate = hutchpp_trace(from_dense(A), 3 * m + 2, generator=generator(5))
    assert estimate.cost == 3 * m
    assert_close(estimate.value, samples.mean().item())
    assert_close(estimate.standard_error, (samples.std() / m**0.5).item())


def test_better_methods_are_better_where_the_spectrum_decays():
    M = symmetric(0.7**POWERS)
    rms = [repeat(estimator, M, 36, 60)[0].square().mean().sqrt() for estimator in TRACES]
    assert rms[0] > 5 * rms[1] > 25 * rms[2]


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian", "sphere"])
def test_probes_are_isotropic(distribution):
    Omega = probes(3, 200_000, distribution, generator(), torch.empty(0, dtype=F64))
    assert_close(Omega @ Omega.T / 200_000, torch.eye(3, dtype=F64), rtol=0, atol=0.02)
    if distribution == "sphere":
        assert_close(Omega.norm(dim=0), torch.full((200_000,), 3**0.5, dtype=F64))
    for estimator in (hutchinson_trace, hutchpp_trace):
        estimate = estimator(identity(N, dtype=F64), 40, generator=generator(), distribution=distribution)
        assert abs(estimate.value - N) <= 4 * estimate.standard_error + 1e-9


@pytest.mark.parametrize("estimator", TRACES + DIAGONALS)
def test_the_generator_decides_and_the_products_are_counted(estimator):
    M, count = MATRICES["polynomial"], [0]

    def product(X):
        count[0] += X.shape[1]
        return M @ X

    A = from_functions(product, None, (N, N), F64, symmetric=True)
    state = torch.get_rng_state()
    first, second, third = (estimator(A, 21, generator=generator(seed)) for seed in (1, 1, 2))
    assert_close(first.value, second.value, rtol=0, atol=0)
    assert not torch.equal(torch.as_tensor(first.value), torch.as_tensor(third.value))
    assert count[0] == first.cost + second.cost + third.cost
    assert first.cost <= 21
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("estimator", TRACES + DIAGONALS)
@pytest.mark.parametrize("products", [20, 100])
def test_products_that_are_not_finite_make_no_number(estimator, products):
    M = MATRICES["flat"].clone()
    M[3, 4] = float("nan")
    estimate = estimator(from_dense(M), products, generator=generator())
    assert not estimate.valid
    assert "not finite" in estimate.reason
    assert torch.as_tensor(estimate.value).isnan().all()


@pytest.mark.parametrize(
    ("estimator", "products"), [(hutchinson_trace, 4), (hutchpp_trace, 12), (xtrace, 8), (xdiag, 8)]
)
def test_four_samples_are_not_trusted(estimator, products):
    estimate = estimator(from_dense(MATRICES["flat"]), products, generator=generator())
    assert not estimate.valid
    assert "4 samples are too few" in estimate.reason
    assert torch.isfinite(torch.as_tensor(estimate.value)).all()


def test_float32():
    for estimator in TRACES + DIAGONALS:
        low = estimator(from_dense(LOW_RANK.float()), 30, generator=generator())
        error = (torch.as_tensor(low.value) - truth(estimator, LOW_RANK)).abs()
        assert (error <= 4.5 * torch.as_tensor(low.standard_error) + 1e-4).all()


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (lambda g: hutchinson_trace(zeros(3, 4), 10, generator=g), DataError, "square operator"),
        (lambda g: xdiag(zeros(0), 10, generator=g), DataError, "square operator with entries"),
        (lambda g: hutchinson_trace(identity(9), 1, generator=g), HyperparameterError, "at least 2 products, got 1"),
        (lambda g: hutchpp_trace(identity(9), 5, generator=g), HyperparameterError, "at least 6 products, got 5"),
        (lambda g: xtrace(identity(9), 3, generator=g), HyperparameterError, "at least 4 products, got 3"),
        (lambda g: xdiag(identity(9), 3, generator=g), HyperparameterError, "at least 4 products, got 3"),
    ],
)
def test_refusals(attempt, error, message):
    with pytest.raises(error, match=message):
        attempt(generator())
