"""Ω_B from kernel blocks against the paper's loops and against the library's rate from gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from oracles.population import off_diagonal_rate_loop
from poprisk._core.linalg.low_rank import LowRank
from poprisk.errors import DataError
from poprisk.optim import FlatModel, population_rate
from poprisk_lab.theory.kernel_rate import kernel_blocks, population_rate_from_kernel

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
def test_kernel_blocks_give_the_rate_of_the_gradients(seed, b, p, d):
    J, r = _normal(seed, b, p, d), _normal(seed + 1, b, p)
    G = torch.einsum("bpd,bp->bd", J, r)
    for M, dense in _forms(d, seed + 2).values():
        expected = off_diagonal_rate_loop(G, dense)
        assert_close(population_rate_from_kernel(kernel_blocks(J, M), r), expected, **EXACT)


def test_on_a_network():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model = FlatModel(module, "cross_entropy")
    w, x, y = model.weights, _normal(1, 5, 3), torch.tensor([0, 1, 1, 0, 1])
    G, J, r = model.per_example_gradients(w, x, y), model.output_jacobian(w, x), model.output_gradient(w, x, y)
    for M, _ in _forms(model.size, 3).values():
        assert_close(population_rate_from_kernel(kernel_blocks(J, M), r), population_rate(G, M), **EXACT)


def test_one_example_is_refused():
    with pytest.raises(DataError, match="at least 2 examples"):
        population_rate_from_kernel(torch.ones(1, 2, 1, 2), torch.ones(1, 2))
