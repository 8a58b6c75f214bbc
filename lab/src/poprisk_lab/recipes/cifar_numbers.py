"""Numbers of the CIFAR-10N trainings for the page: each recipe on each task, the controls of the gate."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from poprisk_lab.recipes.choice import StoredRun

FILES = ("recipe_cifar.json", "recipe_cifar_arms.json")
TITLES = {"clean_label": "clean", "aggre_label": "9% wrong", "random_label1": "17% wrong", "worse_label": "40% wrong"}
NETWORKS = {"small": "small ResNet, 17,500 images", "resnet18": "ResNet-18, 50,000 images"}
TAIL = 0.2
"""The mean that the rule chose in the first part."""


@dataclass(frozen=True)
class Accuracies:
    """Test accuracies of several seeds, in %."""

    values: tuple[float, ...]

    def __str__(self) -> str:
        """Mean and standard error; for two seeds, which have no useful error, both values.

        >>> str(Accuracies((70.0, 71.0))), str(Accuracies((70.0, 71.0, 72.0))), str(Accuracies(()))
        ('70.5 (70.0, 71.0)', '71.0 ± 0.6', '–')
        """
        if not self.values:
            return "–"
        if len(self.values) < 3:
            each = ", ".join(f"{x:.1f}" for x in self.values)
            return f"{mean(self.values):.1f} ({each})" if len(self.values) > 1 else f"{each} (one seed)"
        return f"{mean(self.values):.1f} ± {stdev(self.values) / sqrt(len(self.values)):.1f}"


def stored(folder: Path) -> list[StoredRun]:
    """All stored trainings, each with its own tails."""
    runs: list[StoredRun] = []
    for name in FILES:
        if (folder / name).exists():
            found = json.loads((folder / name).read_text(encoding="utf-8"))
            runs += [
                {"tails": [x for x in found.get("tails", ()) if x], "optimizer": "adamw", **r} for r in found["runs"]
            ]
    return runs


def last(run: StoredRun, column: int = 0) -> float:
    """Test accuracy at the last step, in %."""
    return 100 * run["test_accuracy"][-1][column]


def best(run: StoredRun) -> float:
    """Test accuracy of the best checkpoint of the weights themselves, picked with the test set, in %."""
    return 100 * max(row[0] for row in run["test_accuracy"])


def chosen(run: StoredRun, column: int) -> float:
    """Test accuracy at the moment that is best on the held-back block, in %."""
    curve = [row[column] for row in run["held_accuracy"]]
    return 100 * run["test_accuracy"][curve.index(max(curve))][column]


def recipe_rows(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """One row for each network, length and label set: AdamW at lr 1e-3, its mean, and AdamW with cosine."""
    usual = [run for run in runs if run["optimizer"] == "adamw" and run["lr"] == 1e-3 and run["wd"] == 1e-2]
    tasks = {(run["net"], run["epochs"], run["labels"]) for run in usual}
    places = {key: place for place, key in enumerate(TITLES)}
    rows = []
    for net, epochs, labels in sorted(tasks, key=lambda t: (t[0] != "small", t[1], places.get(t[2], -1))):
        own = [run for run in usual if (run["net"], run["epochs"], run["labels"]) == (net, epochs, labels)]
        plain = [run for run in own if run["schedule"] == "constant"]
        cosine = [run for run in own if run["schedule"] == "cosine"]
        if not plain:
            continue
        rows.append(
            {
                "task": f"{NETWORKS[net]}, {epochs} epochs, {TITLES[labels]}",
                "adamw_last": Accuracies(tuple(map(last, plain))),
                "adamw_best": Accuracies(tuple(map(best, plain))),
                "cosine_last": Accuracies(tuple(map(last, cosine))),
                "cosine_best": Accuracies(tuple(map(best, cosine))),
                "mean_last": Accuracies(tuple(last(run, _column(run)) for run in plain)),
                "mean_chosen": Accuracies(tuple(chosen(run, _column(run)) for run in plain)),
            }
        )
    return rows


def control_rows(runs: Sequence[StoredRun]) -> list[dict[str, Any]]:
    """The literal gate and its controls on 40% wrong labels: last step, best checkpoint, mean of the last tenth."""
    titles = {
        "gate": "literal SNR gate, strength 100, lr 0.06",
        "mean": "its mean opening",
        "shuffled": "its openings shuffled within each tensor",
        "random": "random mask of equal density",
    }
    rows = []
    for opening, title in titles.items():
        own = [run for run in runs if run["optimizer"] == opening and run["labels"] == "worse_label"]
        if own:
            tenth = [last(run, 1 + run["tails"].index(0.1)) for run in own]
            figures = {"last": tuple(map(last, own)), "best": tuple(map(best, own)), "mean_last": tuple(tenth)}
            rows.append({"title": title, **{name: Accuracies(values) for name, values in figures.items()}})
    return rows


def _column(run: StoredRun) -> int:
    return 1 + run["tails"].index(TAIL)
