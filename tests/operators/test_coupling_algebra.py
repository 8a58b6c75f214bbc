"""A_o, R_perp, path errors and predictors: the theorems as identities, and the naive recursion behind the fixtures."""

import numpy as np
import pytest
import torch
from coupling_cases import coupling_of, forgetful, norm, normal, overshoot, tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from oracles.linear_model import decayed_weights, flow_outputs, linear_operators, ridge_filter, ridge_weights
from oracles.run_operators import DenseStep, operators_of, quadratic_run
from poprisk.errors import DataError
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import (
    Coupling,
    anchored_coupling,
    anchored_coupling_of_jacobians,
    path_error,
)

EXACT = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("rule", ["gd", "momentum", "nesterov"])
@pytest.mark.parametrize("start", [0, 4])
def test_the_oracle_reproduces_a_run_that_happened(loss, rule, start):
    run = quadratic_run(1, loss=loss, rule=rule, curvature=1.0)
    ops, g = operators_of(run.steps[start:], run.buffers[start]), run.gradients[start]
    drift = np.linalg.norm(run.steps[-1].J_S - run.steps[0].J_S) / np.linalg.norm(run.steps[0].J_S)
    assert drift > 0.1
    np.testing.assert_allclose(ops.source_S - ops.D @ g, run.train_outputs[-1] - run.train_outputs[start], atol=1e-13)
    np.testing.assert_allclose(ops.source_Q - ops.G @ g, run.test_outputs[-1] - run.test_outputs[start], atol=1e-13)
    np.testing.assert_allclose(ops.source_g + ops.P @ g, run.gradients[-1], atol=1e-13)
    np.testing.assert_allclose(ops.W_factor.T @ ops.W_factor, ops.W, atol=1e-13)
    if loss == "squared":
        np.testing.assert_allclose(ops.D, run.n * (np.eye(5) - ops.P), atol=1e-13)
    if rule == "gd":
        first, second = operators_of(run.steps[start:8]), operators_of(run.steps[8:])
        np.testing.assert_allclose(second.P @ first.P, ops.P, atol=1e-13)
        assert not ops.source_S.any()


def test_the_linear_oracle_is_gradient_flow_and_ridge():
    """Against an integration in small steps of what the closed forms solve."""
    rng = np.random.default_rng(0)
    X, X_test, y, w_0 = rng.normal(size=(4, 6)), rng.normal(size=(3, 6)), rng.normal(size=4), rng.normal(size=6)
    T, count, decay = 1.5, 4000, 0.3
    h = T / count
    w, decayed = w_0.copy(), np.zeros(6)
    for _ in range(count):
        w = w - h * _midpoint(lambda v: X.T @ (X @ v - y) / 4, w, h)
        decayed = decayed - h * _midpoint(lambda v: X.T @ (X @ v - y) / 4 + decay * v, decayed, h)
    ops, g = linear_operators(X, X_test, T), (X @ w_0 - y) / 4
    np.testing.assert_allclose(flow_outputs(X, X_test, y, w_0, T), X_test @ w, atol=1e-6)
    np.testing.assert_allclose(X_test @ w_0 - ops.G @ g, X_test @ w, atol=1e-6)
    np.testing.assert_allclose(X @ w_0 - ops.D @ g, X @ w, atol=1e-6)
    drop = (np.sum((X @ w_0 - y) ** 2) - np.sum((X @ w - y) ** 2)) / 8
    assert g @ ops.W @ g == pytest.approx(drop, abs=1e-6)
    np.testing.assert_allclose(decayed_weights(X, y, decay, T), decayed, atol=1e-6)
    np.testing.assert_allclose(decayed_weights(X, y, decay, 1e3), ridge_weights(X, y, decay), atol=1e-12)
    U, sigma, _ = np.linalg.svd(X, full_matrices=False)
    np.testing.assert_allclose(X @ decayed, U @ (ridge_filter(sigma, 4, decay, T) * (U.T @ y)), atol=1e-6)


