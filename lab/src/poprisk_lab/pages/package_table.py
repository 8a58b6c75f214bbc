"""The setting of the authors' package beside AdamW and the paper's rule at the same learning rate, task by task."""

from collections.abc import Mapping, Sequence
from typing import Any

from poprisk_lab.engine import reading
from poprisk_lab.engine.package_setting import PACKAGE, PACKAGE_PER_TENSOR, package_rows
from poprisk_lab.engine.reading import StoredRow, StoredStudy
from poprisk_lab.pages.comparison import mean_words
from poprisk_lab.pages.wording import table

NOT_MEASURED = "not measured"
_SHARED = ("lr", "weight_decay", "beta2")
_RULE = {"alpha": 1.0, "strength": 1.0, "rho": 0.99}
"""The paper's rule, Algorithm 1."""


def package_slots(studies: Sequence[tuple[str, StoredStudy]]) -> dict[str, Any]:
    """A table with a row for each task and shared setting, and the tasks on which the setting was not measured."""
    head = ["task", "metric", "lr", "weight decay", "AdamW", "paper's rule", "package", "package, per tensor"]
    found = {name: _task_rows(name, study) for name, study in studies}
    rows = [cells for each in found.values() for cells in each]
    return {
        "table": table(head, rows, words=2) if rows else "",
        "missing": [name for name, each in found.items() if not each],
    }


def _task_rows(name: str, study: StoredStudy) -> list[list[str]]:
    metric = reading.primary(study)
    found = {key: package_rows(study, key) for key in (PACKAGE, PACKAGE_PER_TENSOR)}
    shared = {_shared(row): row["hyper"] for rows in found.values() for row in rows}
    cells = []
    for key, hyper in shared.items():
        rows = [_given(study, "adamw", key, {}), _given(study, "soft", key, _RULE)]
        rows += [next((row for row in found[words] if _shared(row) == key), None) for words in found]
        values = [_value(row, metric) for row in rows]
        cells.append([name, metric["name"], f"{hyper['lr']:g}", f"{hyper['weight_decay']:g}", *values])
    return cells


def _shared(row: StoredRow) -> tuple[float, ...]:
    return tuple(row["hyper"][name] for name in _SHARED)


def _given(study: StoredStudy, arm: str, shared: tuple[float, ...], rule: Mapping[str, float]) -> StoredRow | None:
    """The fixed row of an arm with the same shared hyper-parameters and the numbers of its rule."""
    for row in study["rows"]:
        same = not row["chosen_for"] and row["arm"] == arm and _shared(row) == shared
        if same and not row["hyper"].get("gate_warmup") and all(row["hyper"][k] == v for k, v in rule.items()):
            return row
    return None


def _value(row: StoredRow | None, metric: Mapping[str, Any]) -> str:
    return NOT_MEASURED if row is None else mean_words(reading.final(row, metric["name"]), metric["spec"])
