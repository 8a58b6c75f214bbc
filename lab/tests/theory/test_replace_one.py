"""Replacing an example: real trainings, the transfer operators of both runs, the integral form of the gap."""

from functools import partial

import pytest
import torch
from held_out import EXACT, N, assert_held_out, data, expected, make_mlp, record
from recorded import Case
from torch.testing import assert_close

from poprisk.errors import DataError
from poprisk.operators._window import Window
from poprisk.risk._audit.exact import example_scores
from poprisk.runs._problem import Problem
from poprisk.runs._training import train
from poprisk_lab.theory.replace_one import gap_integrals, replace_one, replace_one_displacement

TEST = torch.randn(2, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
DECAYED = partial(torch.optim.SGD, lr=0.2, momentum=0.9, weight_decay=0.05)


def pair(optimizer=None, example=1):
    case = Case("mlp", "momentum")
    inputs, targets = case.inputs.clone(), case.targets.clone()
    inputs[example], targets[example] = torch.randn(4, dtype=torch.float64), 0
    runs = []
    for problem in (case.problem, Problem(case.make, "cross_entropy", inputs, targets)):
        rule = optimizer or case.optimizer
        runs.append(train(problem, rule, 4, batch_size=3, dtype=torch.float64, progress=False))
    return [Window.of_run(run, test_inputs=TEST) for run in runs]


@pytest.mark.parametrize("optimizer", [None, DECAYED])
def test_the_parts_sum_to_what_happened_and_the_bound_holds(optimizer):
    window, other = pair(optimizer)
    found = replace_one_displacement(window, other, 1)
    assert float(found.displacement.norm()) > 1e-3
    assert_close(found.content + found.channel + found.source, found.displacement, rtol=1e-8, atol=1e-10)
    split = found.learned_content + found.observed_channel + found.source
    assert_close(split, found.displacement, rtol=1e-6, atol=1e-8)
    assert float(found.displacement.norm()) <= found.bound
    ends = [each.model.outputs(each._trajectory.weights(4), TEST).reshape(-1) for each in (window, other)]
    assert_close(found.displacement, ends[1] - ends[0], rtol=1e-9, atol=1e-12)
    assert found.example_score == pytest.approx(float(example_scores(window)[1]), rel=1e-10)
    assert (float(found.source.norm()) == 0) == (optimizer is None)


def test_the_train_transfer_is_every_examples_own_test_transfer():
    """(A_a D h)_i = ⟨a_i, G_{Q_i} h⟩ (Prop. self_influence_decomp)."""
    run = Case("mlp", "momentum").run
    a, h = torch.randn(6, 3, dtype=torch.float64), torch.randn(18, dtype=torch.float64)
    D = Window.of_run(run).train_transfer
    contracted = (a * (D @ h).view(6, 3)).sum(1)
    for i in (0, 4):
        G = Window.of_run(run, test_inputs=run.problem.inputs[i : i + 1]).test_transfer
        assert_close(contracted[i], a[i] @ (G @ h), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_the_integral_is_the_difference_of_losses(loss):
    case = Case("mlp", loss=loss)
    model, w = case.problem.model(torch.float64), case.run.weights(7)
    u, moved = model.outputs(w, case.inputs), torch.randn(6, 3, dtype=torch.float64)
    expected = torch.stack(
        [model.loss(u[i] + moved[i], case.targets[i]) - model.loss(u[i], case.targets[i]) for i in range(6)]
    )
    assert_close(gap_integrals(loss, u, case.targets, moved), expected, rtol=1e-9, atol=1e-11)
    with pytest.raises(DataError, match="one row per example"):
        gap_integrals(loss, u, case.targets, moved[:3])


def test_runs_that_differ_in_more_are_refused():
    window, other = pair()
    with pytest.raises(DataError, match="more than example 2"):
        replace_one_displacement(window, other, 2)
    with pytest.raises(DataError, match="examples are 0"):
        replace_one_displacement(window, other, 6)
    shorter = Window.of_run(Case("mlp", "momentum").run, test_inputs=TEST, stop=3)
    with pytest.raises(DataError, match="same examples, test set and steps"):
        replace_one_displacement(window, shorter, 1)


@pytest.fixture(scope="module")
def run():
    return record()


def test_replace_one(run):
    problem = run.problem
    pairs = [(i, i % 5) for i in range(N)]
    inputs, targets = [problem.inputs.clone() for _ in pairs], [problem.targets.clone() for _ in pairs]
    for k, (i, j) in enumerate(pairs):
        inputs[k][i], targets[k][i] = problem.test[0][j], problem.test[1][j]
    weights, outputs = expected(run, [(i,) for i, _ in pairs], torch.ones(N, N), inputs=inputs, targets=targets)
    found = replace_one(run, pairs)
    torch.testing.assert_close(found.weights, weights, **EXACT)
    assert_held_out(found, run, outputs)
    assert found.target == "a model trained on 12 examples"
    given = replace_one(run, pairs[:2], pool=(problem.test[0][:3], problem.test[1][:3]))
    torch.testing.assert_close(given.outputs, outputs[:2], **EXACT)


def test_bad_pairs_are_refused(run):
    small = train(Problem(make_mlp, "cross_entropy", *data(2)), DECAYED, 1, progress=False)
    for pairs in ([], [(0, 5)], [(N, 0)], [(-1, 0)]):
        with pytest.raises(DataError, match=r"below \(12, 5\)"):
            replace_one(run, pairs)
    with pytest.raises(DataError, match="needs other examples"):
        replace_one(small, [(0, 0)])


@pytest.mark.gpu
def test_replacing_on_a_device(run):
    pairs = [(i, i % 5) for i in range(N)]
    found, here = replace_one(record("cuda"), pairs), replace_one(run, pairs)
    assert found.outputs.is_cuda
    assert_close(found.losses.cpu(), here.losses, rtol=1e-7, atol=1e-9)
    assert found.risk.standard_error == pytest.approx(here.risk.standard_error, rel=1e-6)
