"""Frozen problems: every filter against kernels alone, one bias–variance identity, and the limits."""

import itertools
import math

import pytest
import torch
from spectral_cases import frozen_case
from torch import nn
from torch.testing import assert_close

import oracles.frozen_kernel as oracle
from poprisk._core.autodiff.flat import FlatModel
from poprisk.errors import DataError, HyperparameterError
from poprisk.theory.bias_variance import interpolation_variance, noise_covariance, realized_risk, risk
from poprisk.theory.filters import (
    checked_filter,
    decayed_flow_filter,
    gradient_flow_filter,
    interpolation_filter,
    predictive_basis,
    rank_filter,
    ridge_filter,
    threshold_filter,
)
from poprisk.theory.frozen import frozen_problem, frozen_problem_from, frozen_problem_of_features

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def user_filter(problem):
    """A filter in no basis that the library knows."""
    V = torch.linalg.qr(torch.randn(problem.rank, problem.rank, generator=torch.Generator().manual_seed(2)).double())[0]
    return (V * torch.linspace(0, 1, problem.rank, dtype=torch.float64)) @ V.T


# Each filter of the library, and the same as a matrix on training outputs, made of K, H and n alone.
FILTERS = {
    "flow": (lambda p: gradient_flow_filter(p, 0.7), lambda K, H, p: oracle.gradient_flow(K, p.num_examples, 0.7)),
    "ridge": (lambda p: ridge_filter(p, 0.4), lambda K, H, p: oracle.ridge(K, p.num_examples, 0.4)),
    "threshold": (lambda p: threshold_filter(p, 8.0), lambda K, H, p: oracle.threshold(K, 8.0)),
    "rank": (lambda p: rank_filter(p, 2), lambda K, H, p: oracle.predictive_rank(K, H, 2)),
    "interpolation": (interpolation_filter, lambda K, H, p: oracle.mobile(K)),
    "decayed flow": (
        lambda p: decayed_flow_filter(p, 0.3, 0.9),
        lambda K, H, p: oracle.decayed_flow(K, p.num_examples, 0.3, 0.9),
    ),
    "user": (user_filter, lambda K, H, p: (p.left @ user_filter(p) @ p.left.T).numpy()),
}
CASES = [(name, p) for name in FILTERS for p in (1, 2)]


def kernels_of(case):
    J_S, J_Q = case[0].numpy(), case[1].numpy()
    return J_S @ J_S.T, J_Q @ J_S.T


def draw_of(problem, seed=7):
    return torch.randn(len(problem.start_train), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("name", "p"), CASES)
def test_filtered_fits_are_those_of_the_kernels(name, p):
    case = frozen_case(n=4, p=p)
    J_S, J_Q, problem, y, _ = case
    K, H = kernels_of(case)
    M, F = FILTERS[name][0](problem), FILTERS[name][1](K, H, problem)
    want = oracle.predict(H, K, F, y.numpy(), problem.start_train.numpy(), problem.start_test.numpy())
    assert_close(problem.predict(M, y).numpy(), want, **EXACT)
    # The parameters that are displaced make these very outputs.
    assert_close(problem.start_test + J_Q @ problem.displacement(M, y), problem.predict(M, y), **EXACT)
    assert_close((J_S @ problem.displacement(M, y)).numpy(), F @ (y - problem.start_train).numpy(), **EXACT)


@pytest.mark.parametrize(("name", "p"), CASES)
def test_the_identity_holds_for_a_fixed_draw(name, p):
    case = frozen_case(n=4, p=p)
    problem, signal, truth = case[2:]
    M, draw = FILTERS[name][0](problem), draw_of(case[2])
    fitted = problem.predict(M, signal + draw)
    against_clean = realized_risk(problem, M, signal, draw)
    assert against_clean.total == pytest.approx((fitted - problem.interpolant(signal)).square().sum().item(), rel=1e-10)
    against_truth = realized_risk(problem, M, signal, draw, truth)
    assert against_truth.total == pytest.approx((fitted - truth).square().sum().item(), rel=1e-10)


@pytest.mark.parametrize("name", FILTERS)
def test_the_expectation_is_exact_over_all_sign_draws(name):
    """Noise of random signs has the covariance diag(s²); its 2^N draws are all taken."""
    case = frozen_case()
    problem, signal, truth = case[2:]
    M = FILTERS[name][0](problem)
    sizes = torch.linspace(0.5, 1.5, 5, dtype=torch.float64)
    draws = sizes * torch.tensor(list(itertools.product([-1.0, 1.0], repeat=5)), dtype=torch.float64)
    for target in (None, truth):
        mean = sum(realized_risk(problem, M, signal, draw, target).total for draw in draws) / len(draws)
        assert risk(problem, M, signal, sizes.square(), target).total == pytest.approx(mean, rel=1e-10)
    K, H = kernels_of(case)
    residual, gap = (signal - problem.start_train).numpy(), (problem.interpolant(signal) - truth).numpy()
    F, noise = FILTERS[name][1](K, H, problem), torch.diag(sizes.square())
    bias, variance, total = oracle.risk(K, H, F, residual, noise.numpy(), gap)
    found = risk(problem, M, signal, noise, truth)
    assert (found.bias, found.variance, found.total) == pytest.approx((bias, variance, total), rel=1e-10)


