"""Signal directions: the minimax theorem by construction and by chance, the bounds on real windows, the relaxation."""

import numpy as np
import pytest
import torch
from spectral_cases import EXAMPLES, OUTPUTS, RULES, operators_of, visibility_of, window_of
from torch.testing import assert_close

import oracles.signal_directions as oracle
from poprisk.errors import DataError, HyperparameterError
from poprisk.theory.directions import signal_directions, signal_directions_of
from poprisk.theory.graph import graph_metric
from poprisk.theory.groups import direction_energies, example_groups, top_examples
from poprisk.theory.lost_motion import (
    admissible_bound,
    attaining_transfer,
    lost_motion_path,
    minimax_lost_motion,
    tail_bound,
    worst_lost_motion,
)
from poprisk.theory.metrics import euclidean_metric, metric_of
from poprisk.theory.self_influence import self_influence_metric, start_covectors
from poprisk.theory.soft_filter import trace_budget_filter

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


def test_spectrum_and_projectors():
    F, R = random_case()
    directions = signal_directions(F, metric_of(R))
    C = oracle.whitened_gramian((F.T @ F).numpy(), R.numpy())
    assert_close(directions.operator.to_dense().numpy(), C, **EXACT)
    assert_close(directions.values.numpy(), np.linalg.eigvalsh(C)[::-1].copy(), **EXACT)
    assert directions.residuals.max() < 1e-12 * directions.values[0]
    assert directions.rank == 6
    for r in (0, 2, 6):
        Q = oracle.top_projector(C, r)
        assert_close(directions.projector(r).to_dense().numpy(), Q, **EXACT)
        Pi = oracle.power(R.numpy(), -0.5) @ Q @ oracle.power(R.numpy(), 0.5)
        assert_close(directions.metric_projector(r).to_dense().numpy(), Pi, **EXACT)
        H = directions.directions(r)
        assert_close(H.T @ R @ H, torch.eye(r).double(), **EXACT)


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


def test_realized_lost_motion_is_that_of_the_matrices():
    ops = operators_of("momentum")
    directions = signal_directions(ops.factor, metrics_of("momentum")["graph"])
    path = lost_motion_path(directions, window_of("momentum").test_transfer, 1.0, max_rank=3)
    X = ops.test_transfer @ directions.metric.inverse_root.to_dense()
    for r in path.ranks:
        lost = torch.linalg.matrix_norm(X @ directions.projector(r).complement().to_dense(), 2).square()
        assert_close(path.realized[r], lost, **EXACT)
    assert_close(path.tightness * path.bound, path.realized, **EXACT)


def test_directions_from_products_alone():
    window = window_of("momentum")
    metric = metrics_of("momentum")["graph"]
    dense, free = signal_directions_of(window, metric), signal_directions_of(window, metric, count=3)
    assert free.converged
    assert_close(free.values, dense.values[:3], rtol=1e-8, atol=0)
    assert_close(free.projector(1).to_dense(), dense.projector(1).to_dense(), rtol=0, atol=1e-5)
    assert free.value_after(3) >= dense.value_after(3)  # what was not computed is bounded, not taken as 0
    exact = worst_lost_motion(dense, dense.projector(1), 1.0)
    assert exact <= worst_lost_motion(free, free.projector(1), 1.0) * (1 + 1e-6)
    with pytest.raises(DataError, match="count"):
        signal_directions(window.dissipation_gramian, metric)
    with pytest.raises(DataError, match="all directions"):
        admissible_bound(free, window.test_transfer, 1.0)


@pytest.mark.parametrize("tau", [0.0, 0.3, 1.0, 2.5, 3.9, 4.0, 7.0])
def test_trace_budget(tau):
    values = torch.tensor([50.0, 3.0, 2.0, 0.1], dtype=torch.float64)
    found = trace_budget_filter(values, tau)
    assert ((found.weights >= 0) & (found.weights <= 1)).all()
    assert found.weights.sum().item() == pytest.approx(min(tau, 4), abs=1e-10)
    assert found.level == pytest.approx(oracle.budget_level(values.numpy(), min(tau, 4)), abs=1e-10)
    assert ((1 - found.weights).square() * values).max().item() == pytest.approx(found.level, abs=1e-10)


