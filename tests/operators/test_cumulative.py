"""The cumulative error D_A and the off-path slack N_A, in steps and in flow."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from oracles.run_operators import (
    DenseStep,
    cumulative_error_of,
    operators_of,
    quadratic_run,
    random_steps,
)
from oracles.run_operators import lifted_maps as naive_lifted_maps
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import path_error
from poprisk.operators._cumulative import LiftedStep, cumulative_error, flow_cumulative_error, lifted_maps
from poprisk.runs._step import AffineStep

EXACT = {"rtol": 1e-8, "atol": 1e-8}


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def share(x):
    return tensor(x) if isinstance(x, np.ndarray) else x


def lifted(steps: list[DenseStep]) -> list[LiftedStep]:
    return [
        LiftedStep(
            step=AffineStep(
                batch=torch.arange(len(step.S)),
                selection=tensor(step.S),
                preconditioner=tensor(step.M),
                momentum=share(step.beta),
                new_gradient=share(step.kappa),
                buffer_share=share(step.a),
                direct_share=share(step.b),
            ),
            gradient_map=tensor(F),
            reach=tensor(step.J_S.T * step.S),
            train_segment=tensor(step.Jbar_S),
            test_segment=tensor(step.Jbar_Q),
        )
        for step, F in zip(steps, operators_of(steps).F, strict=True)
    ]


def channels_of(ops):
    return dissipation_channels(tensor(ops.W_factor), tensor(ops.D), tensor(ops.G))


def norm(X: torch.Tensor) -> float:
    return torch.linalg.matrix_norm(X, 2).item()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), momentum=st.booleans(), squared=st.booleans(), d=st.sampled_from([4, 9]))
def test_the_split_and_the_sign_of_the_slack(seed, momentum, squared, d):
    steps = random_steps(seed, d=d, momentum=momentum, squared=squared, never_drawn=1)
    ops = operators_of(steps)
    A = np.random.default_rng(seed).normal(size=(4, 6))
    error = cumulative_error(lifted(steps), tensor(A))
    for L, naive in zip(lifted_maps(lifted(steps), tensor(A)), naive_lifted_maps(steps, A), strict=True):
        assert_close(L, tensor(naive))
    assert_close(error.total, tensor(cumulative_error_of(steps, A)), rtol=1e-7, atol=1e-7)
    assert_close(error.visible, path_error(channels_of(ops), tensor(A)), rtol=1e-6, atol=1e-6)
    assert error.mismatch < 1e-10
    assert error.smallest_slack > -1e-10
    assert torch.linalg.eigvalsh(error.slack)[0] > -1e-12 * norm(error.total)


def test_without_momentum_in_the_maps_the_slack_can_be_negative():
    """Why the lifted form is needed: a gate closed at the step of its gradient and open at the next one.

    The kernel formula step by step, Σ Δ_j K_j† Δ_jᵀ, sees nothing there, and the outputs move.
    """
    steps = random_steps(0, momentum=True, count=2)
    steps[0].M, steps[1].S = np.zeros_like(steps[0].M), np.zeros_like(steps[1].S)
    ops = operators_of(steps)
    A = np.random.default_rng(0).normal(size=(4, 6))
    naive = np.zeros((4, 4))
    for step in steps:
        root = np.sqrt(step.M)[:, None]
        reach = root * step.J_S.T * step.S
        difference = (step.Jbar_Q - A @ step.Jbar_S) * root.T
        naive += difference @ reach @ np.linalg.pinv(reach, rcond=1e-11) @ difference.T
    visible = path_error(channels_of(ops), tensor(A))
    assert torch.linalg.eigvalsh(tensor(naive) - visible)[0] < -1e-3 * norm(visible)
    error = cumulative_error(lifted(steps), tensor(A))
    assert error.smallest_slack > -1e-12
    assert_close(error.total, tensor(cumulative_error_of(steps, A)), rtol=1e-7, atol=1e-12 * norm(visible))


def test_without_momentum_and_for_full_batches_it_is_the_kernel_formula():
    run = quadratic_run(4, n=5, batch=5, rule="gd", curvature=1.0, count=6)
    A = np.random.default_rng(1).normal(size=(3, 5))
    expected = np.zeros((3, 3))
    for step in run.steps:
        K = (step.J_S * step.M) @ step.J_S.T
        difference = ((step.Jbar_Q - A @ step.Jbar_S) * step.M) @ step.J_S.T
        expected += difference @ np.linalg.inv(K) @ difference.T
    assert_close(cumulative_error(lifted(run.steps), tensor(A)).total, tensor(expected), **EXACT)


def test_a_preserved_predictor_transfers_exactly():
    """Δ_A = 0 at every step: no error on the path or off it, and G = A D with the kernel moving all the time."""
    run = quadratic_run(6, rule="nesterov", curvature=1.0)
    A = np.random.default_rng(2).normal(size=(3, 5))
    for step in run.steps:
        step.Jbar_Q = A @ step.Jbar_S
    error = cumulative_error(lifted(run.steps), tensor(A))
    ops = operators_of(run.steps, run.buffers[0])
    assert norm(error.total) < 1e-28
    assert norm(error.visible) < 1e-28
    np.testing.assert_allclose(ops.G, A @ ops.D, atol=1e-13)
    moved = run.train_outputs[-1] - run.train_outputs[0]
    np.testing.assert_allclose(ops.source_Q - ops.G @ run.gradients[0], A @ moved, atol=1e-13)
    other = cumulative_error(lifted(run.steps), tensor(A + 0.1))  # and what another predictor is off by
    assert_close(other.total, tensor(cumulative_error_of(run.steps, A + 0.1)), rtol=1e-7, atol=0.0)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), d=st.sampled_from([3, 8]))
def test_in_flow_the_split_holds_for_the_sums_themselves(seed, d):
    rng = np.random.default_rng(seed)
    m, N, M = 7, 5, 3
    J_S, J_Q = rng.normal(size=(m, N, d)), rng.normal(size=(m, M, d))
    weights, P = rng.random(m) + 0.1, [np.eye(N)]
    for k in range(m - 1):
        P.append(P[-1] - 0.05 * J_S[k] @ J_S[k].T @ P[-1])
    P = np.stack(P)
    K_SS, K_QS = J_S @ J_S.transpose(0, 2, 1), J_Q @ J_S.transpose(0, 2, 1)
    A = rng.normal(size=(M, N))
    error = flow_cumulative_error(tensor(weights), tensor(K_SS), tensor(K_QS), tensor(P), tensor(A), cutoff=1e-11)
    expected = np.zeros((M, M))
    for weight, K, C in zip(weights, K_SS, K_QS, strict=True):
        expected += weight * (C - A @ K) @ np.linalg.pinv(K, rcond=1e-11, hermitian=True) @ (C - A @ K).T
    assert_close(error.total, tensor(expected), rtol=1e-6, atol=1e-6)
    factor = np.vstack([np.sqrt(w) * J.T @ p for w, J, p in zip(weights, J_S, P, strict=True)])
    D = np.einsum("m,mij,mjk->ik", weights, K_SS, P)
    G = np.einsum("m,mij,mjk->ik", weights, K_QS, P)
    channels = dissipation_channels(tensor(factor), tensor(D), tensor(G))
    assert_close(error.visible, path_error(channels, tensor(A)), rtol=1e-5, atol=1e-5)
    assert error.mismatch < 1e-9
    assert error.smallest_slack > -1e-9


def test_a_frozen_kernel_has_no_error_at_its_own_predictor_and_slack_elsewhere():
    rng = np.random.default_rng(3)
    X, X_test, m = rng.normal(size=(4, 6)), rng.normal(size=(2, 6)), 30
    times = (np.arange(m) + 0.5) / m
    K_SS, K_QS = X @ X.T, X_test @ X.T
    values, U = np.linalg.eigh(K_SS / 4)
    P = np.stack([(U * np.exp(-t * values)) @ U.T for t in times])
    data = (tensor(np.full(m, 1 / m)), tensor(np.tile(K_SS, (m, 1, 1))), tensor(np.tile(K_QS, (m, 1, 1))))
    A = K_QS @ np.linalg.inv(K_SS)
    assert norm(flow_cumulative_error(*data, tensor(P), tensor(A)).total) < 1e-18
    other = flow_cumulative_error(*data, tensor(P), tensor(A + 1))
    assert_close(other.total, tensor(np.ones((2, 4)) @ K_SS @ np.ones((4, 2))), **EXACT)
    assert torch.linalg.eigvalsh(other.slack)[-1] > 1e-3 * norm(other.total)


def test_what_does_not_fit_is_refused():
    steps = lifted(random_steps(0))
    A = torch.ones(4, 6).double()
    with pytest.raises(DataError, match="at least one step"):
        cumulative_error([], A)
    with pytest.raises(DataError, match=r"A must be a matrix \[4, 6\]"):
        lifted_maps(steps, A.T)
    with pytest.raises(DataError, match=r"gradient_map of step 1 must be a matrix \[9, 6\], got \[4, 6\]"):
        cumulative_error([steps[0], *lifted(random_steps(0, d=4))], A)
    uphill = AffineStep(batch=torch.arange(6), selection=torch.ones(6), preconditioner=-torch.ones(9).double())
    with pytest.raises(DataError, match="not negative"):
        cumulative_error([LiftedStep(uphill, *[getattr(steps[0], name) for name in _MATRICES])], A)
    with pytest.raises(HyperparameterError, match=r"cutoff must lie in \[0, 1\)"):
        cumulative_error(steps, A, cutoff=2.0)
    ones = torch.ones(1, 2, 2)
    with pytest.raises(DataError, match=r"\[m, N, N\], \[m, M, N\]"):
        flow_cumulative_error(torch.ones(2), ones, ones, ones, torch.ones(2, 2))
    with pytest.raises(DataError, match="weights of the quadrature must be positive"):
        flow_cumulative_error(torch.zeros(1), ones, ones, ones, torch.ones(2, 2))


_MATRICES = ("gradient_map", "reach", "train_segment", "test_segment")
