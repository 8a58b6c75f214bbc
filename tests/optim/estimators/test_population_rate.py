"""Ω_B in parameter space against loops from the paper."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from oracles.population import kernel_rate_loop, off_diagonal_rate_loop, rate_matrix_loop
from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.linalg.low_rank import LowRank
from poprisk.errors import DataError
from poprisk.optim._estimators.rate import population_projector, population_rate, rate_matrix

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _forms(d: int, seed: int):
    diagonal, matrix, factor = _normal(seed, d).abs(), _normal(seed + 1, d, d), _normal(seed + 2, d, 2)
    return {
        "number": (0.5, 0.5 * torch.eye(d, dtype=torch.float64)),
        "diagonal": (diagonal, torch.diag(diagonal)),
        "dense": (matrix, matrix),  # not symmetric
        "low-rank": (LowRank(factor), factor @ factor.T),
    }


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(2, 7), p=st.integers(1, 3), d=st.integers(1, 6))
def test_all_forms_agree(seed, b, p, d):
    J, r = _normal(seed, b, p, d), _normal(seed + 1, b, p)
    G = torch.einsum("bpd,bp->bd", J, r)
    A = rate_matrix(G)
    assert_close(A, rate_matrix_loop(G), **EXACT)
    for M, dense in _forms(d, seed + 2).values():
        expected = off_diagonal_rate_loop(G, dense)
        assert_close(kernel_rate_loop(J, dense, r), expected, **EXACT)
        assert_close(population_rate(G, M), expected, **EXACT)
        assert_close(torch.trace(dense @ A), expected, **EXACT)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), b=st.integers(2, 8), d=st.integers(1, 8))
def test_the_rate_matrix_has_one_positive_eigenvalue_at_most(seed, b, d):
    G = _normal(seed, b, d)
    values = torch.linalg.eigvalsh(rate_matrix(G))
    assert (values > 1e-12).sum() <= 1
    assert_close(values.sum(), (G.sum(0).square().sum() - G.square().sum()) / (b * (b - 1)), **EXACT)


def test_on_a_network():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model = FlatModel(module, "cross_entropy")
    w, x, y = model.weights, _normal(1, 5, 3), torch.tensor([0, 1, 1, 0, 1])
    G = model.per_example_gradients(w, x, y)
    best = population_projector(G)
    assert_close(population_rate(G, best), best.rate, rtol=1e-10, atol=1e-12)  # through an eigenvector
    assert_close(best.rate, torch.linalg.eigvalsh(rate_matrix(G))[-1], rtol=1e-10, atol=1e-12)


def test_a_common_gradient_has_its_full_squared_norm():
    g = _normal(0, 4)
    assert_close(population_rate(g.expand(3, 4), 1.0), g @ g)


def test_it_is_unbiased_on_noise_and_the_training_rate_is_not():
    G = _normal(0, 20_000, 4, 3)  # many batches of four examples: no signal at all
    rates = torch.stack([population_rate(batch, 1.0) for batch in G[:2000]])
    naive = G[:2000].mean(dim=1).square().sum(dim=1)
    standard_error = rates.std() / 2000**0.5
    assert rates.mean().abs() < 4 * standard_error
    assert naive.mean() > 20 * standard_error


def test_one_example_is_refused():
    with pytest.raises(DataError, match="at least 2 examples, got 1"):
        rate_matrix(torch.ones(1, 3))
    with pytest.raises(DataError, match="at least 2 examples"):
        population_rate(torch.ones(1, 3), 1.0)
    with pytest.raises(DataError, match="at least 2 examples"):
        population_projector(torch.ones(1, 3))
