"""Does the choice of coordinates help? The gate beside controls that open as much without choosing, as stored."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result
from poprisk_lab.engine import reading
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.reading import StoredStudy
from poprisk_lab.pages.comparison import Gain, gain
from poprisk_lab.pages.gate_choice import library_gate
from poprisk_lab.pages.wording import table
from poprisk_lab.paper.default_choice.task import family
from poprisk_lab.recipes import cifar_numbers
from poprisk_lab.recipes.judging import CONTROLS, controls
from poprisk_lab.recipes.stored_tasks import stored_tasks

COMPARED = ("labels", "teacher", "lorenz", "inr")
"""Stored comparisons that search the gate and its controls with the same number of trials."""
SEARCHED = ("gate_schedule", "random_mask", "matched_norm", "adamw_cosine", "adamw")
"""Controls that copy the openings of the gate, then rules that know nothing of a gate."""
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
            found.append(_cells(ARMS[name].label, [_tuned_gain(study, gate, name).verdict for study in shared]))
    return {"gate": ARMS[gate].label, "rows": found}


def given_controls(results: Path) -> list[list[str]]:
    """The same in the study of recipes: the gate at its literal settings, and controls that copy its openings."""
    augmented = "CIFAR-10N "  # has a table of its own
    tasks = [task for task in stored_tasks(results) if not (task.clean or task.name.startswith(augmented))]
    gains = [found for _, found in controls(tasks)]
    words = {"above": "better", "below": "worse"}
    return [
        _cells(label, [words.get(found[label].verdict, "unclear") for found in gains if label in found])
        for label in CONTROLS
        if any(label in found for found in gains)
    ]


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


def _cells(words: str, verdicts: Sequence[str]) -> list[str]:
    """A row of a table: the control, the number of tasks, and the verdicts by the interval of the paired difference."""
    return [words, str(len(verdicts)), *(str(verdicts.count(word)) for word in ("better", "worse", "unclear"))]


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
