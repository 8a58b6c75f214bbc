"""Signal directions: spectrum and projectors, dense and from products alone, and the groups of examples they make."""

import numpy as np
import pytest
import torch
from spectral_cases import EXAMPLES, OUTPUTS, operators_of, window_of
from torch.testing import assert_close

import oracles.signal_directions as oracle
from poprisk.errors import DataError, HyperparameterError
from poprisk.theory.directions import signal_directions, signal_directions_of
from poprisk.theory.graph import graph_metric
from poprisk.theory.groups import direction_energies, example_groups, top_examples
from poprisk.theory.metrics import euclidean_metric, metric_of

EXACT = {"rtol": 1e-10, "atol": 1e-10}
N = EXAMPLES * OUTPUTS


def random_case(n=6):
    """A factor of W and a metric, both of full rank."""
    generator = torch.Generator().manual_seed(11)
    F, A = torch.randn(2, n, n, generator=generator, dtype=torch.float64)
    return F, A @ A.T + torch.eye(n)


def metric_of_run(rule):
    return graph_metric(window_of(rule).inputs, 3.0, neighbours=2, outputs=OUTPUTS)


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


def test_directions_from_products_alone():
    window = window_of("momentum")
    metric = metric_of_run("momentum")
    dense, free = signal_directions_of(window, metric), signal_directions_of(window, metric, count=3)
    assert free.converged
    assert_close(free.values, dense.values[:3], rtol=1e-8, atol=0)
    assert_close(free.projector(1).to_dense(), dense.projector(1).to_dense(), rtol=0, atol=1e-5)
    assert free.value_after(3) >= dense.value_after(3)  # what was not computed is bounded, not taken as 0
    with pytest.raises(DataError, match="count"):
        signal_directions(window.dissipation_gramian, metric)


def test_energies_groups_and_tables():
    directions = signal_directions(operators_of("momentum").factor, metric_of_run("momentum"))
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
    with pytest.raises(DataError, match="multiple"):
        direction_energies(directions, 1, outputs=4)
    with pytest.raises(HyperparameterError, match="at least one"):
        example_groups(directions, 0)
    with pytest.raises(HyperparameterError, match="count"):
        top_examples(directions, 1, count=0)


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
