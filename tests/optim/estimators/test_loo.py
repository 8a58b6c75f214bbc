"""Real one-step deletions: against a loop, and their second-order distance from the first-order formula."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from oracles.population import loo_risk_loop
from poprisk._core.autodiff.flat import FlatModel
from poprisk.errors import DataError
from poprisk.optim._estimators.loo import one_step_loo_risk
from poprisk.optim._estimators.rate import population_projector, population_rate


def _problem(chunk_size=None):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    return FlatModel(module, "squared", chunk_size=chunk_size), x, y


def _preconditioner(form, model, G):
    generator = torch.Generator().manual_seed(2)
    factor = torch.randn(model.size, model.size, generator=generator, dtype=torch.float64)
    return {"diagonal": factor[0].square(), "dense": factor @ factor.T / model.size, "best": population_projector(G)}[
        form
    ]


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("form", ["diagonal", "dense", "best"])
def test_equals_a_loop_of_deletions(form, chunk_size):
    model, x, y = _problem(chunk_size)
    w = model.weights
    M = _preconditioner(form, model, model.per_example_gradients(w, x, y))
    dense = torch.diag(M) if form == "diagonal" else M if form == "dense" else M.to_dense()

    def loss(w, example):
        out = functional_call(model.module, model.unflatten(w), (example[0][None],))
        return (out[0] - example[1]).square().sum() / 2

    expected = loo_risk_loop(loss, w, list(zip(x, y, strict=True)), dense, 0.1)
    assert_close(one_step_loo_risk(model, w, x, y, M, 0.1), expected)


@pytest.mark.parametrize("form", ["diagonal", "dense", "best"])
def test_the_remainder_is_of_second_order(form):
    model, x, y = _problem()
    w = model.weights
    G = model.per_example_gradients(w, x, y)
    M = _preconditioner(form, model, G)
    risk, rate = model.per_example_losses(w, x, y).mean(), population_rate(G, M)
    steps = [2.0**-k for k in range(9, 15)]
    remainders = [abs((one_step_loo_risk(model, w, x, y, M, lr) - risk + lr * rate).item()) for lr in steps]
    logs = torch.tensor([[math.log(lr), math.log(r)] for lr, r in zip(steps, remainders, strict=True)])
    centred = logs - logs.mean(dim=0)
    slope = (centred[:, 0] * centred[:, 1]).sum() / centred[:, 0].square().sum()
    assert_close(slope, torch.tensor(2.0), rtol=0, atol=0.05)  # the third-order term bends the line a little
    assert max(remainders) > 1e-9  # far from rounding


def test_no_step_is_the_batch_risk():
    model, x, y = _problem()
    assert_close(
        one_step_loo_risk(model, model.weights, x, y, 1.0, 0.0), model.per_example_losses(model.weights, x, y).mean()
    )


def test_one_example_is_refused():
    model, x, y = _problem()
    with pytest.raises(DataError, match="at least 2 examples, got 1"):
        one_step_loo_risk(model, model.weights, x[:1], y[:1], 1.0, 0.1)
