"""The rule of RULE.md applied to stored runs: every recipe read off the same trainings, judged by its regret.

Where this differs from the rule: the oracle is taken over AdamW's schedules as well as its rates, which is harder to
beat; the rates other than 1e-3 have one seed; leaving the choice among several means to the block is not judged.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

StoredRun = dict[str, Any]
CLEAN = "clean_label"
_MOST_LOST = 0.5
"""Points that a recipe may lose on a clean task."""


@dataclass(frozen=True)
class Recipe:
    """Final weights of a training: which mean, and at which moment.

    Attributes:
        column: Index of the mean among the stored tails; 0 for the weights themselves.
        chosen_by: ``None`` for the last step, or the stored curve whose best moment is taken: ``held_accuracy``,
            ``held_loss``, ``half_held_accuracy`` or ``half_held_loss``.
    """

    column: int
    chosen_by: str | None = None

    def accuracy(self, run: StoredRun) -> float:
        """Test accuracy of the final weights, in %.

        >>> run = {"test_accuracy": [[0.5, 0.6], [0.4, 0.7]], "held_accuracy": [[0.5, 0.9], [0.4, 0.8]]}
        >>> Recipe(1).accuracy(run), Recipe(1, "held_accuracy").accuracy(run)
        (70.0, 60.0)
        """
        moment = -1
        if self.chosen_by is not None:
            curve = [row[self.column] for row in run[self.chosen_by]]
            best: Callable[[Sequence[float]], float] = min if self.chosen_by.endswith("loss") else max
            moment = curve.index(best(curve))
        return 100 * run["test_accuracy"][moment][self.column]


@dataclass(frozen=True)
class Judged:
    """One recipe on all tasks.

    Attributes:
        recipe: What was judged.
        accuracies: Mean test accuracy on each task, in %.
        regret: Mean over the noisy tasks of AdamW's best checkpoint minus this recipe, in points.
        most_lost: Largest loss on a clean task to the better of AdamW and AdamW with cosine, in points.
    """

    recipe: Recipe
    accuracies: dict[str, float]
    regret: float
    most_lost: float

    @property
    def qualifies(self) -> bool:
        """Whether it loses little enough on every clean task."""
        return self.most_lost <= _MOST_LOST


def stored_runs(path: str | Path) -> tuple[list[float | None], list[StoredRun]]:
    """The tails and the runs of a stored result."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    return found["tails"], found["runs"]


def recipes(columns: int) -> list[Recipe]:
    """Every mean at the last step and at the moment that each held-back curve chooses."""
    curves = (None, "held_accuracy", "held_loss", "half_held_accuracy", "half_held_loss")
    return [Recipe(column, curve) for curve in curves for column in range(columns)]


def judge(recipe: Recipe, runs: Sequence[StoredRun]) -> Judged:
    """Regret and loss of a recipe over the tasks of the runs; AdamW's constant rate 1e-3 is what the recipe changes."""
    accuracies, regrets, lost = {}, [], []
    for net, labels in sorted({(run["net"], run["labels"]) for run in runs}):
        own = [run for run in runs if (run["net"], run["labels"]) == (net, labels)]
        usual = [run for run in own if run["schedule"] == "constant" and run["lr"] == 1e-3]
        found = mean(recipe.accuracy(run) for run in usual)
        accuracies[f"{net} {labels}"] = found
        if labels == CLEAN:
            cosine = [Recipe(0).accuracy(run) for run in own if run["schedule"] == "cosine"]
            plain = mean(Recipe(0).accuracy(run) for run in usual)
            lost.append((max(plain, mean(cosine)) if cosine else plain) - found)
        else:
            regrets.append(oracle(own) - found)
    return Judged(recipe, accuracies, mean(regrets), max(lost, default=0.0))


def oracle(runs: Sequence[StoredRun]) -> float:
    """AdamW's best checkpoint picked with the test set in hand, at the best of its rates and schedules, in %."""
    settings = {(run["schedule"], run["lr"]) for run in runs}
    best = []
    for schedule, lr in settings:
        own = [run for run in runs if (run["schedule"], run["lr"]) == (schedule, lr)]
        best.append(mean(100 * max(row[0] for row in run["test_accuracy"]) for run in own))
    return max(best)


def ranked(tails: Sequence[float | None], runs: Sequence[StoredRun]) -> list[Judged]:
    """All recipes that qualify, least regret first, then those that do not."""
    judged = [judge(recipe, runs) for recipe in recipes(len(tails))]
    return sorted(judged, key=lambda each: (not each.qualifies, each.regret))
