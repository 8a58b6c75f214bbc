"""Small recorded runs with real optimizers, and frozen problems, made once per test session."""

from functools import cache, partial

import torch
from torch import nn

from poprisk.operators._channels import dissipation_channels
from poprisk.operators._window import Window
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.runs._problem import Problem
from poprisk.runs._training import train
from poprisk.theory.frozen import frozen_problem_of_features

EXAMPLES, OUTPUTS, TESTS = 6, 2, 4
RULES = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.8),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "poprisk": partial(PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha="calibrated"), lr=0.2, weight_decay=0.05),
}


def make_network():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, OUTPUTS)).double()


@cache
def window_of(rule):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES + TESTS, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(x[:, :OUTPUTS] * 2)
    test = (x[EXAMPLES:], y[EXAMPLES:])
    problem = Problem(make_network, "squared", x[:EXAMPLES], y[:EXAMPLES], test=test)
    return Window.of_run(train(problem, RULES[rule], 5, batch_size=4, progress=False))


@cache
def operators_of(rule):
    return window_of(rule).dense_operators()


@cache
def visibility_of(rule):
    ops = operators_of(rule)
    return dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer).visibility_norm


@cache
def frozen_case(seed=0, n=5, p=1, d=9, tests=4):
    """Features, a problem with outputs at the start, clean targets and a truth, all random."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    J_S, J_Q, u_S, u_Q = normal(n * p, d), normal(tests, d), normal(n * p), normal(tests)
    problem = frozen_problem_of_features(J_S, J_Q, outputs=p, start_train=u_S, start_test=u_Q)
    return J_S, J_Q, problem, normal(n * p), normal(tests)
