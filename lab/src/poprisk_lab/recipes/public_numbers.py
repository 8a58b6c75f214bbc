"""What the page on recipes says of trainings by the library's public functions, from ``recipe_public.json``."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from poprisk._core.statistics import paired_difference
from poprisk_lab.pages.wording import table
from poprisk_lab.recipes.judging import TaskGain, gain_over
from poprisk_lab.recipes.public import KEPT, LAST, REFIT
from poprisk_lab.recipes.stored_tasks import StoredTask, read
from poprisk_lab.recipes.wording import gain_words, task_words, value_words

SWAP_BAR = 5.0
Rows = Mapping[str, Mapping[str, Any]]


def public_slots(results: Path, tasks: Sequence[StoredTask]) -> dict[str, Any] | None:
    """Tables and counts; None where nothing is stored."""
    path = results / "recipe_public.json"
    if not path.exists():
        return None
    stored = read(path)["tasks"]
    found = [(task, stored[task.name]["rows"]) for task in tasks if task.name in stored]
    judged = [(task, rows, _kept(rows)) for task, rows in found if _kept(rows)[KEPT]]
    return {
        "table": table(_HEAD, [_row(task, values) for task, _, values in judged]),
        "noisy": _counts(judged, clean=False),
        "clean": _counts(judged, clean=True),
        "refit": {name: _refit_gain(judged, clean) for name, clean in (("noisy", False), ("clean", True))},
        "swap": swap_slots(found),
    }


_HEAD = ["task", "seeds", "AdamW, lr 1e-3, last", "KeepBest", "with refit", "tuned AdamW, best on test"]
_HEAD += ["KeepBest − best on test", "refit − best on test", "KeepBest − AdamW's last"]


def _kept(rows: Rows) -> dict[str, dict[int, float]]:
    own = {int(name.split("/")[1]): row for name, row in rows.items() if name.startswith(f"{KEPT}/")}
    return {what: {seed: float(row[what]) for seed, row in own.items()} for what in (LAST, KEPT, REFIT)}


def _row(task: StoredTask, values: Mapping[str, Mapping[int, float]]) -> list[str]:
    means = [value_words(task, mean(values[what].values())) for what in (LAST, KEPT, REFIT)]
    over = [gain_words(gain_over(task, values[what], task.tuned_best)) for what in (KEPT, REFIT)]
    return [
        task_words(task),
        str(len(values[KEPT])),
        means[0],
        f"**{means[1]}**",
        means[2],
        value_words(task, mean(task.tuned_best.values())),
        *over,
        gain_words(gain_over(task, values[KEPT], values[LAST])),
    ]


def _counts(judged: Sequence[tuple[StoredTask, Rows, Any]], clean: bool) -> dict[str, int]:
    own = [(task, values) for task, _, values in judged if task.clean == clean]
    gains = {what: [TaskGain(task, values[what]) for task, values in own] for what in (KEPT, REFIT)}
    return {
        "tasks": len(own),
        **{f"{what}_at_best": sum(each.at_oracle for each in every) for what, every in gains.items()},
        **{f"{what}_above_last": sum(each.above_last for each in every) for what, every in gains.items()},
        **{f"{what}_within": sum(each.within_bar for each in every) for what, every in gains.items()},
        "not_below_usual": sum(
            gain_over(task, values[KEPT], values[LAST]).value >= -task.limit for task, values in own
        ),
    }


def _refit_gain(judged: Sequence[tuple[StoredTask, Rows, Any]], clean: bool) -> str:
    """Mean gain of refitting over KeepBest, over tasks whose metric is an accuracy, with an interval over seeds."""
    gains = [
        task.gain(values[REFIT][seed], values[KEPT][seed])
        for task, _, values in judged
        if task.clean == clean and task.unit == "points"
        for seed in values[KEPT]
    ]
    return gain_words(paired_difference(gains, [0.0] * len(gains))) if gains else "–"


def swap_slots(found: Sequence[tuple[StoredTask, Rows]]) -> dict[str, Any] | None:
    """The lowest gain of each gate over AdamW at the same rate, for each task; None where nothing is stored."""
    rows, every = [], []
    for task, stored in found:
        values = _swapped(stored)
        gains = [
            (name, lr, gain_over(task, own, values[("adamw", lr)]))
            for (name, lr), own in values.items()
            if name != "adamw" and ("adamw", lr) in values
        ]
        if not gains:
            continue
        every += [(task, *each) for each in gains]
        cells = []
        for gate in dict.fromkeys(name for name, _, _ in gains):
            _, lr, gain = min((each for each in gains if each[0] == gate), key=lambda each: each[2].value)
            cells.append(f"{gain_words(gain)} at {lr}")
        rows.append([task_words(task), *cells])
    if not rows:
        return None
    bad = [each for each in every if each[3].value < -SWAP_BAR]
    gates = list(dict.fromkeys(name for _, name, _, _ in every))
    return {
        "table": table(["task", *(f"{gate} gate, lowest at lr" for gate in gates)], rows),
        "pairs": len(every),
        "bad": len(bad),
        "worst": [f"{task_words(task)}, {gate} gate, lr {lr} ({gain_words(gain)})" for task, gate, lr, gain in bad],
    }


def _swapped(rows: Rows) -> dict[tuple[str, str], dict[int, float]]:
    """Last test values by optimizer and rate, by seed."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for name, row in rows.items():
        kind, *rest = name.split("/")
        if kind == "swap":
            optimizer, lr, seed = rest
            found.setdefault((optimizer, lr), {})[int(seed)] = float(row[LAST])
    return found
