"""Rows of the CIFAR-10N page, from made-up trainings whose answer is known and from the stored ones."""

from pathlib import Path

from poprisk_lab.recipes.cifar_numbers import control_rows, recipe_rows, stored

RESULTS = Path(__file__).resolve().parents[2] / "results"


def made_up(**changes):
    run = {"net": "small", "epochs": 2, "labels": "worse_label", "lr": 1e-3, "wd": 1e-2, "schedule": "constant"}
    curves = {"test_accuracy": [[0.5, 0.8], [0.4, 0.6]], "held_accuracy": [[0.4, 0.7], [0.3, 0.5]]}
    return {**run, **curves, "optimizer": "adamw", "tails": [0.2], **changes}


def test_every_column_is_what_it_says():
    (row,) = recipe_rows([made_up(), made_up(schedule="cosine", test_accuracy=[[0.7, 0.7], [0.6, 0.6]])])
    names = ("adamw_last", "adamw_best", "cosine_last", "cosine_best", "mean_last", "mean_chosen")
    assert [row[name].values[0] for name in names] == [40, 50, 60, 70, 60, 80]


def test_other_rates_and_optimizers_are_left_out():
    assert recipe_rows([made_up(lr=3e-3), made_up(wd=0.1), made_up(optimizer="gate")]) == []


def test_controls_have_a_row_each():
    runs = [made_up(optimizer=opening, tails=[0.1]) for opening in ("gate", "shuffled")]
    rows = control_rows(runs)
    assert [row["last"].values for row in rows] == [(40.0,), (40.0,)]
    assert [row["mean_last"].values for row in rows] == [(60.0,), (60.0,)]


def test_the_stored_trainings_have_rows():
    runs = stored(RESULTS)
    assert len(recipe_rows(runs)) == 8
    assert len(control_rows(runs)) == 4