def test_no_random_contraction_of_the_same_trace_is_better():
    values, tau = torch.tensor([50.0, 3.0, 2.0, 0.1], dtype=torch.float64), 1.5
    level = trace_budget_filter(values, tau).level
    A = torch.randn(2000, 4, 4, dtype=torch.float64)
    U = torch.linalg.qr(A)[0]
    spread = torch.rand(2000, 4, dtype=torch.float64)
    weights = tau * spread / spread.sum(dim=1, keepdim=True)
    keep = weights.max(dim=1).values <= 1
    V = (U * weights[:, None]) @ U.mT
    worst = torch.linalg.matrix_norm(values.sqrt()[:, None] * (torch.eye(4).double() - V[keep]), 2).square()
    assert keep.sum() > 500
    assert worst.min() >= level
    assert level <= values[1]  # trace 1.5 loses less than the best projector of rank 1


def test_energies_groups_and_tables():
    directions = signal_directions(operators_of("momentum").factor, metrics_of("momentum")["graph"])
    E = direction_energies(directions, 3, OUTPUTS)
    assert_close(E.sum(dim=0), torch.ones(3).double())
    Q = directions.projector(3).to_dense()
    blocks = [Q[2 * i : 2 * i + 2, 2 * i : 2 * i + 2].trace() for i in range(EXAMPLES)]
    assert_close(E.sum(dim=1), torch.stack(blocks))
    g = operators_of("momentum").output_gradient
    groups = example_groups(directions, 3, OUTPUTS, gradient=g)
    for i, label in enumerate(groups.labels):
        best = int(E[i].argmax())
        enough = E[i].sum() / OUTPUTS >= 3 / N
        assert label == (f"direction {best + 1}" if enough else "tail")
    outside = (g - directions.metric_projector(3) @ g).reshape(EXAMPLES, OUTPUTS).square().sum(1)
    inside = (directions.metric_projector(3) @ g).reshape(EXAMPLES, OUTPUTS).square().sum(1)
    assert_close(groups.tail_share, outside / (inside + outside))
    assert_close(groups.tail_norm, outside.sqrt())
    assert example_groups(directions, 3, OUTPUTS).tail_norm is None
    columns = groups.columns()
    assert set(columns) == {"example", "group", "captured", "energy", "tail_share", "tail_norm"}
    assert all(len(column) == EXAMPLES for column in columns.values())
    rows = top_examples(directions, 2, OUTPUTS, count=2)
    assert [row.direction for row in rows] == [0, 0, 1, 1]
    for row in rows:
        assert row.energy == pytest.approx(E[row.example, row.direction].item())
        assert row.sign == np.sign(directions.whitened[row.example * OUTPUTS + row.output, row.direction].item())
    assert rows[0].energy == pytest.approx(E[:, 0].max().item())


def test_two_blocks_make_two_groups():
    """Two sets of examples that share no direction are told apart."""
    one, two = torch.ones(3), 2 * torch.ones(4)
    factor = torch.zeros(2, 8, dtype=torch.float64)
    factor[0, :3], factor[1, 3:7] = one, two
    labels = example_groups(signal_directions(factor, euclidean_metric(8)), 2).labels
    assert labels == ["direction 2"] * 3 + ["direction 1"] * 4 + ["tail"]


def test_refusals():
    F, R = random_case()
    directions = signal_directions(F, metric_of(R))
    with pytest.raises(DataError, match="must act on"):
        signal_directions(F, euclidean_metric(3))
    with pytest.raises(HyperparameterError, match="directions known"):
        directions.projector(7)
    with pytest.raises(HyperparameterError, match="between 0"):
        directions.value_after(-1)
    with pytest.raises(DataError, match="summary"):
        worst_lost_motion(directions, torch.eye(2), 1.0)
    with pytest.raises(DataError, match="multiple"):
        direction_energies(directions, 1, outputs=4)
    with pytest.raises(HyperparameterError, match="at least one"):
        example_groups(directions, 0)
    with pytest.raises(HyperparameterError, match="count"):
        top_examples(directions, 1, count=0)
    with pytest.raises(HyperparameterError, match="budget"):
        trace_budget_filter(torch.ones(2), -1.0)
    with pytest.raises(DataError, match="descending"):
        trace_budget_filter(torch.tensor([1.0, 2.0]), 1.0)


def test_a_label_against_its_neighbours_is_left_in_the_tail():
    """Two clusters, one example of each with the target of the other: a smooth metric drops just their gradients."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(20, 2, generator=generator, dtype=torch.float64) * 0.3
    x[10:] += 5
    gradient = torch.cat([torch.ones(10), -torch.ones(10)]).double()
    gradient[[3, 14]] *= -1
    directions = signal_directions(torch.eye(20).double(), graph_metric(x, 50.0, neighbours=4))
    tail = example_groups(directions, 2, gradient=gradient).tail_norm
    assert tail is not None
    assert set(tail.topk(2).indices.tolist()) == {3, 14}
