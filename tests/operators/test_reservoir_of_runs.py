"""Exact reservoirs of recorded runs: examples never drawn, and examples with equal inputs, drawn in one proportion."""

import pytest
import torch
from networks import draw
from recorded_runs import optimizer, problem_of, relative

from poprisk.operators._channels import dissipation_channels
from poprisk.operators._window import Window
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder

RULES = ("momentum", "adam", "poprisk")
LOSSES = ("squared", "cross_entropy")


def recorded(problem, make, batches):
    """A loop by hand over these batches, recorded."""
    module = problem.module()
    stepper = make(module.parameters())
    with Recorder(None, module, stepper, problem=problem) as recorder:
        for indices in map(torch.tensor, batches):
            with recorder.step(indices):
                stepper.zero_grad()
                inputs, targets = problem.batch(indices)
                problem.batch_loss(module(inputs), targets).backward()
                stepper.step()
    return recorder.run


def operators(kind, rule, loss, batches, *, twins=None):
    """The operators of such a run; the inputs of the two twins are equal, their targets are not."""
    inputs, elsewhere = draw(kind, 12).split([8, 4])
    problem = problem_of(kind, loss, inputs, elsewhere)
    if twins is not None:
        inputs = inputs.clone()
        inputs[twins[1]] = inputs[twins[0]]
        targets = problem.targets.clone()
        targets[twins[1]] = targets[twins[0]].roll(1, -1) if loss == "squared" else (targets[twins[0]] + 1) % 3
        problem = Problem(problem.make_model, loss, inputs, targets, arguments=problem.arguments, test=problem.test)
    run = recorded(problem, optimizer(rule, kind, loss), batches)
    ops = Window.of_run(run, dense=True).dense_operators()
    assert relative(ops.predicted_test, ops.test_displacement) < 1e-12
    return ops


def directions(ops, **weights):
    """The output gradients that hold these numbers at the named examples, one column for each output."""
    p = len(ops.output_gradient) // ops.num_examples
    e = torch.zeros(ops.num_examples, dtype=torch.float64)
    for name, weight in weights.items():
        e[int(name.removeprefix("example_"))] = weight
    return torch.kron(e[:, None] / e.norm(), torch.eye(p, dtype=torch.float64))


def assert_in_reservoir(ops, H):
    for X in (ops.factor, ops.train_transfer, ops.test_transfer):
        assert (X @ H).norm() < 1e-13 * X.norm()
    channels = dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer)
    assert channels.rank <= len(ops.output_gradient) - H.shape[1]
    hidden = channels.reservoir.to_dense()
    assert relative(hidden @ H, H) < 1e-8
    assert torch.linalg.matrix_norm(ops.test_transfer @ hidden, 2) < 1e-8 * torch.linalg.matrix_norm(
        ops.test_transfer, 2
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(("kind", "rule"), [*(("mlp", rule) for rule in RULES), ("transformer", "momentum")])
def test_what_was_never_drawn(kind, rule, loss):
    """Three of eight examples are never drawn: they are reservoir, whatever their loss."""
    ops = operators(kind, rule, loss, [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4], [0, 2]])
    for never in ("example_5", "example_6", "example_7"):
        assert_in_reservoir(ops, directions(ops, **{never: 1.0}))
    assert (ops.test_transfer @ directions(ops, example_0=1.0)).norm() > 1e-2 * ops.test_transfer.norm()


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "batches",
    [[list(range(8))] * 4, [[0, 7, 1], [2, 3, 4], [7, 5, 0], [6, 1, 2], [0, 7]]],
    ids=["full batches", "together or not at all"],
)
def test_twins_drawn_together_hide_their_difference(batches, rule, loss):
    """Equal inputs, S equal on both at every step: no step can tell them apart, only their mean is visible."""
    ops = operators("mlp", rule, loss, batches, twins=(0, 7))
    assert_in_reservoir(ops, directions(ops, example_0=1.0, example_7=-1.0))
    together = directions(ops, example_0=1.0, example_7=1.0)
    assert (ops.test_transfer @ together).norm() > 1e-2 * ops.test_transfer.norm()


def test_twins_drawn_in_one_proportion_hide_another_direction():
    """One of them counted twice at every step: hidden is (1/2, -1), no longer (1, -1)."""
    ops = operators("mlp", "adam", "cross_entropy", [[0, 0, 7], [1, 2, 3], [7, 0, 4, 0], [5, 6, 1]], twins=(0, 7))
    assert_in_reservoir(ops, directions(ops, example_0=0.5, example_7=-1.0))
    assert (ops.test_transfer @ directions(ops, example_0=1.0, example_7=-1.0)).norm() > 1e-3 * ops.test_transfer.norm()


@pytest.mark.parametrize("rule", RULES)
def test_twins_drawn_apart_hide_nothing(rule):
    """Had in turn by single steps, their difference has moved the weights, and test outputs with them."""
    ops = operators("mlp", rule, "squared", [[0, 1], [7, 2], [3, 4], [0, 5], [7, 1]], twins=(0, 7))
    apart = directions(ops, example_0=1.0, example_7=-1.0)
    assert (ops.factor @ apart).norm() > 1e-3 * ops.factor.norm()
    assert (ops.test_transfer @ apart).norm() > 1e-3 * ops.test_transfer.norm()
    hidden = dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer).reservoir.to_dense()
    undrawn = directions(ops, example_6=1.0)
    assert relative(hidden, undrawn @ undrawn.T) < 1e-8  # the reservoir is the example never drawn, and nothing else