def _midpoint(velocity, w, h):
    return velocity(w - h / 2 * velocity(w))


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_factorization_and_path_error(seed):
    """thm:coupling_factorization, rem:coupling_equivalent, eq:path_error, with a remainder that is not 0."""
    coupling, W, D, G = forgetful(seed)
    c, A_o, R_perp = coupling.channels, coupling.matrix, coupling.coupling_remainder
    assert coupling.remainder_norm > 1e-3
    assert_close(coupling.remainder, R_perp)
    assert_close(c.test_channel, A_o @ c.train_channel + R_perp, **EXACT)
    assert norm(R_perp @ c.train_channel.T) < 1e-9 * norm(c.train_channel) * norm(c.test_channel)
    W_pinv = torch.linalg.pinv(W, rtol=1e-11, hermitian=True)
    assert_close(A_o, G @ W_pinv @ D.T @ torch.linalg.pinv(D @ W_pinv @ D.T, rtol=1e-11), rtol=1e-5, atol=1e-5)
    for A in (normal(seed, 4, 6), A_o, torch.zeros(4, 6).double()):
        assert_close(path_error(c, A), (G - A @ D) @ W_pinv @ (G - A @ D).T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("rule", ["gd", "momentum", "nesterov"])
@pytest.mark.parametrize("start", [0, 5])
def test_test_motion_follows_from_training_motion(loss, rule, start):
    """thm:train_test_coupling on runs that took steps, sources told apart; it needs R_perp = 0, which is measured."""
    run = quadratic_run(11, n=6, batch=3, count=20, loss=loss, rule=rule, curvature=1.0)
    ops = operators_of(run.steps[start:], run.buffers[start])
    coupling = coupling_of(ops)
    moved = tensor(run.train_outputs[-1] - run.train_outputs[start])
    expected = tensor(run.test_outputs[-1] - run.test_outputs[start])
    predicted = coupling.predict(moved, tensor(ops.source_S), tensor(ops.source_Q))
    assert coupling.channels.smallest_train_root > 1e-3
    least = torch.linalg.svdvals(coupling.channels.train_channel)[coupling.channels.rank - 1].item()
    assert coupling.channels.smallest_train_root == pytest.approx(least, rel=1e-8)
    assert coupling.relative_remainder < 1e-10
    assert coupling.transfer_mismatch < 1e-10
    assert_close(predicted, expected, rtol=1e-9, atol=1e-10)
    if rule != "gd":
        assert (coupling.predict(moved) - expected).norm() > 1e-3 * expected.norm()


def test_steps_that_overshoot_leave_a_remainder():
    """In discrete time R_perp = 0 is no theorem, not even for squared loss: D = 0, W = 9, G = 3(q_1 - q_2)."""
    coupling = overshoot()
    assert abs(coupling.channels.train_transfer.item()) < 1e-15
    assert coupling.channels.roots.item() == pytest.approx(3.0)
    assert coupling.remainder_norm == pytest.approx(1.0)
    assert coupling.relative_remainder == pytest.approx(1.0)
    assert coupling.channels.unresolved == 1
    assert not coupling.matrix.any()


def test_rounding_in_the_train_transfer_is_not_inverted():
    """Kernel eigenvalues over 18 orders: D, of the size of λ, is rounding where G, of the size of √λ, is not yet."""
    rng = np.random.default_rng(0)
    n, d = 20, 30
    U, V = np.linalg.qr(rng.normal(size=(n, n)))[0], np.linalg.qr(rng.normal(size=(d, d)))[0]
    X = (U * np.logspace(0, -9, n)) @ V[:, :n].T
    steps = [
        DenseStep(J_S=X, Jbar_S=X, Jbar_Q=np.eye(d)[:5], Bbar=np.eye(n) / n, S=np.ones(n), M=np.full(d, n / 2.0))
        for _ in range(20)
    ]
    ops, g = operators_of(steps), rng.normal(size=n)
    coupling = coupling_of(ops)
    assert coupling.channels.rank == n
    assert coupling.channels.unresolved >= 1
    assert coupling.relative_remainder > 0.01  # said plainly: on those directions nothing is known
    assert coupling.transfer_mismatch < 1e-6  # and it hardly matters
    expected = tensor(-ops.G @ g)
    assert (coupling.predict(tensor(-ops.D @ g)) - expected).norm() < 1e-6 * expected.norm()
    resolved = coupling_of(ops, cutoff=1e-13)
    assert resolved.channels.unresolved == 0
    assert resolved.relative_remainder < 1e-9
    inverted = coupling_of(ops, rank_cutoff=0.0)
    assert norm(inverted.matrix) > 5 * norm(coupling.matrix)


def test_the_linear_model_and_the_anchored_predictor():
    """prop:linear_operators: A_o = K_QS K_SS† and R_perp = 0; the anchor is the same predictor."""
    rng = np.random.default_rng(2)
    X, X_test = rng.normal(size=(7, 5)), rng.normal(size=(3, 5))
    ops = linear_operators(X, X_test, T=2.0)
    coupling = coupling_of(ops)
    assert_close(coupling.matrix, tensor(ops.A), **EXACT)
    assert coupling.relative_remainder < 1e-12
    K_SS, K_QS = tensor(X @ X.T), tensor(X_test @ X.T)
    assert_close(anchored_coupling(K_QS, K_SS), tensor(ops.A), **EXACT)
    assert_close(anchored_coupling_of_jacobians(tensor(X_test), tensor(X)), tensor(ops.A), **EXACT)
    assert_close(anchored_coupling(K_QS, K_SS), K_QS @ torch.linalg.pinv(K_SS, rtol=1e-11), **EXACT)


def test_what_does_not_fit_is_refused():
    coupling, *_ = forgetful(0)
    with pytest.raises(DataError, match=r"A must be a matrix \[4, 6\], got \[6, 4\]"):
        path_error(coupling.channels, torch.ones(6, 4).double())
    with pytest.raises(DataError, match=r"train_displacement must be a vector \[6\]"):
        coupling.predict(torch.ones(4).double())
    with pytest.raises(DataError, match=r"test_source must be a vector \[4\]"):
        coupling.predict(torch.ones(6).double(), None, torch.ones(6).double())
    with pytest.raises(DataError, match="train_kernel must be a matrix"):
        anchored_coupling(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(DataError, match="test_jacobian must be a matrix"):
        anchored_coupling_of_jacobians(torch.ones(2, 3), torch.ones(2, 4))
    empty = Coupling(dissipation_channels(torch.zeros(1, 2), torch.zeros(2, 2), torch.zeros(1, 2)))
    assert empty.matrix.shape == (1, 2)
    assert empty.relative_remainder == empty.transfer_mismatch == 0.0
