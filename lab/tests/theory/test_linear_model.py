"""The linear model in closed form: operators, weight-decayed flow, ridge and least-norm limits."""

import math

import pytest
import torch
from torch.testing import assert_close

from oracles.frozen_kernel import decayed_weights as integrated_weights
from oracles.linear_model import linear_operators as oracle_operators
from oracles.linear_model import ridge_weights as oracle_ridge
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._channels import dissipation_channels
from poprisk.theory.filters import decayed_flow_filter
from poprisk.theory.frozen import frozen_problem_of_features
from poprisk_lab.theory.linear_model import decayed_weights, least_norm_weights, linear_operators, ridge_weights
from poprisk_lab.theory.transfer_mass import frozen_visibility

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def data(n=5, d=3, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return normal(n, d), normal(4, d), normal(n), normal(d)


@pytest.mark.parametrize("shape", [(5, 3), (3, 6)])
@pytest.mark.parametrize("T", [0.8, 0.0, 1e-6, 50.0])
def test_explicit_operators(shape, T):
    X, X_test, _, _ = data(*shape)
    found, want = linear_operators(X, X_test, T), oracle_operators(X.numpy(), X_test.numpy(), T)
    assert_close(found.propagator.numpy(), want.P, **EXACT)
    assert_close(found.dissipation_gramian.numpy(), want.W, **EXACT)
    assert_close(found.train_transfer.numpy(), want.D, **EXACT)
    assert_close(found.test_transfer.numpy(), want.G, **EXACT)
    assert_close(found.coupling.numpy(), want.A, **EXACT)
    assert_close(found.coupling @ found.train_transfer, found.test_transfer, **EXACT)


def test_the_visibility_is_that_of_the_operators():
    X, X_test, _, _ = data(3, 6)
    ops = linear_operators(X, X_test, 0.8)
    norm = dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer).visibility_norm
    frozen = frozen_visibility(frozen_problem_of_features(X, X_test), 0.8)
    assert torch.linalg.matrix_norm(frozen, 2).item() == pytest.approx(norm, rel=1e-10)


@pytest.mark.parametrize("shape", [(5, 3), (3, 6)])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_weight_decayed_flow_is_the_differential_equation(shape, decay):
    X, X_test, y, w_0 = data(*shape)
    for start in (torch.zeros_like(w_0), w_0):
        want = integrated_weights(X.numpy(), y.numpy(), decay, 1.3, start.numpy())
        assert_close(decayed_weights(X, y, decay, 1.3, start).numpy(), want, **EXACT)
    problem = frozen_problem_of_features(X, X_test)
    fitted = problem.predict(decayed_flow_filter(problem, decay, 1.3), y)
    assert_close(X_test @ decayed_weights(X, y, decay, 1.3), fitted, **EXACT)


def test_the_filter_needs_a_start_at_zero_or_decay_toward_it():
    X, X_test, y, w_0 = data()
    problem = frozen_problem_of_features(X, X_test, start_train=X @ w_0, start_test=X_test @ w_0)
    filtered = problem.predict(decayed_flow_filter(problem, 0.2, 1.3), y)
    assert_close(X_test @ decayed_weights(X, y, 0.2, 1.3, w_0, toward_start=True), filtered, **EXACT)
    assert not torch.allclose(X_test @ decayed_weights(X, y, 0.2, 1.3, w_0), filtered, rtol=1e-2)


@pytest.mark.parametrize("shape", [(5, 3), (3, 6)])
def test_both_limits(shape):
    X, _, y, w_0 = data(*shape)
    ridge = oracle_ridge(X.numpy(), y.numpy(), 0.2)
    assert_close(ridge_weights(X, y, 0.2).numpy(), ridge, **EXACT)
    for t in (math.inf, 500.0):
        assert_close(decayed_weights(X, y, 0.2, t, w_0).numpy(), ridge, **EXACT)
    interpolant = least_norm_weights(X, y, w_0)
    assert_close(decayed_weights(X, y, 0.0, math.inf, w_0), interpolant, **EXACT)
    assert_close(interpolant, w_0 + torch.linalg.lstsq(X, y - X @ w_0, driver="gelsd").solution, **EXACT)
    assert_close(decayed_weights(X, y, 1e-12, math.inf), least_norm_weights(X, y), rtol=0, atol=1e-10)
    assert_close(decayed_weights(X, y, 0.2, 0.0, w_0), w_0, **EXACT)


def test_weight_decay_empties_what_the_data_do_not_reach():
    X, _, y, w_0 = data(3, 6)
    outside = torch.eye(6).double() - torch.linalg.pinv(X) @ X
    for t in (0.5, 2.0):
        found = outside @ decayed_weights(X, y, 0.3, t, w_0)
        assert_close(found, math.exp(-0.3 * t) * outside @ w_0, **EXACT)


def test_refusals():
    X, _, y, _ = data()
    with pytest.raises(HyperparameterError, match="negative"):
        decayed_weights(X, y, -1.0, 1.0)
    with pytest.raises(HyperparameterError, match="positive"):
        ridge_weights(X, y, 0.0)
    with pytest.raises(DataError, match="w_0"):
        decayed_weights(X, y, 0.1, 1.0, torch.zeros(4).double())
