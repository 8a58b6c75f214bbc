"""The trace-budget relaxation: its level, and that no random contraction is better."""

import pytest
import torch

import oracles.signal_directions as oracle
from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.theory.soft_filter import trace_budget_filter

EXACT = {"rtol": 1e-10, "atol": 1e-10}


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
    found = trace_budget_filter(values, tau)
    level = found.level
    best = (1 - (level / values).sqrt()).clamp_min(0)  # the filter in closed form has this trace and attains the level
    assert best.sum().item() == pytest.approx(tau)
    assert found.weights.tolist() == pytest.approx(best.tolist())
    assert ((1 - best).square() * values).max().item() == pytest.approx(level)
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


def test_refusals():
    with pytest.raises(HyperparameterError, match="budget"):
        trace_budget_filter(torch.ones(2), -1.0)
    with pytest.raises(DataError, match="descending"):
        trace_budget_filter(torch.tensor([1.0, 2.0]), 1.0)
