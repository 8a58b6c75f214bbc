"""The rule of recipes on made-up runs whose answer is known, and on the stored ones."""

from pathlib import Path

import pytest

from poprisk_lab.recipes.choice import Recipe, judge, oracle, ranked, stored_runs

STORED = Path(__file__).resolve().parents[2] / "results/recipe_cifar.json"


def made(labels, test, held, schedule="constant", lr=1e-3):
    """A run of three moments; columns are the weights and one mean."""
    curves = {"held_accuracy": held, "held_loss": held, "half_held_accuracy": held, "half_held_loss": held}
    return {"net": "toy", "labels": labels, "schedule": schedule, "lr": lr, "test_accuracy": test, **curves}


NOISY = made("noisy", [[0.5, 0.5], [0.7, 0.8], [0.6, 0.7]], [[0.4, 0.4], [0.6, 0.7], [0.5, 0.6]])
CLEAN = made("clean_label", [[0.5, 0.5], [0.8, 0.8], [0.9, 0.9]], [[0.5, 0.5], [0.9, 0.9], [0.8, 0.8]])


def test_regret_is_to_the_best_checkpoint_of_the_weights_themselves():
    assert oracle([NOISY]) == pytest.approx(70)
    assert judge(Recipe(1), [NOISY, CLEAN]).regret == pytest.approx(0)
    assert judge(Recipe(1, "held_accuracy"), [NOISY, CLEAN]).regret == pytest.approx(-10)


def test_a_loss_on_clean_data_disqualifies():
    chosen, last = judge(Recipe(1, "held_accuracy"), [NOISY, CLEAN]), judge(Recipe(1), [NOISY, CLEAN])
    assert chosen.most_lost == pytest.approx(10)
    assert not chosen.qualifies
    assert last.qualifies
    assert ranked([None, 0.1], [NOISY, CLEAN])[0].recipe == Recipe(1)


def test_a_better_schedule_raises_the_bar():
    cosine = made("clean_label", [[0.5, 0.5], [0.8, 0.8], [0.97, 0.97]], [[0.5] * 2] * 3, schedule="cosine")
    assert judge(Recipe(1), [NOISY, CLEAN, cosine]).most_lost == pytest.approx(7)


def test_stored_runs_are_those_of_the_rule():
    tails, runs = stored_runs(STORED)
    assert tails == [None, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    usual = [run for run in runs if run["net"] == "small" and run["schedule"] == "constant" and run["lr"] == 1e-3]
    assert {run["labels"] for run in usual} == {"clean_label", "aggre_label", "random_label1", "worse_label"}
    assert all(len({run["seed"] for run in usual if run["labels"] == labels}) == 3 for labels in ("worse_label",))
    best = ranked(tails, runs)[0]
    assert best.qualifies
    assert best.regret < 0
