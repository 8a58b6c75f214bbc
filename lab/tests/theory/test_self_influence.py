"""The self-influence metric against dense matrices from the paper, and what it refuses."""

import numpy as np
import pytest
import torch
from spectral_cases import EXAMPLES, OUTPUTS, operators_of, window_of
from torch.testing import assert_close

import oracles.signal_directions as oracle
from poprisk.errors import DataError, HyperparameterError
from poprisk.theory.graph import graph_metric
from poprisk.theory.metrics import euclidean_metric, metric_of
from poprisk_lab.theory.self_influence import (
    self_influence_metric,
    start_covectors,
    weighted_transfer,
    weighted_transfer_spectrum,
)

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("gamma", [0.0, 2.0])
def test_self_influence_metric_of_a_real_window(dense, gamma):
    window, ops = window_of("momentum"), operators_of("momentum")
    base = graph_metric(window.inputs, gamma, neighbours=2, outputs=OUTPUTS)
    a = start_covectors(window)
    assert_close(a, window.start_outputs - window.targets)  # squared loss
    D = ops.train_transfer if dense else window.train_transfer
    metric = self_influence_metric(base, D, a, 0.5, dense=dense)
    if not dense and gamma == 0:  # the responses do not fit: every product is a sweep
        swept = self_influence_metric(base, D, a, 0.5, dense=False, memory=0, accuracy=1e-3)
        assert_close(swept.matrix.to_dense(), metric.matrix.to_dense(), **EXACT)
        assert swept.defect(probes=1) < 0.02
    R = oracle.graph_metric(window.inputs.numpy(), gamma, 2, OUTPUTS)
    R = oracle.self_influence_metric(R, ops.train_transfer.numpy(), a.numpy(), 0.5)
    assert_close(metric.matrix.to_dense().numpy(), R, **EXACT)
    assert_close(metric.root.to_dense().numpy(), oracle.power(R, 0.5), **EXACT)
    assert_close(metric.inverse_root.to_dense().numpy(), oracle.power(R, -0.5), **EXACT)


def test_without_gamma_and_beta_the_metric_is_the_identity():
    window = window_of("momentum")
    base = graph_metric(window.inputs, 0.0, outputs=OUTPUTS, neighbours=2)
    metric = self_influence_metric(base, window.train_transfer, start_covectors(window), 0.0)
    eye = torch.eye(EXAMPLES * OUTPUTS, dtype=torch.float64)
    for operator in (metric.matrix, metric.root, metric.inverse_root):
        assert_close(operator.to_dense(), eye, rtol=0, atol=1e-10)


def test_a_response_common_to_all_examples_costs_nothing():
    n = 4
    metric = self_influence_metric(euclidean_metric(n), torch.eye(n).double(), torch.ones(n, 1).double(), 9.0)
    common, uneven = torch.ones(n).double(), torch.tensor([1.0, -1.0, 0.0, 0.0]).double()
    assert_close(common @ (metric.matrix @ common), common @ common)
    assert_close(uneven @ (metric.matrix @ uneven), 10 * uneven @ uneven)


def test_weighted_transfer():
    ops = operators_of("momentum")
    R = metric_of(torch.diag(torch.linspace(1.0, 4.0, EXAMPLES * OUTPUTS, dtype=torch.float64)))
    X = ops.test_transfer.numpy() @ oracle.power(R.matrix.to_dense().numpy(), -0.5)
    T = weighted_transfer(R, window_of("momentum").test_transfer)
    assert T.symmetric
    assert_close(T.to_dense().numpy(), X.T @ X, **EXACT)
    spectrum = weighted_transfer_spectrum(R, ops.test_transfer)
    assert_close(spectrum.values.numpy(), np.linalg.eigvalsh(X.T @ X)[::-1][: len(spectrum.values)].copy(), **EXACT)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (
            lambda: self_influence_metric(euclidean_metric(3), torch.eye(2), torch.ones(2, 1), 1.0),
            DataError,
            "base metric",
        ),
        (
            lambda: self_influence_metric(euclidean_metric(2), torch.eye(2), torch.ones(2, 1), -1.0),
            HyperparameterError,
            "beta",
        ),
    ],
)
def test_refusals(make, error, says):
    with pytest.raises(error, match=says):
        make()