@pytest.mark.parametrize("name", FILTERS)
def test_simulated_fits_have_the_expected_risk(name):
    problem, signal, truth = frozen_case()[2:]
    M, sigma = FILTERS[name][0](problem), 0.8
    noise = sigma * torch.randn(4000, 5, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    matrix = M if M.dim() == 2 else M.diag()
    C_M = problem.test_map @ matrix @ problem.left.T
    fitted = problem.start_test + (signal - problem.start_train + noise) @ C_M.T
    errors = (fitted - truth).square().sum(dim=1)
    standard_error = errors.std().item() / 4000**0.5
    expected = risk(problem, M, signal, sigma**2, truth).total
    assert abs(errors.mean().item() - expected) < 3.5 * standard_error


def test_limits_of_the_filters():
    problem = frozen_case()[2]
    one, zero = torch.ones(problem.rank).double(), torch.zeros(problem.rank).double()
    limits = [
        (gradient_flow_filter(problem, 0.0), zero),
        (gradient_flow_filter(problem, 1e-13), zero),
        (gradient_flow_filter(problem, math.inf), one),
        (gradient_flow_filter(problem, 1e4), one),
        (ridge_filter(problem, 0.0), one),
        (ridge_filter(problem, 1e-12), one),
        (ridge_filter(problem, math.inf), zero),
        (threshold_filter(problem, 0.0), one),
        (threshold_filter(problem, math.inf), zero),
        (decayed_flow_filter(problem, 0.0, 0.7), gradient_flow_filter(problem, 0.7)),
        (decayed_flow_filter(problem, 1e-12, 0.7), gradient_flow_filter(problem, 0.7)),
        (decayed_flow_filter(problem, 0.4, math.inf), ridge_filter(problem, 0.4)),
        (decayed_flow_filter(problem, 0.4, 1e4), ridge_filter(problem, 0.4)),
        (decayed_flow_filter(problem, 0.0, math.inf), one),
        (decayed_flow_filter(problem, 0.4, 0.0), zero),
        (rank_filter(problem, problem.rank), torch.eye(problem.rank).double()),
        (rank_filter(problem, 0), torch.zeros(problem.rank, problem.rank).double()),
    ]
    for found, wanted in limits:
        assert_close(found, wanted, rtol=0, atol=1e-10)


def test_gradient_flow_ends_at_the_least_norm_interpolant():
    J_S, _, problem, y, _ = frozen_case()
    delta = problem.displacement(gradient_flow_filter(problem, math.inf), y)
    assert_close(delta, torch.linalg.pinv(J_S) @ (y - problem.start_train), **EXACT)
    assert_close(problem.start_train + J_S @ delta, y, **EXACT)


def test_kernels_and_features_give_the_same_problem():
    J_S, J_Q, problem, y, truth = frozen_case()
    start = {"start_train": problem.start_train, "start_test": problem.start_test}
    plain = frozen_problem(J_S @ J_S.T, J_Q @ J_S.T, **start)
    assert_close(plain.mobility, problem.mobility, **EXACT)
    assert_close(
        plain.left @ plain.visibility @ plain.left.T, problem.left @ problem.visibility @ problem.left.T, **EXACT
    )
    found = risk(plain, ridge_filter(plain, 0.2), y, 0.3, truth).total
    assert found == pytest.approx(risk(problem, ridge_filter(problem, 0.2), y, 0.3, truth).total, rel=1e-10)
    with pytest.raises(DataError, match="features"):
        plain.displacement(torch.ones(5).double(), y)


@pytest.mark.parametrize("preconditioner", [None, 0.5])
def test_problem_of_a_model(preconditioner):
    """A network's kernel at its weights; the linearized model, solved by least squares, predicts the same."""
    model = FlatModel(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)).double(), "squared")
    x, q = torch.randn(3, 2, dtype=torch.float64), torch.randn(2, 2, dtype=torch.float64)
    y, w = torch.randn(6, dtype=torch.float64), model.weights
    options = {"preconditioner": preconditioner}
    kernels, features = (frozen_problem_from(model, w, x, q, parameters=way, **options) for way in (False, True))
    assert kernels.num_examples == features.num_examples == 3
    J_S, J_Q = (model.output_jacobian(w, z).flatten(0, 1) for z in (x, q))
    u_S, u_Q = model.outputs(w, x).reshape(-1), model.outputs(w, q).reshape(-1)
    want = u_Q + J_Q @ torch.linalg.pinv(J_S) @ (y - u_S)
    for problem in (kernels, features):
        assert_close(problem.predict(interpolation_filter(problem), y), want, rtol=1e-8, atol=1e-8)
        scale = 1.0 if preconditioner is None else preconditioner
        assert_close(problem.mobility, scale * torch.linalg.svdvals(J_S).square(), rtol=1e-8, atol=1e-8)


