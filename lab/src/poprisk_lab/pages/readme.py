"""Numbers of the measured parts of ``README.md`` (``readme.md.jinja``): the demonstration and last steps."""

import json
import re
from pathlib import Path
from typing import Any

from poprisk._core.statistics import mean_over_seeds
from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredStudy
from poprisk_lab.pages.comparison import DEFAULTS_LABEL
from poprisk_lab.pages.wording import scaled

MEASURED = {
    "labels": ("digits-0", "digits-20", "digits-40", "fashion-0", "fashion-20", "fashion-40"),
    "cifar": ("cifar10-clean", "cifar10-random1", "cifar10-worse"),
    "teacher": ("teacher_clean", "teacher_20", "teacher_40"),
    "inr": ("inr_astronaut",),
    "lorenz": ("lorenz_noise0.1",),
    "char_language": ("char_clean", "char_noisy"),
}
"""The tasks of the table, by stored result."""
_WORDS = {
    "digits": "digits",
    "fashion": "Fashion-MNIST",
    "cifar10": "CIFAR-10N",
    "teacher": "teacher's labels",
    "inr": "denoised photograph, dB",
    "lorenz": "Lorenz '63, MSE × 10⁴",
    "char": "language model, nats",
}
_LEVELS = {"0": "clean", "clean": "clean", "random1": "17% wrong", "worse": "40% wrong", "noisy": "20% wrong"}


def slots(results: Path) -> dict[str, Any]:
    """The slots of the template, from the folder of results."""
    stored = {name: _load(results, f"{name}.json")["result"]["studies"] for name in MEASURED}
    seeds = [len(stored[name][tasks[0]]["rows"][0]["seeds"]) for name, tasks in MEASURED.items()]
    return {
        "demo": _demo(_load(results, "demo/result.json")),
        "measured": [_row(task, stored[name][task]) for name, tasks in MEASURED.items() for task in tasks],
        "seeds": (min(seeds), max(seeds)),
    }


def _load(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / name).read_text(encoding="utf-8"))


def _demo(saved: dict[str, Any]) -> dict[str, Any]:
    summary = saved["result"]["summary"]
    rows = [[r["label"], *(scaled(r[k], 100) for k in ("last", "best", "memorized"))] for r in summary["rows"]]
    return {
        "rows": rows,
        "headline": summary["headline"],
        "sensitivity": summary["sensitivity_line"],
        "config": saved["config"],
    }


def _row(task: str, study: StoredStudy) -> list[str]:
    """The last steps of the usual AdamW, of the defaults and of the tuned AdamW, and what only an oracle finds."""
    metric = reading.primary(study)["name"]
    kind, _, level = re.split(r"([-_])", task, maxsplit=1)
    scale = 100 if metric.endswith("accuracy") else 1e4 if kind == "lorenz" else 1
    usual = next(r for r in study["rows"] if r["arm"] == "adamw" and not r["chosen_for"] and r["hyper"]["lr"] == 1e-3)
    given = [usual, reading.row(study, DEFAULTS_LABEL), reading.row(study, "adamw")]
    means = [mean_over_seeds(reading.final(row, metric)) for row in given] + [mean_over_seeds(reading.oracle(study))]
    noise = _LEVELS.get(level, f"{level}% wrong" if level.isdigit() else "noisy")
    plain = ({"value": mean.value, "standard_error": mean.standard_error} for mean in means)
    return [f"{_WORDS[kind]}, {noise}", *(scaled(mean, scale, 1 if scale > 1 else 2) for mean in plain)]
