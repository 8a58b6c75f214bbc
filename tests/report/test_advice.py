# type: ignore
"""The first screen: each rule of the judgement, the three numbers and the advice, and their place on the page."""

import html
import math
import re
from dataclasses import replace

import pytest
import torch

from poprisk.report import Analysis
from poprisk.report._analysis.curves import LossCurves
from poprisk.report._drawing.advice import Facts, actions, gap_words, judgement, numbers
from poprisk.report._drawing.first_screen import best_step, facts_of
from poprisk.report._drawing.page import report_page
from poprisk.report._drawing.svg_chart import Axis, Line, line_chart
from poprisk.risk import Estimate, Reading, RiskEstimate, audit
from poprisk.runs import Problem, Recorder, train

VALID = RiskEstimate(1.5, 0.1, target="this model", method="held_back", training_loss=0.5)
OVER = "would take about 300 s, over the budget of 15 s; use budget=300, or poprisk report RUN --budget 300"
FOLDS = "the losses differ. Use population_risk(run, retrain_budget=10), which allows 10-fold cross-validation."
DOUBTED = RiskEstimate(1.5, 0.1, False, FOLDS, target="this model", method="leverage", training_loss=0.5)
WRONG, NONE_WRONG = Estimate(300.0, 20.0), Estimate(4.0, 5.0)
UNKNOWN = Estimate(math.nan, math.nan, valid=False, reason="two labels are as frequent")
DONE = Facts(1000, 500, path="a run", first_loss=2.0, last_loss=0.5, risk=VALID, memorized=0.05, memorized_error=0.01)


def changed(**facts):
    return replace(DONE, **facts)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (DONE, "This run generalizes: 95% of the drop in training loss carries over to new data."),
        (changed(memorized_error=0.1), "This run generalizes: what it learned carries over"),
        (changed(memorized=0.85, memorized_error=0.94), "It is not clear how much this run memorized: 85 ± 94% of the"),
        (changed(memorized=0.7), "This run mostly memorized: 70% of the drop in training loss does not carry over"),
        (changed(memorized=1.3), "This run memorized: on new data the network does worse than before training."),
        (changed(memorized=None), "On new data, the loss of this network is expected to be 1.50 ± 0.10."),
        (changed(memorized=None, risk=DOUBTED), "How this network does on new data is not known yet."),
        (changed(memorized=None, risk=None), "How this network does on new data is not known yet."),
        (changed(best_step=90), "Training went on too long: on new data the network was best at step 90 of 500."),
        (changed(kept_step=49, held=50), "The network was best at step 49 of 500, on examples that were held back"),
        (changed(kept_step=480, held=50), "This run generalizes"),
        (changed(unfinished="the loss is still falling by 3% per pass"), "This run ended too early: the loss is still"),
        (changed(last_loss=2.5), "Training did not work: the training loss went from 2 to 2.5."),
        (changed(last_loss=math.nan), "Training did not work"),
        (changed(first_loss=None, last_loss=None), "Only the recorded losses can be shown"),
        (changed(wrong=WRONG, suspects=300), "About 300 of the 1000 labels are wrong."),
        (changed(wrong=UNKNOWN, suspects=40), "40 of the 1000 labels look wrong."),
    ],
)
def test_judgement(facts, words):
    assert words in judgement(facts)


def test_a_count_that_may_be_zero_is_not_held_against_the_labels():
    assert "labels" not in judgement(changed(wrong=NONE_WRONG, suspects=4))
    assert "labels" not in judgement(changed(wrong=UNKNOWN, suspects=4, kind="loss"))


