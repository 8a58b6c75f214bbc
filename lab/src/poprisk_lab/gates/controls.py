"""Does the choice of coordinates help? The gate beside controls that open as much without choosing, as stored."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result
from poprisk_lab.engine import reading
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.reading import StoredStudy
from poprisk_lab.engine.weight_means import WEIGHTS
from poprisk_lab.pages.comparison import Gain, gain
from poprisk_lab.pages.gate_choice import library_gate
from poprisk_lab.pages.wording import table
from poprisk_lab.paper.default_choice.task import family
from poprisk_lab.recipes import cifar_numbers
from poprisk_lab.recipes.study import load

COMPARED = ("labels", "teacher", "lorenz", "inr")
"""Stored comparisons that search the gate and its controls with the same number of trials."""
SEARCHED = ("gate_schedule", "random_mask", "matched_norm", "adamw_cosine", "adamw")
"""Controls that copy the openings of the gate, then rules that know nothing of a gate."""
GIVEN = {"gate_schedule": "mean opening", "shuffled_gate": "openings shuffled", "random_mask": "random mask"}
"""Controls of the study of recipes, which take the learning rate of the gate."""
GATE = "literal"
NO_CONTROLS: dict[str, Any] = {"tuned_controls": {"rows": []}, "given_controls": [], "cifar_controls": ""}


def control_slots(results: Path) -> dict[str, Any]:
    """The slots of the section on controls; what is not stored is empty."""
    return {
        "tuned_controls": tuned_controls(results),
        "given_controls": given_controls(results),
        "cifar_controls": cifar_controls(results),
    }


def tuned_controls(results: Path) -> dict[str, Any]:
    """On how many noisy tasks the tuned gate ends above, below, or undecided against each tuned control."""
    gate, found = library_gate(), []
    studies = [study for study in _studies(results) if gate in study["arms"]]
    for name in SEARCHED:
        shared = [study for study in studies if name in study["arms"]]
        if shared:
            gains = [_tuned_gain(study, gate, name) for study in shared]
            found.append(_cells(ARMS[name].label, gains))
    return {"gate": ARMS[gate].label, "rows": found}


def given_controls(results: Path) -> list[list[str]]:
    """The same in the study of recipes: the gate at its literal settings, and controls that copy its openings."""
    path = next((results / name for name in ("recipes.json", "recipes.json.gz") if (results / name).exists()), None)
    if path is None:
        return []
    tasks = [task for task in load(path)["tasks"].values() if not task["clean"]]
    found = []
    for name, words in GIVEN.items():
        gains = [each for task in tasks if (each := _given_gain(task, name)) is not None]
        if gains:
            found.append(_cells(words, gains))
    return found


def _studies(results: Path) -> Iterator[StoredStudy]:
    for name in COMPARED:
        path = results / f"{name}.json"
        if path.exists():
            studies: Mapping[str, StoredStudy] = load_result(path, name)["result"]["studies"]
            yield from (study for study in studies.values() if not family(study["task"])[-1])


def _tuned_gain(study: StoredStudy, gate: str, control: str) -> Gain:
    metric = reading.primary(study)
    ours, theirs = (reading.final(reading.row(study, name), metric["name"]) for name in (gate, control))
    return gain(ours, theirs, metric["higher_is_better"])


def _cells(words: str, gains: Sequence[Gain]) -> list[str]:
    """A row of a table: the control, the number of tasks, and the verdicts by the interval of the paired difference."""
    counts = (sum(each.verdict == verdict for each in gains) for verdict in ("better", "worse", "unclear"))
    return [words, str(len(gains)), *map(str, counts)]


def _given_gain(task: Mapping[str, Any], control: str) -> Gain | None:
    """The last step of the gate against that of a control with the same seeds and the same held-back share."""
    for row in (row for row in task["rows"] if row["arm"] == control):
        for gate in (other for other in task["rows"] if other["arm"] == GATE):
            if gate["share"] == row["share"] and gate["seeds"] == row["seeds"]:
                return gain(_last(task, gate), _last(task, row), task["higher_is_better"])
    return None


def _last(task: Mapping[str, Any], row: Mapping[str, Any]) -> list[float]:
    """The last step of the weights themselves, one value for each seed."""
    curves, place = row["curves"][task["metric"]], row["averages"].index(WEIGHTS)
    return [math.nan if seed[place][-1] is None else seed[place][-1] for seed in curves]


def cifar_controls(results: Path) -> str:
    """A table of the gate, its controls and AdamW on CIFAR-10N with 40% wrong labels; empty if no control is stored."""
    runs = cifar_numbers.stored(results)
    rows = [[row["title"], str(row["last"]), str(row["best"])] for row in cifar_numbers.control_rows(runs)]
    if not rows:
        return ""
    tasks = {(run["net"], run["epochs"]) for run in runs if run["optimizer"] == "gate"}
    usual = {"optimizer": "adamw", "lr": 1e-3, "wd": 1e-2, "schedule": "constant", "labels": "worse_label"}
    adamw = [
        run
        for run in runs
        if (run["net"], run["epochs"]) in tasks and all(run[name] == value for name, value in usual.items())
    ]
    plain = [cifar_numbers.Accuracies(tuple(map(of, adamw))) for of in (cifar_numbers.last, cifar_numbers.best)]
    head = ["40% wrong labels, test accuracy in %", "last step", "best checkpoint"]
    return table(head, [*rows, *([["AdamW, lr 1e-3", *map(str, plain)]] if adamw else [])])
