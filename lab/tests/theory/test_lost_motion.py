"""The minimax theorem by construction and by chance, and its bounds on real windows."""

import numpy as np
import pytest
import torch
from spectral_cases import EXAMPLES, OUTPUTS, RULES, operators_of, visibility_of, window_of
from torch.testing import assert_close

import oracles.signal_directions as oracle
from poprisk.errors import DataError
from poprisk.theory.directions import signal_directions, signal_directions_of
from poprisk.theory.graph import graph_metric
from poprisk.theory.metrics import euclidean_metric, metric_of
from poprisk_lab.theory.lost_motion import (
    admissible_bound,
    attaining_transfer,
    lost_motion_path,
    minimax_lost_motion,
    tail_bound,
    worst_lost_motion,
)
from poprisk_lab.theory.self_influence import self_influence_metric, start_covectors

EXACT = {"rtol": 1e-10, "atol": 1e-10}


N = EXAMPLES * OUTPUTS


def random_case(n=6):
    """A factor of W and a metric, both of full rank."""
    generator = torch.Generator().manual_seed(11)
    F, A = torch.randn(2, n, n, generator=generator, dtype=torch.float64)
    return F, A @ A.T + torch.eye(n)


def metrics_of(rule):
    window = window_of(rule)
    graph = graph_metric(window.inputs, 3.0, neighbours=2, outputs=OUTPUTS)
    return {
        "euclidean": euclidean_metric(N),
        "graph": graph,
        "self-influence": self_influence_metric(graph, operators_of(rule).train_transfer, start_covectors(window), 0.5),
    }


def test_the_minimax_value_is_attained_and_no_random_projector_is_below():
    F, R = random_case()
    directions, visibility, r = signal_directions(F, metric_of(R)), 2.5, 2
    value = minimax_lost_motion(directions, r, visibility)
    best = directions.projector(r)
    assert worst_lost_motion(directions, best, visibility) == pytest.approx(value, rel=1e-10)
    C = directions.operator.to_dense()
    A, attained = oracle.attained_loss(C.numpy(), best.to_dense().numpy(), visibility)
    assert attained == pytest.approx(value, rel=1e-10)
    assert_close(attaining_transfer(directions, best, visibility).to_dense().numpy(), A, **EXACT)
    bases = torch.linalg.qr(torch.randn(10_000, 6, r, dtype=torch.float64))[0]
    rest = torch.eye(6).double() - bases @ bases.mT
    worst = visibility * torch.linalg.eigvalsh(rest @ C @ rest)[:, -1]
    assert worst.min() >= value * (1 - 1e-10)
    assert worst_lost_motion(directions, bases[0] @ bases[0].T, visibility) == pytest.approx(worst[0].item(), rel=1e-10)


def test_what_attains_the_worst_case_is_admissible():
    F, R = random_case()
    directions = signal_directions(F, metric_of(R))
    C = directions.operator.to_dense()
    for M in (directions.projector(3).to_dense(), torch.diag(torch.linspace(0, 1, 6, dtype=torch.float64))):
        A = attaining_transfer(directions, M, 2.0).to_dense()
        assert torch.linalg.eigvalsh(2.0 * C - A)[0] > -1e-10 * C.norm()
        rest = torch.eye(6).double() - M
        lost = torch.linalg.eigvalsh(rest @ A @ rest)[-1].item()
        assert lost == pytest.approx(worst_lost_motion(directions, M, 2.0), rel=1e-10)


def test_the_optimum_is_not_unique():
    """diag(100, 1): two contractions; diag(3, 2, 1), with a gap: a projector turned from e1 toward e3."""
    pair = signal_directions(torch.diag(torch.tensor([10.0, 1.0])).double(), euclidean_metric(2))
    for kept in (1.0, 0.9):
        assert worst_lost_motion(
            pair, torch.diag(torch.tensor([kept, 0.0], dtype=torch.float64)), 1.0
        ) == pytest.approx(1, rel=1e-10)
    assert worst_lost_motion(pair, torch.diag(torch.tensor([0.8, 0.0])).double(), 1.0) > 3
    triple = signal_directions(torch.tensor([3.0, 2.0, 1.0]).double().sqrt().diag(), euclidean_metric(3))
    turned = torch.tensor([np.cos(0.1), 0.0, np.sin(0.1)], dtype=torch.float64)
    assert worst_lost_motion(triple, torch.outer(turned, turned), 1.0) == pytest.approx(2, rel=1e-10)
    assert minimax_lost_motion(triple, 1, 1.0) == pytest.approx(2, rel=1e-10)
    best = triple.projector(1)  # the theorem's, onto e1, is another one and no better
    assert_close(best.to_dense(), torch.diag(torch.tensor([1.0, 0.0, 0.0])).double(), **EXACT)
    assert worst_lost_motion(triple, best, 1.0) == pytest.approx(2, rel=1e-10)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", ["euclidean", "graph", "self-influence"])
