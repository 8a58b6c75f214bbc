"""Controls of the gate on its page: counted from stored results, silent where there are none."""

import json

from poprisk_lab.gates.controls import cifar_controls, control_slots, given_controls, tuned_controls
from poprisk_lab.pages.registry import RESULTS
from poprisk_lab.recipes.study import save


def _row(arm, values, share=0.05):
    curves = {"accuracy": [[[0.0, value], [0.0, 9.0]] for value in values]}
    seeds = list(range(len(values)))
    return {
        "arm": arm,
        "hyper": {"lr": 0.06},
        "share": share,
        "seeds": seeds,
        "averages": ["weights", "tail 0.1"],
        "curves": curves,
    }


def _task(rows, clean=False, higher=True):
    adamw = _row("adamw", [0.6, 0.6, 0.6], 0.0)
    return {"metric": "accuracy", "higher_is_better": higher, "clean": clean, "rows": [*rows, adamw]}


def test_without_stored_results_everything_is_empty(tmp_path):
    found = control_slots(tmp_path)
    assert found["tuned_controls"]["rows"] == []
    assert found["given_controls"] == []
    assert found["cifar_controls"] == ""


def test_controls_of_the_study_of_recipes_are_compared_pair_by_pair(tmp_path):
    gate, low, high = [0.70, 0.71, 0.72], [0.50, 0.51, 0.53], [0.90, 0.91, 0.93]
    tasks = {
        "better": _task([_row("literal", gate), _row("gate_schedule", low), _row("shuffled_gate", high)]),
        "other way": _task([_row("literal", gate), _row("gate_schedule", low)], higher=False),
        "clean": _task([_row("literal", gate), _row("gate_schedule", low)], clean=True),
        "other share": _task([_row("literal", gate, 0.0), _row("gate_schedule", low)]),
        "alone": _task([_row("literal", gate)]),
    }
    save(tmp_path / "recipes.json", tasks)
    assert given_controls(tmp_path) == [
        ["mean opening", "2", "1", "1", "0"],
        ["shuffled", "1", "0", "1", "0"],
    ]


def test_the_stored_controls_are_counted():
    rows = tuned_controls(RESULTS)["rows"]
    assert len(rows) == 5
    for _, tasks, *counts in rows:
        assert sum(map(int, counts)) == int(tasks)


def test_the_table_of_cifar_names_the_gate_its_controls_and_adamw(tmp_path):
    run = {"tails": [0.1], "lr": 0.06, "wd": 5e-3, "schedule": "constant", "labels": "worse_label"}
    run |= {"net": "small", "epochs": 2, "test_accuracy": [[0.6, 0.6], [0.5, 0.7]]}
    usual = run | {"optimizer": "adamw", "lr": 1e-3, "wd": 1e-2}
    runs = [run | {"optimizer": name} for name in ("gate", "mean")] + [usual, usual | {"epochs": 9}]
    (tmp_path / "recipe_cifar_arms.json").write_text(json.dumps({"runs": runs}))
    lines = cifar_controls(tmp_path).splitlines()
    assert len(lines) == 2 + 3
    assert lines[-1] == "| AdamW, lr 1e-3 | 50.0 (one seed) | 60.0 (one seed) |"
