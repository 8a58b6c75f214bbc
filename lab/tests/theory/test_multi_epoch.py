"""The residual of replayed batches: none while they are fresh, optimism once they are memorized."""

from functools import cache, partial

import numpy as np
import pytest
import torch
from torch import nn

from oracles.drift_diffusion import one_step_fresh_risk
from poprisk._core.autodiff.flat import FlatModel
from poprisk.errors import DataError
from poprisk.operators._batch_law import remaining_examples
from poprisk.runs._problem import Problem
from poprisk.runs._training import train
from poprisk_lab.theory.multi_epoch import multi_epoch_residual


def network():
    return nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 2)).double()


def population(count, seed):
    """Labels of which every fifth is a coin flip: there is something to memorize."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    labels = (x[:, 0] > 0).long()
    flipped = torch.rand(count, generator=generator) < 0.2
    return x, torch.where(flipped, 1 - labels, labels)


@cache
def first_epoch():
    problem = Problem(network, "cross_entropy", *population(160, 1))
    return problem, train(problem, partial(torch.optim.SGD, lr=0.5), 12, batch_size=8, progress=False)


def test_nothing_is_missing_in_the_first_epoch():
    problem, run = first_epoch()
    model, M = problem.model(), run.step(10).preconditioner
    left = remaining_examples(run, len(problem), 11)
    seen = {i for k in range(11) for i in run.batch(k).tolist()}
    assert len(seen) == 11 * 8
    assert left.tolist() == sorted(set(range(160)) - seen)
    rest = (problem.inputs[left], problem.targets[left])
    found = multi_epoch_residual(model, run.weights(11), rest, population(800, 2), M, 1.0, batch_size=8)
    assert found.valid
    assert abs(found.value) < 3 * found.standard_error
    assert found.standard_error < 0.1
    assert found.cost == 9 + 100


def test_memorized_batches_are_too_good():
    """After many epochs the leave-one-out risk of a replayed batch is far below that of the same step on fresh ones."""
    problem = Problem(network, "cross_entropy", *population(40, 1))
    run = train(problem, partial(torch.optim.Adam, lr=0.02), 300, batch_size=8, progress=False)
    model, fresh = problem.model(), population(400, 2)
    lr = 0.02
    early = multi_epoch_residual(model, run.weights(0), (problem.inputs, problem.targets), fresh, 1.0, lr, batch_size=8)
    late = multi_epoch_residual(
        model, run.weights(300), (problem.inputs, problem.targets), fresh, 1.0, lr, batch_size=8
    )
    assert abs(early.value) < 3 * early.standard_error
    assert late.value < -5 * late.standard_error
    assert late.value < -0.3


def test_the_fresh_side_is_the_risk_of_a_step_on_b_minus_1_examples():
    """Two examples to a batch: leaving one out steps on the other, scored on the one; by plain loops."""
    torch.manual_seed(0)
    model = FlatModel(nn.Linear(3, 2).double(), "cross_entropy")
    w, M = model.weights, torch.rand(model.size, dtype=torch.float64)
    x, y = population(4, 3)

    def loss(w, z):
        return model.per_example_losses(torch.as_tensor(w), z[0][None], z[1][None]).item()

    def gradient(w, z):
        return model.per_example_gradients(torch.as_tensor(w), z[0][None], z[1][None])[0].numpy()

    def risk(pairs):
        both = [pair for i, j in pairs for pair in ((i, j), (j, i))]
        steps = [([(x[i], y[i])], [(x[j], y[j])]) for i, j in both]
        return np.mean([one_step_fresh_risk(loss, gradient, w.numpy(), *step, M.numpy(), 0.7) for step in steps])

    generator = torch.Generator().manual_seed(0)
    replayed, fresh = (torch.randperm(n, generator=generator).view(-1, 2).tolist() for n in (2, 4))
    found = multi_epoch_residual(model, w, (x[:2], y[:2]), (x, y), M, 0.7, batch_size=2)
    assert found.value == pytest.approx(risk(replayed) - risk(fresh), abs=1e-12)
    assert not found.valid
    assert "1 batch of a kind" in found.reason


def test_bad_input_is_refused():
    model, some = FlatModel(network(), "cross_entropy"), population(8, 0)
    with pytest.raises(DataError, match="4 fresh examples"):
        multi_epoch_residual(model, model.weights, some, population(4, 1), 1.0, 0.1, batch_size=8)
    with pytest.raises(DataError, match="same number"):
        multi_epoch_residual(model, model.weights, (some[0][:5], some[1]), some, 1.0, 0.1, batch_size=2)
    with pytest.raises(DataError, match="at least 2"):
        multi_epoch_residual(model, model.weights, some, some, 1.0, 0.1, batch_size=1)
