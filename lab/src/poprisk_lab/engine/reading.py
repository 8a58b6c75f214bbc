"""Read a stored study: its rows, their curves, their last and best values, and when they reached a target.

A study is stored as JSON (written by ``engine/study.py``). A value that was not finite is stored as null and read as
NaN: a member whose curve ends in NaN diverged, and its last value is NaN, so that no mean hides it. Its best
value is the best before it diverged, which is what an oracle that stops at the best checkpoint would have kept.

>>> study = {
...     "task": {"metrics": [{"name": "loss", "higher_is_better": False, "target": 0.5, "spec": ".2f"}]},
...     "evaluation_steps": [10, 20, 30],
...     "rows": [{"label": "AdamW", "arm": "adamw", "chosen_for": ["last"], "failures": 1,
...               "curves": {"loss": [[0.9, 0.4, 0.6], [0.8, 0.7, None]]}}],
... }
>>> tuned = row(study, "adamw")
>>> final(tuned, "loss"), best(tuned, "loss", higher_is_better=False)
([0.6, nan], [0.4, 0.7])
>>> steps_to(study, tuned, "loss"), reached(study, tuned, "loss")
([20, None], '1 of 2')
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import DataError

StoredStudy = Mapping[str, Any]
StoredRow = Mapping[str, Any]
StoredMetric = Mapping[str, Any]


def rows(study: StoredStudy) -> list[StoredRow]:
    """Every row of the report, in stored order: the chosen trials of each arm and the fixed settings."""
    return list(study["rows"])


def row(study: StoredStudy, name: str, chosen_for: str = "last") -> StoredRow:
    """The row of the chosen trial of an arm, or of a setting.

    Args:
        study: A stored study.
        name: An arm (``adamw``), its label (``AdamW``), or the label of a setting. The name of an arm never selects a
            setting that uses the arm.
        chosen_for: Criterion by which the trial was chosen: ``last``, ``best`` or ``target``. Ignored for a setting.

    Raises:
        DataError: If there is no such row; the message lists the existing ones.
    """
    found = find_row(study, name, chosen_for)
    if found is None:
        there = ", ".join(f"{r['label']!r} ({'/'.join(r['chosen_for']) or 'given'})" for r in rows(study))
        raise DataError(f"no row {name!r} chosen for {chosen_for!r} in this study; it has {there or 'no rows'}")
    return found


def find_row(study: StoredStudy, name: str, chosen_for: str = "last") -> StoredRow | None:
    """Like :func:`row`, but ``None`` if there is no such row, as for an arm of which no trial reached the target."""
    for candidate in rows(study):
        searched = bool(candidate["chosen_for"])
        names = (candidate["arm"], candidate["label"]) if searched else (candidate["label"],)
        if name in names and (not searched or chosen_for in candidate["chosen_for"]):
            return candidate
    return None


def primary(study: StoredStudy) -> StoredMetric:
    """The metric by which settings were chosen, as stored: name, higher_is_better, target, spec."""
    return study["task"]["metrics"][0]


def metric_named(study: StoredStudy, metric: str) -> StoredMetric:
    """The stored description of a metric.

    Raises:
        DataError: If the study did not measure it.
    """
    for stored in study["task"]["metrics"]:
        if stored["name"] == metric:
            return stored
    names = ", ".join(stored["name"] for stored in study["task"]["metrics"])
    raise DataError(f"no metric {metric!r} in this study; it measured {names}")


def curve(row: StoredRow, metric: str) -> list[list[float]]:
    """The values at each evaluation, one list per seed; NaN where a member had diverged.

    Raises:
        DataError: If the row holds no such curve.
    """
    if metric not in row["curves"]:
        raise DataError(f"no curve {metric!r} in the row {row['label']!r}; it has {', '.join(row['curves'])}")
    return [[_number(value) for value in values] for values in row["curves"][metric]]


def final(row: StoredRow, metric: str) -> list[float]:
    """Each seed's value at the last step; NaN where the member diverged."""
    return [values[-1] for values in curve(row, metric)]


def best(row: StoredRow, metric: str, higher_is_better: bool) -> list[float]:
    """The best value of each seed over the evaluations (an oracle for early stopping); NaN if none was finite."""
    return [values[at] if at is not None else math.nan for values, at in _best_places(row, metric, higher_is_better)]


def oracle(study: StoredStudy, arm: str = "adamw", metric: str | None = None) -> list[float]:
    """Each seed's best checkpoint of the trial that was chosen for its best checkpoint.

    A user could obtain these only by choosing on the test set. If no trial was chosen for its best checkpoint, the
    trial chosen for its last step is used.

    Args:
        study: A stored study.
        arm: Name of a searched arm.
        metric: Name of the metric; by default the primary one.

    Raises:
        DataError: If the arm has no row.
    """
    stored = primary(study) if metric is None else metric_named(study, metric)
    chosen = find_row(study, arm, "best") or row(study, arm)
    return best(chosen, stored["name"], stored["higher_is_better"])


def best_step(study: StoredStudy, row: StoredRow, metric: str) -> list[int | None]:
    """The first step at which each seed had its best value; None if no value was finite."""
    higher = metric_named(study, metric)["higher_is_better"]
    steps = study["evaluation_steps"]
    return [None if at is None else steps[at] for _, at in _best_places(row, metric, higher)]


def steps_to(study: StoredStudy, row: StoredRow, metric: str) -> list[int | None]:
    """The first evaluated step at which each seed met the metric's target; None where it never did.

    Raises:
        DataError: If the metric has no target.
    """
    stored = metric_named(study, metric)
    target, higher = stored["target"], stored["higher_is_better"]
    if target is None:
        raise DataError(f"the metric {metric!r} has no target: choose a metric with a target")
    return [_first_met(study["evaluation_steps"], values, target, higher) for values in curve(row, metric)]


def reached(study: StoredStudy, row: StoredRow, metric: str) -> str:
    """The number of seeds that met the target of the metric, as "k of n"."""
    steps = steps_to(study, row, metric)
    return f"{sum(step is not None for step in steps)} of {len(steps)}"


def failed(row: StoredRow) -> int:
    """The number of members of the row that diverged."""
    return int(row["failures"])


def trial_finals(study: StoredStudy, arm: str) -> list[list[float]]:
    """The primary metric at the last step of every trial of an arm, one list over tuning seeds per trial.

    Raises:
        DataError: If the study did not search this arm.
    """
    if arm not in study["arms"]:
        raise DataError(f"no arm {arm!r} was searched in this study; it searched {', '.join(study['arms'])}")
    return [[_number(values[-1]) for values in trial["curve"]] for trial in study["arms"][arm]["trials"]]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _best_places(row: StoredRow, metric: str, higher_is_better: bool) -> list[tuple[list[float], int | None]]:
    """The values of each seed, with the index of the first best value."""
    sign = 1.0 if higher_is_better else -1.0
    places: list[tuple[list[float], int | None]] = []
    for values in curve(row, metric):
        finite = [i for i, value in enumerate(values) if math.isfinite(value)]
        places.append((values, max(finite, key=lambda i, v=values: sign * v[i]) if finite else None))
    return places


def _first_met(steps: Sequence[int], values: Sequence[float], target: float, higher_is_better: bool) -> int | None:
    for step, value in zip(steps, values, strict=True):
        if value >= target if higher_is_better else value <= target:  # NaN meets nothing
            return step
    return None