@pytest.mark.parametrize(
    ("facts", "key", "title", "command"),
    [
        (DONE, "nothing", "Keep these weights", "poprisk compare 'a run' OTHER"),
        (changed(unfinished="the loss is falling"), "train_longer", "Train longer", ("longer", {"steps": 1000})),
        (changed(last_loss=3.0), "lower_lr", "Lower the learning rate", ("slower", {"lr": 0.1})),
        (changed(best_step=90), "stop", "Stop at step 90", ("shorter", {"steps": 90})),
        (
            changed(kept_step=49, held=300),
            "stop",
            "Use the weights of step 49",
            "model.load_state_dict(poprisk.Run.load('a run').kept.weights)",
        ),
        (
            changed(wrong=WRONG, suspects=300),
            "review",
            "Review 300 labels",
            ("corrected", {}),
        ),
        (
            changed(wrong=WRONG, suspects=300, test_loss=0.6, test_error=0.05),
            "noise_gap",
            "Do not try to close the gap to the test set",
            "poprisk audit 'a run' --output audit.csv",
        ),
        (changed(risk=None, why_no_risk=OVER), "budget", "Allow more time", "poprisk report 'a run' --budget 300"),
        (changed(risk=DOUBTED), "retrain", "Train 10 folds", "poprisk report 'a run' --retrain 10"),
        (changed(risk=DOUBTED), "hold_back", "Hold examples back", ("held", {"hold_back": 0.1})),
        (
            changed(kept_step=480, held=50, risk=replace(VALID, standard_error=0.3)),
            "hold_back",
            "Hold more examples back",
            ("held", {"hold_back": 0.2}),
        ),
        (
            changed(kept_step=480, held=50, risk=replace(VALID, standard_error=0.3, method="held_back")),
            "retrain",
            "Train 10 folds",
            "poprisk report 'a run' --retrain 10",
        ),
    ],
)
def test_actions(facts, key, title, command):
    found = {action.key: action for action in actions(facts)}
    assert found[key].title == title
    assert (found[key].command or found[key].call) == command


def test_no_advice_without_its_verdict():
    keys = lambda **facts: {action.key for action in actions(changed(**facts))}  # noqa: E731
    folds = replace(VALID, standard_error=0.3, method="k_fold")
    assert keys(kept_step=480, held=50, risk=folds) == {"hold_back"}  # folds have been trained
    assert keys(kept_step=480, held=50) == {"nothing"}  # the chosen moment is near the end, and the error is small
    assert keys(kept_step=480, held=200, risk=replace(VALID, standard_error=0.3)) == {"nothing"}  # enough are held back
    assert keys(suspects=9, kind="loss") == {"nothing"}  # nothing is suggested for these
    assert keys(suspects=9, kind="regression", reviewable=False) == {"nothing"}  # several numbers are not reviewed
    assert keys(test_loss=1.45, test_error=0.05, wrong=WRONG) == {"nothing"}  # no gap
    assert keys(last_loss=3.0, suspects=9, risk=DOUBTED) == {"lower_lr"}  # first things first


def test_targets_of_several_numbers_are_not_to_be_reviewed():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    y = torch.cat([x, x], dim=1)
    y[0] += 30.0
    problem = Problem(torch.nn.Linear, "squared", x, y, arguments={"in_features": 3, "out_features": 6})
    run = train(problem, lambda p: torch.optim.SGD(p, lr=0.01), 9, progress=False)
    found = facts_of(Analysis(run, 1.0, table=audit(run, tier="any", progress=False)))
    assert found.suspects > 0
    assert not found.reviewable
    assert "review" not in {action.key for action in actions(found)}


def test_numbers_say_what_they_mean_or_why_they_are_not_known():
    risk, memorized, wrong = numbers(changed(wrong=WRONG, memorized=1.2, memorized_error=0.2))
    assert (risk.value, memorized.value, wrong.value) == ("1.50 ± 0.10", "120 ± 20%", "300 ± 20 of 1000")
    assert "over 100% means: worse on new data than before training" in memorized.meaning
    assert "same label noise" in risk.meaning
    lost = changed(risk=DOUBTED, memorized=None, why_not_memorized="no test set", wrong=UNKNOWN, suspects=7)
    risk, memorized, wrong = numbers(lost)
    assert (risk.value, memorized.value, wrong.value) == ("not known", "not known", "7 of 1000")
    assert "Use --retrain 10" in risk.meaning
    assert memorized.meaning == "no test set"
    assert "two labels are as frequent" in wrong.meaning
    assert numbers(changed(wrong=None))[2].value == "not known"


def test_a_run_whose_program_alone_has_the_examples_is_told_what_to_do_once():
    lost = Facts(100, 50, path="a run", no_problem=True, why_no_risk="a long reason", why_not_memorized="a long reason")
    assert [action.key for action in actions(lost)] == ["analyze", "problem"]
    assert actions(lost)[1].command == "poprisk report 'a run' --problem script.py:function"
    assert {number.meaning for number in numbers(lost)} == {"this needs the examples and the model; see below"}