def test_rank_deficient_kernels_leave_a_reservoir():
    J = torch.randn(5, 2, dtype=torch.float64)
    problem = frozen_problem_of_features(J, J[:1])
    kernels = frozen_problem(J @ J.T, J[:1] @ J.T)
    assert problem.rank == kernels.rank == 2
    for each in (problem, kernels):
        assert_close((each.left * each.mobility) @ each.left.T, J @ J.T, rtol=1e-8, atol=1e-10)
    assert frozen_problem_of_features(J, J[:1], cutoff=0.999).rank == 1


def test_interpolation_risk_grows_by_the_trace_of_the_gramian():
    J_S, J_Q, problem, signal, _ = frozen_case()
    M = interpolation_filter(problem)
    variances = [0.0, 0.5, 2.0]
    totals = [risk(problem, M, signal, v).total for v in variances]
    slope = (totals[2] - totals[1]) / 1.5
    trace = problem.visibility.trace().item()
    assert totals[0] == pytest.approx(0, abs=1e-10)
    assert slope == pytest.approx(trace, rel=1e-10)
    _, s, Vt = torch.linalg.svd(J_S, full_matrices=False)
    assert trace == pytest.approx(((J_Q @ Vt.T).square().sum(dim=0) / s.square()).sum().item(), rel=1e-10)
    assert interpolation_variance(problem, 2.0) == pytest.approx(totals[2], rel=1e-10)
    # The slope of simulated interpolations, with the same draws at two sizes of the noise.
    draws = torch.randn(3000, 5, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    fit = J_Q @ torch.linalg.pinv(J_S)
    slopes = ((2.0 * draws @ fit.T).square().sum(dim=1) - (0.5 * draws @ fit.T).square().sum(dim=1)) / (4.0 - 0.25)
    assert abs(slopes.mean().item() - trace) < 3 * slopes.std().item() / 3000**0.5


def test_correlated_noise():
    problem = frozen_case()[2]
    A = torch.randn(5, 5, dtype=torch.float64)
    covariance = A @ A.T
    assert_close(noise_covariance(problem, covariance), problem.left.T @ covariance @ problem.left, **EXACT)
    isotropic = noise_covariance(problem, torch.full((5,), 0.7, dtype=torch.float64))
    assert_close(isotropic, noise_covariance(problem, 0.7), **EXACT)


def test_predictive_basis():
    problem = frozen_case()[2]
    values, psi = predictive_basis(problem)
    assert_close((psi * values) @ psi.T, problem.visibility, **EXACT)
    assert_close(psi.T @ psi, torch.eye(problem.rank).double(), **EXACT)
    assert (values.diff() <= 0).all()


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda p: checked_filter(p, torch.full((5,), 1.5).double()), DataError, "eigenvalues"),
        (lambda p: checked_filter(p, torch.ones(5, 5).double()), DataError, "eigenvalues"),
        (lambda p: checked_filter(p, torch.ones(5, 5).double().triu()), DataError, "symmetric"),
        (lambda p: checked_filter(p, torch.ones(4).double()), DataError, "diagonal"),
        (lambda p: checked_filter(p, torch.full((5,), torch.nan).double()), DataError, "eigenvalues"),
        (lambda p: gradient_flow_filter(p, -1.0), HyperparameterError, "negative"),
        (lambda p: ridge_filter(p, -1.0), HyperparameterError, "negative"),
        (lambda p: rank_filter(p, 6), HyperparameterError, "rank"),
        (lambda p: decayed_flow_filter(p, -1.0, 1.0), HyperparameterError, "negative"),
        (lambda p: risk(p, torch.ones(5).double(), torch.ones(4).double(), 1.0), DataError, "targets"),
        (lambda p: noise_covariance(p, -1.0), DataError, "negative"),
        (lambda p: noise_covariance(p, torch.ones(4).double()), DataError, "noise"),
        (lambda p: frozen_problem(torch.eye(3), torch.ones(1, 2)), DataError, "kernels"),
        (lambda p: frozen_problem(-torch.eye(2), torch.ones(1, 2)), DataError, "semidefinite"),
        (lambda p: frozen_problem(torch.ones(2, 2).triu(), torch.ones(1, 2)), DataError, "symmetric"),
        (lambda p: frozen_problem(torch.zeros(2, 2), torch.ones(1, 2)), DataError, "not zero"),
        (lambda p: frozen_problem(torch.eye(3), torch.ones(1, 3), outputs=2), DataError, "multiple"),
        (lambda p: frozen_problem_of_features(torch.eye(2), torch.eye(3)), DataError, "columns"),
    ],
)
def test_refusals(make, error, says):
    with pytest.raises(error, match=says):
        make(frozen_case()[2])
