"""What exclusion predicts for the weights and for the examples: exact for linear models, at any stopping time."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from poprisk.risk import leave_one_out
from poprisk.runs import Problem, train
from poprisk_lab.theory.exclusion import excluded_weights, exclusion_displacement


@pytest.fixture(scope="module")
def run():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(12, k, generator=generator, dtype=torch.float64) for k in (3, 1))
    problem = Problem(nn.Linear, "squared", x, y, arguments={"in_features": 3, "out_features": 1})
    rule = {"lr": 0.1, "momentum": 0.9}
    return train(problem, lambda p: torch.optim.SGD(p, **rule), 7, batch_size=4, dtype=torch.float64, progress=False)


@pytest.mark.parametrize("mass_preserving", [False, True])
def test_weights_are_those_of_real_trainings(run, mass_preserving):
    moved = excluded_weights(run, torch.arange(12), mass_preserving=mass_preserving)
    real = leave_one_out(run, renormalize=mass_preserving, progress=False)
    assert_close(moved.T + run.weights(7), real.weights, rtol=1e-10, atol=1e-12)


def test_displacements_are_those_of_real_trainings(run):
    real = leave_one_out(run, progress=False)
    assert_close(exclusion_displacement(run), real.displacement, rtol=1e-9, atol=1e-12)
    some = torch.tensor([3, 5])
    assert_close(exclusion_displacement(run, some), real.displacement[some], rtol=1e-9, atol=1e-12)
