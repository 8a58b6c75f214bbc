"""What the page on population risk shows: the numbers of the stored settings, as slots of ``page.md.jinja``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result
from poprisk_lab.paper.risk_honesty.study import summarize

KIND = "influence benchmark: honesty"
_NAMES = {
    "exclusion": "exclusion (one run)",
    "first_order": "first order, the paper's L_pop (one run)",
    "kernel_gcv": "GCV on the final tangent kernel (one run, squared loss only)",
    "takeuchi": "Takeuchi's criterion (one run)",
    "holdout": "a held-out fifth (one training on the rest)",
    "k_fold": "10-fold (10 trainings)",
    "auto": '`method="auto"`, no training',
    "auto, 10 trainings": '`method="auto"`, `retrain_budget=10`',
}
_STOPPING = {
    "never": "none",
    "evidence": "evidence criterion",
    "disparity": "gradient disparity",
    "holdout": "a held-out fifth",
    "k_fold": "10-fold",
    "exclusion": "exclusion where it is valid",
}


def page_slots(results: Path) -> dict[str, Any]:
    """The slots from the stored ``risk_honesty.json``."""
    return slots(load_result(results / "risk_honesty.json", KIND))


def slots(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What ``page.md.jinja`` asks for."""
    rows = saved["result"]["rows"]
    everything = summarize(rows)
    regression = summarize([row for row in rows if "kernel_gcv" in row["estimates"]])
    columns = everything["columns"]
    shown = [(words, regression["columns"].get(name)) for name, words in _NAMES.items() if not name.startswith("auto")]
    errors = [
        f"{words}: {100 * column['median error, all']:.1f}%, {column['off by more than 20%']} off by more than 20%"
        for words, column in shown
        if column is not None
    ]
    return {
        "config": saved["config"],
        "tasks": "; ".join(dict.fromkeys(row["task"] for row in rows)),
        "everything": everything,
        "rows": [_row(words, columns[name]) for name, words in _NAMES.items() if name in columns],
        "exclusion": columns["exclusion"],
        "first": columns["first_order"],
        "auto": columns["auto, 10 trainings"],
        "regression": regression,
        "regression_errors": "; ".join(errors),
        "stopping": "; ".join(
            f"{_STOPPING[name]}: {100 * excess:.1f}%" for name, excess in everything["stopping"].items()
        ),
    }


def _row(words: str, column: Mapping[str, Any]) -> list[str]:
    covered = "no error given" if column["coverage"] is None else f"{column['covered']} of {column['valid']}"
    wrong = [str(column[name]) for name in ("off by more than 20%, believed", "off by more than 20%")]
    valid = f"{column['valid']} of {column['settings']}"
    return [words, valid, covered, *wrong, f"{100 * column['median error, all']:.1f}%"]
