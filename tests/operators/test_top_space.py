"""Channels and coupling on the leading eigenvectors of W: the dense ones where all is taken, else within bounds."""

from dataclasses import replace

import pytest
import torch
from recorded_runs import RULES, operators_of, relative, window_of
from torch.testing import assert_close

from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk._core.linalg.spectra import top_eigenpairs
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling
from poprisk.operators._cumulative import lifted_maps
from poprisk.operators._top_space import top_channels
from poprisk.operators._visibility import lifted_gramian, visibility_limit
from poprisk.operators._window import Window

LOSS = "cross_entropy"
FINE = 1e-13


def dense_channels(rule, start, cutoff):
    ops = operators_of("mlp", rule, LOSS, start=start)
    return ops, dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer, cutoff=cutoff)


def free_window(rule, start=4, **options):
    return window_of("mlp", rule, LOSS, start=start, dense=False, **options)


def norm(X):
    return torch.linalg.matrix_norm(X, 2).item()


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_with_all_of_the_signal_channel_it_is_the_dense_one(rule):
    """Four steps of three examples leave examples undrawn: W has a null space, and above it everything is taken."""
    window = free_window(rule, start=7)
    top = top_channels(window, window.num_outputs, tolerance=FINE)
    ops, dense = dense_channels(rule, 7, top.epsilon / top.pairs.values[0].item())
    assert top.rank == dense.rank < window.num_outputs
    assert top.channels.train_rank == dense.train_rank
    expected, found = Coupling(dense), top.coupling
    assert relative(top.channels.train_channel, dense.train_channel) < 1e-8
    assert relative(top.channels.test_channel, dense.test_channel) < 1e-8
    assert relative(found.matrix, expected.matrix) < 1e-8
    assert norm(found.remainder - expected.remainder) < 1e-8 * norm(dense.test_channel)
    assert_close(top.channels.train_roots, dense.train_roots, rtol=1e-8, atol=1e-8 * dense.train_roots[0].item())
    assert relative(top.channels.signal.to_dense(), dense.signal.to_dense()) < 1e-8
    h = torch.ones(window.num_outputs, dtype=torch.float64)
    assert_close(top.channels.test_transfer @ h, ops.test_transfer @ h, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("r", [2, 9])
@pytest.mark.parametrize("rule", RULES)
def test_what_is_left_out_is_within_its_bounds(rule, r):
    window = window_of("mlp", rule, LOSS, start=4)
    top = top_channels(window, r, tolerance=1e-9)
    ops, dense = dense_channels(rule, 4, None)
    outside = top.channels.reservoir.to_dense()
    W = ops.dissipation_gramian
    assert 1 <= top.rank <= r
    assert norm(outside @ W @ outside) <= top.epsilon
    assert dense.visibility_norm <= top.test_limit
    assert dense.train_roots[0].square() <= top.train_limit
    assert top.channels.visibility_norm <= dense.visibility_norm * (1 + 1e-9)
    assert 0 < norm(ops.test_transfer @ outside) <= top.test_left_out
    assert 0 < norm(ops.train_transfer @ outside) <= top.train_left_out
    A = top.coupling.matrix
    assert top.coupling_norm == pytest.approx(norm(A))
    probes = torch.randn(window.num_outputs, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for h in (ops.output_gradient, top.channels.vectors[:, 0], *probes.T):
        error = (ops.test_transfer @ h - A @ (ops.train_transfer @ h)).norm().item()
        assert error <= top.prediction_bound(h) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("tolerance", [1e-2, 1e-4])
def test_rough_eigenvectors_have_a_larger_epsilon_that_still_holds(tolerance):
    window = window_of("mlp", "momentum", LOSS, start=4)
    top = top_channels(window, 6, tolerance=tolerance)
    W = operators_of("mlp", "momentum", LOSS, start=4).dissipation_gramian
    outside = top.channels.reservoir.to_dense()
    assert norm(outside @ W @ outside) <= top.epsilon
    first_left_out = top.pairs.values[top.rank].item()
    assert first_left_out < top.epsilon <= first_left_out + 2 * 7**0.5 * tolerance * top.pairs.values[0].item()


@pytest.mark.parametrize("test", [True, False], ids=["test", "train"])
@pytest.mark.parametrize("rule", RULES)
def test_the_limit_is_the_norm_of_the_lifted_maps(rule, test):
    """The same maps that the cumulative error is made of, dense."""
    window = window_of("mlp", rule, LOSS, start=4)
    lifted = window.lifted_steps()
    maps = lifted_maps(lifted if test else [replace(step, test_segment=step.train_segment) for step in lifted])
    expected = sum(L @ L.T for L in maps)
    found = lifted_gramian(window, test=test)
    assert relative(found.to_dense(), expected) < 1e-11
    assert adjoint_mismatch(found) < 1e-11
    limit = visibility_limit(window, test=test, tolerance=1e-6)
    assert norm(expected) * (1 - 1e-9) <= limit <= norm(expected) * (1 + 1e-5)


def test_pairs_that_are_known_are_used_and_a_surrogate_serves():
    window = window_of("mlp", "momentum", LOSS, start=4)
    pairs = top_eigenpairs(window.dissipation_gramian, 8, tolerance=1e-9)
    known = top_channels(window, 4, pairs=pairs)
    direct = top_channels(window, 4, tolerance=1e-9)
    assert len(known.pairs.values) == 5
    assert relative(known.coupling.matrix, direct.coupling.matrix) < 1e-6
    rough = window_of("mlp", "momentum", LOSS, start=4, nodes=1)
    by_proxy = top_channels(window, 4, surrogate=rough, tolerance=1e-2)
    assert by_proxy.pairs.surrogate_products > 0
    assert by_proxy.pairs.residuals.max() <= 1e-2 * by_proxy.pairs.values[0]


def test_a_window_with_fewer_nodes_shares_everything_else():
    window = free_window("momentum", start=7)
    coarse = window.with_nodes(1)
    H = torch.randn(window.num_outputs, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = operators_of("mlp", "momentum", LOSS, start=7).dissipation_gramian @ H
    finest = max(maps.nodes for maps in window.steps)
    assert {maps.nodes for maps in coarse.steps} == {1} != {maps.nodes for maps in window.steps}
    assert relative(window.with_nodes(2 * finest).dissipation_gramian @ H, exact) < 1e-8
    assert 1e-8 < relative(coarse.dissipation_gramian @ H, exact) < 0.3
    assert coarse.corrections()[:, 0].max() > 1e-6
    assert_close(coarse.corrections()[:, 1:], window.corrections()[:, 1:])
    with pytest.raises(DataError, match="a dense window"):
        window_of("mlp", "momentum", LOSS, start=7).with_nodes(1)


def test_what_cannot_be_answered_is_refused():
    window = window_of("mlp", "momentum", LOSS, start=4)
    with pytest.raises(HyperparameterError, match="r must be a positive"):
        top_channels(window, 0)
    with pytest.raises(DataError, match="r = 4 needs 5 eigenpairs"):
        top_channels(window, 4, pairs=top_eigenpairs(window.dissipation_gramian, 4))
    with pytest.raises(DataError, match="no gap among the 1"):
        top_channels(window, 1, max_products=10, tolerance=1e-9)
    run = window._trajectory
    blind = Window(run, window.model, window.inputs, window.targets, stop=1, dense=False)
    with pytest.raises(DataError, match="need a test set"):
        top_channels(blind, 2)
    with pytest.raises(DataError, match="needs a test set"):
        visibility_limit(blind)
