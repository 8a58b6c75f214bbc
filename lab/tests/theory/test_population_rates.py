"""The rate of the last step's gate on this step's batch: what it says about signal, and about noise."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from poprisk.errors import DataError
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._estimators.rate import population_rate
from poprisk.runs._problem import Problem
from poprisk.runs._training import train
from poprisk_lab.theory.population_rates import population_rates


def first_epoch(signal: float, n: int = 600, seed: int = 0):
    """Every example seen once, so that the theory's independence holds."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=generator, dtype=torch.float64)
    y = signal * x[:, :1] + torch.randn(n, 1, generator=generator, dtype=torch.float64)
    problem = Problem(nn.Linear, "squared", x, y, arguments={"in_features": 12, "out_features": 1}, seed=1)
    rule = partial(PopRiskAdamW, lr=1e-4, gate=Gate("hard", alpha="calibrated"), weight_decay=0.0)
    return train(problem, rule, n // 10, batch_size=10, seed=seed, dtype=torch.float64, progress=False), problem


def test_rates_are_those_of_the_gradients():
    run, problem = first_epoch(1.0, n=60)
    model = problem.model(torch.float64)
    for k, rate in zip((1, 4), population_rates(run, [1, 4]), strict=True):
        rows = run.batch(k)
        g = model.per_example_gradients(run.weights(k), problem.inputs[rows], problem.targets[rows])
        assert_close(rate, population_rate(g, run.step(k - 1).preconditioner))


def test_signal_is_seen():
    run, _ = first_epoch(2.0)
    rates = population_rates(run)[20:]
    assert rates.mean() > 3 * rates.std() / len(rates) ** 0.5


def test_on_its_own_batch_a_gate_flatters_itself():
    """Pure noise: labels that no weight explains, weights that hardly move. Lagged it is 0 within its error."""
    own, lagged = [], []
    for seed in range(3):
        generator = torch.Generator().manual_seed(100 + seed)
        x = torch.randn(1000, 12, generator=generator, dtype=torch.float64)
        y = torch.randn(1000, 1, generator=generator, dtype=torch.float64)
        problem = Problem(make_zero, "squared", x, y)
        rule = partial(
            PopRiskAdamW, lr=1e-6, gate=Gate("hard", alpha=0.05, normalize=False), betas=(0.0, 0.999), weight_decay=0.0
        )
        run = train(problem, rule, 80, batch_size=10, seed=seed, dtype=torch.float64, progress=False)
        own.append(population_rates(run, range(20, 80), lagged=False))
        lagged.append(population_rates(run, range(20, 80)))
    own, lagged = torch.cat(own), torch.cat(lagged)
    assert own.mean() > 3 * own.std() / len(own) ** 0.5
    assert lagged.mean().abs() < 3 * lagged.std() / len(lagged) ** 0.5


def make_zero():
    model = nn.Linear(12, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def test_steps_outside_the_run_are_refused():
    run, _ = first_epoch(1.0, n=60)
    with pytest.raises(DataError, match=r"steps must lie in 1 … 5, got \[0\]"):
        population_rates(run, [0])