def test_noisy_risk_and_clean_test_loss_are_told_apart():
    gap = changed(test_loss=0.6, test_error=0.05, wrong=WRONG)
    assert "0.6, and the population risk, 1.50 ± 0.10, differ by label noise" in gap_words(gap)
    assert "the test set is easier" in gap_words(replace(gap, wrong=NONE_WRONG))
    assert "measure the same weights" in gap_words(replace(gap, test_loss=1.45))
    harder = replace(gap, test_loss=2.6)
    assert "contradict each other: either the test set is drawn from other data" in gap_words(harder)
    assert judgement(harder).startswith("On the test set, this network is clearly worse than the estimate")
    assert [number.value for number in numbers(harder)[:2]] == ["1.50 ± 0.10", "not known"]
    assert gap_words(replace(gap, test_loss=None)) == gap_words(replace(gap, risk=DOUBTED)) == ""


def test_the_best_step_counts_only_if_the_risk_clearly_rose_afterwards():
    at = lambda step, value, valid=True: Reading(step, replace(VALID, value=value, valid=valid, reason="x"))  # noqa: E731
    assert best_step([at(10, 1.0), at(50, 1.5)]) == 10
    assert best_step([at(10, 1.4), at(50, 1.5)]) is None
    assert best_step([at(10, 1.0, valid=False), at(50, 1.5)]) is None
    assert best_step([]) is None


def line_problem():
    x = torch.linspace(-1, 1, 24).reshape(24, 1)
    return Problem(torch.nn.Linear, "squared", x, 2 * x, arguments={"in_features": 1, "out_features": 1})


def test_an_unfinished_run_is_told_so_first_on_its_page():
    run = train(Problem.build(line_problem), lambda p: torch.optim.SGD(p, lr=0.02), 40, progress=False)
    found = Analysis(run, 1.0, curves=LossCurves([0, 40], [0.9, 0.4], None, None, None))
    assert facts_of(found).unfinished == "the loss is still falling by 1.7% per pass"
    page = html.unescape(report_page(found))
    assert "This run ended too early: the loss is still falling by 1.7% per pass." in page
    command = "test_advice:line_problem --optimizer sgd --lr 0.02 --steps 80 --batch-size 24 --hold-back 0"
    assert re.search(rf'data-rule="train_longer".*?poprisk train {command} --output longer<', page)


def test_a_loop_of_ones_own_is_told_in_words_what_to_change():
    problem = line_problem()
    module = problem.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    with Recorder(None, module, optimizer, problem=problem) as recorder:
        for _ in range(40):
            with recorder.step(torch.arange(24)) as step:
                optimizer.zero_grad()
                step.loss = 0.5 * (module(problem.inputs) - problem.targets).square().mean()
                step.loss.backward()
                optimizer.step()
    page = report_page(Analysis(recorder.run, 1.0, curves=LossCurves([0, 40], [0.9, 0.4], None, None, None)))
    assert "# in your training loop: train for 80 steps instead of 40" in page


def test_charts_have_no_lines_through_missing_stretches_and_no_flat_lines():
    draw = lambda y, **axis: line_chart([Line("a", [0, 1, 2, 3, 4], y)], Axis("step"), Axis("loss", **axis), "A")  # noqa: E731
    broken = draw([1.0, 2.0, math.nan, 3.0, 1.0])
    assert broken.count('class="curve c0" d="M') == 2
    assert broken.count('class="key"') == 1
    assert 'class="curve c0" d="M' not in draw([2.0, 2.0, 2.0, 2.0, 2.0])
    assert "A: always 2 (loss)" in draw([2.0, 2.0, 2.0, 2.0, 2.0])
    flat = [100.0, 1.0, 0.5, 0.1, 0.01]
    assert ">0.01<" in draw(flat, log=None)  # a decade of a logarithmic axis
    assert ">0.01<" not in draw(flat, log=False)
    assert ">0.01<" not in draw([0.03, 0.02, 0.03, 0.02, 0.03], log=None).replace(">0.02<", "")
