"""Replacing an example, seen by the transfer operators of both runs; scores; the integral form of the gap."""

from functools import partial

import pytest
import torch
from recorded import Case
from torch.testing import assert_close

from poprisk.errors import DataError
from poprisk.operators._window import Window
from poprisk.risk._influence.displacement import example_scores, gap_integrals, replace_one_displacement
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

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
    assert found.example_score == pytest.approx(float(example_scores(window)[1]), rel=1e-10)
    assert (float(found.source.norm()) == 0) == (optimizer is None)


def test_scores_are_norms_of_the_examples_columns():
    window = pair()[0]
    G = window.dense_operators().test_transfer.view(6, 6, 3)
    assert_close(example_scores(window), torch.stack([torch.linalg.matrix_norm(G[:, i], 2) for i in range(6)]))
    with pytest.raises(DataError, match="test_inputs"):
        example_scores(Window.of_run(Case("mlp", "momentum").run))


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
