"""Metrics against dense matrices from the paper, their two faces, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import oracles.signal_directions as oracle
from poprisk._core.linalg.matrices import diagonal, from_dense, from_functions
from poprisk.errors import DataError, HyperparameterError
from poprisk.theory.effective_rank import effective_rank
from poprisk.theory.graph import graph_metric, laplacian_metric, neighbour_graph, normalized_laplacian
from poprisk.theory.matrix_functions import operator_function
from poprisk.theory.metrics import metric_of

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def points(n=9):
    return torch.randn(n, 2, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("p", [1, 2])
def test_graph_metric_and_its_roots(dense, p):
    x = points()
    metric = graph_metric(x, 7.0, neighbours=3, outputs=p, dense=dense)
    R = oracle.graph_metric(x.flatten(1).numpy(), 7.0, 3, p)
    assert_close(metric.matrix.to_dense().numpy(), R, **EXACT)
    edges = (R[::p, ::p] < 0).astype(float)  # weights would cancel in R
    assert_close(neighbour_graph(x, neighbours=3).toarray(), edges, rtol=0, atol=0)
    assert_close(metric.root.to_dense().numpy(), oracle.power(R, 0.5), **EXACT)
    assert_close(metric.inverse_root.to_dense().numpy(), oracle.power(R, -0.5), **EXACT)
    low, high = metric.interval
    values = np.linalg.eigvalsh(R)
    assert low <= values[0] + 1e-12
    assert values[-1] <= high
    assert metric.defect() < 1e-11
    assert replace(metric, inverse_root=1.1 * metric.inverse_root).defect() == pytest.approx(0.21)  # 1.1² - 1


def test_equal_points_and_lonely_ones():
    graph = neighbour_graph(torch.zeros(4, 2), neighbours=2)
    assert graph.diagonal().sum() == 0
    assert (graph.sum(axis=1) >= 2).all()
    alone = normalized_laplacian([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).toarray()
    assert_close(alone[2], np.zeros(3))
    assert_close(laplacian_metric(normalized_laplacian(alone * 0), 3.0).matrix.to_dense(), torch.eye(3).double())


def test_user_metrics():
    A = torch.randn(4, 4, dtype=torch.float64)
    R = A @ A.T + torch.eye(4)
    dense = metric_of(R)
    free = metric_of(from_dense((R + R.T) / 2, symmetric=True), smallest=1.0)
    assert_close(free.root.to_dense(), dense.root.to_dense(), **EXACT)
    assert_close(dense.root.to_dense() @ dense.inverse_root.to_dense(), torch.eye(4).double(), **EXACT)
    constant = operator_function(diagonal(torch.full((2,), 4.0).double()), np.sqrt, (4.0, 4.0))
    assert_close(constant.to_dense(), 2 * torch.eye(2).double())


def test_effective_ranks():
    equal = torch.tensor([2.0, 2.0, 2.0, 0.0])
    assert [effective_rank(equal, kind) for kind in ("participation", "entropy", "stable")] == pytest.approx([3, 3, 3])
    assert effective_rank(torch.tensor([4.0, 1.0]), "stable") == pytest.approx(1.25)
    assert effective_rank(torch.tensor([4.0, 1.0])) == pytest.approx(25 / 17)
    with pytest.raises(DataError, match="not negative"):
        effective_rank(torch.tensor([-1.0]))
    with pytest.raises(HyperparameterError, match="kind"):
        effective_rank(equal, "numerical")


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: metric_of(-torch.eye(2)), DataError, "positive definite"),
        (lambda: metric_of(torch.tensor([[1.0, 2.0], [0.0, 1.0]])), DataError, "symmetric"),
        (lambda: metric_of(diagonal(torch.ones(2))), DataError, "smallest"),
        (lambda: metric_of(diagonal(torch.ones(2)), smallest=1e-12, largest=1.0), HyperparameterError, "conditioned"),
        (lambda: graph_metric(torch.zeros(3, 1), -1.0, neighbours=1), HyperparameterError, "gamma"),
        (lambda: graph_metric(torch.zeros(3, 1), 1.0, neighbours=3), HyperparameterError, "neighbours"),
        (lambda: graph_metric(torch.full((3, 1), torch.nan), 1.0, neighbours=1), DataError, "finite"),
        (lambda: normalized_laplacian([[0.0, 1.0], [0.0, 0.0]]), DataError, "symmetric"),
        (
            lambda: operator_function(
                from_functions(lambda X: X, lambda X: X, (2, 2), torch.float32), np.sqrt, (1.0, 2.0)
            ),
            DataError,
            "symmetric",
        ),
    ],
)
def test_refusals(make, error, says):
    with pytest.raises(error, match=says):
        make()