def test_bounds_hold_on_real_windows(rule, kind):
    ops, visibility = operators_of(rule), visibility_of(rule)
    directions = signal_directions(ops.factor, metrics_of(rule)[kind])
    bound = admissible_bound(directions, ops.test_transfer, visibility)
    assert bound.holds, bound
    # A smaller constant does not do: the bound can fail.
    assert not admissible_bound(directions, ops.test_transfer, 0.9 * visibility).holds
    for r in range(directions.rank + 1):
        for h in (ops.output_gradient, *torch.randn(3, N, dtype=torch.float64)):
            bound = tail_bound(directions, ops.test_transfer, visibility, r, h)
            assert bound.holds, bound
    path = lost_motion_path(directions, ops.test_transfer, visibility)
    slack = 1e-10 * path.realized[0]
    assert (path.realized <= path.bound + slack).all()
    assert (path.realized.diff() <= slack).all()
    assert path.realized[directions.rank] <= slack  # nothing is left to lose


def test_both_sides_of_the_bounds_are_those_of_dense_matrices():
    F, R = random_case()
    G, h = (torch.randn(size, generator=torch.Generator().manual_seed(5), dtype=torch.float64) for size in ((3, 6), 6))
    directions, visibility = signal_directions(F, metric_of(R)), 1.7
    sizes, axes = torch.linalg.eigh(R)
    root, inverse = ((axes * sizes**power) @ axes.T for power in (0.5, -0.5))
    C, X = inverse @ F.T @ F @ inverse, G @ inverse
    values, V = (each.flip(-1) for each in torch.linalg.eigh(C))
    bound = admissible_bound(directions, G, visibility)
    largest = torch.linalg.eigvalsh(X.T @ X - visibility * C)[-1].item()
    assert (bound.left, bound.right) == pytest.approx((largest, 0.0), rel=1e-9)
    for r in range(6):
        z = root @ h - V[:, :r] @ V[:, :r].T @ root @ h
        sides = (X @ z).square().sum().item(), visibility * values[r].item() * z.square().sum().item()
        bound = tail_bound(directions, G, visibility, r, h)
        assert (bound.left, bound.right) == pytest.approx(sides, rel=1e-8), r


def test_realized_lost_motion_is_that_of_the_matrices():
    ops = operators_of("momentum")
    directions = signal_directions(ops.factor, metrics_of("momentum")["graph"])
    path = lost_motion_path(directions, window_of("momentum").test_transfer, 1.0, max_rank=3)
    X = ops.test_transfer @ directions.metric.inverse_root.to_dense()
    for r in path.ranks:
        lost = torch.linalg.matrix_norm(X @ directions.projector(r).complement().to_dense(), 2).square()
        assert_close(path.realized[r], lost, **EXACT)
    assert_close(path.tightness * path.bound, path.realized, **EXACT)


def test_leading_directions_alone_bound_the_worst_case():
    window = window_of("momentum")
    metric = metrics_of("momentum")["graph"]
    dense, free = signal_directions_of(window, metric), signal_directions_of(window, metric, count=3)
    exact = worst_lost_motion(dense, dense.projector(1), 1.0)
    assert exact <= worst_lost_motion(free, free.projector(1), 1.0) * (1 + 1e-6)
    with pytest.raises(DataError, match="all directions"):
        admissible_bound(free, window.test_transfer, 1.0)


def test_a_summary_of_another_size_is_refused():
    F, R = random_case()
    with pytest.raises(DataError, match="summary"):
        worst_lost_motion(signal_directions(F, metric_of(R)), torch.eye(2), 1.0)
