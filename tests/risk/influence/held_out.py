"""A small run for the tests of resampling, and the same trainings one by one by the oracle."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

from oracles.resampling import holdout_weights as oracle_weights
from oracles.resampling import outputs_of, train_one_by_one
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

N = 12
MOMENTUM = partial(SGD, lr=0.2, momentum=0.9)
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}


def make_mlp(inputs=4, width=6, outputs=3):
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def data(n=N, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator, dtype=torch.float64), torch.randint(3, (n,), generator=generator)


def record(device="cpu"):
    problem = Problem(make_mlp, "cross_entropy", *data(), test=data(5, seed=2)).to(device)
    return train(problem, MOMENTUM, 20, batch_size=4, dtype=torch.float64, progress=False)


def expected(run, held, alphas=None, **examples):
    """Weights of real trainings, and for each (training, example) the outputs."""
    problem = run.problem
    alphas = [oracle_weights(N, index) for index in held] if alphas is None else alphas
    batches = [run.batch(k) for k in range(run.num_steps)]
    weights = train_one_by_one(problem, MOMENTUM, batches, torch.stack(list(alphas)), **examples)
    outputs = [outputs_of(problem, weights[k], i) for k, index in enumerate(held) for i in index]
    return weights, torch.stack(outputs)


def assert_held_out(found, run, outputs):
    problem = run.problem
    torch.testing.assert_close(found.outputs, outputs, **EXACT)
    labels = problem.targets[found.example]
    torch.testing.assert_close(found.losses, F.cross_entropy(outputs, labels, reduction="none"), **EXACT)
    before = problem.model(torch.float64).outputs(run.weights(run.num_steps), problem.inputs[found.example])
    torch.testing.assert_close(found.displacement, outputs - before, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.own_losses, F.cross_entropy(before, labels, reduction="none"), **EXACT)
    assert found.gap == pytest.approx((found.losses - found.own_losses).mean().item())
    assert found.displacement.abs().max() > 0.05
