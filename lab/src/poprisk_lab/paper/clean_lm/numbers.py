"""Numbers of the gates on clean text, from the stored results: a part of ``docs/optimizer.md``."""

import json
from pathlib import Path
from typing import Any

from poprisk._core.statistics import mean_over_seeds
from poprisk_lab.engine import reading
from poprisk_lab.pages.comparison import DEFAULTS_LABEL
from poprisk_lab.pages.wording import power_of_ten

GATES = {"soft": "Algorithm 1 (soft, α = 1)", "calibrated": '`alpha="calibrated"`', "snr": '`gate="snr"`'}
"""The gates of strength 1, as users write them."""


def slots(results: Path) -> dict[str, Any]:
    """The slots of ``claim.md.jinja``, from the folder of results."""
    return {
        "defaults": _defaults(_load(results, "char_language.json")),
        "clean": _clean_text(_load(results, "clean_lm.json")),
    }


def _load(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / name).read_text(encoding="utf-8"))


def _defaults(saved: dict[str, Any]) -> dict[str, float]:
    """Last losses on the clean language model of the comparisons."""
    study = saved["result"]["studies"]["char_clean"]
    metric = reading.primary(study)["name"]
    labels = {"ours": DEFAULTS_LABEL, "usual": "AdamW, lr 1e-3", "tuned": "adamw"}
    return {
        name: mean_over_seeds(reading.final(reading.row(study, label), metric)).value for name, label in labels.items()
    }


def _clean_text(saved: dict[str, Any]) -> dict[str, Any]:
    """Losses by learning rate, and how far each gate is behind AdamW at lr 1e-3."""
    cells = {(row["optimizer"], row["lr"]): row for row in saved["result"]["summary"]}
    losses = {key: row["loss"]["value"] for key, row in cells.items()}
    rates = sorted({lr for _, lr in cells})
    adamw = losses["AdamW", 1e-3]
    return {
        "head": ["lr", *map(power_of_ten, rates)],
        "rows": [
            [words, *(_cell(cells.get((name, lr))) for lr in rates)]
            for name, words in ({"AdamW": "AdamW"} | GATES).items()
        ],
        "same": losses["soft", 1e-3] - adamw,
        "tenfold": {name: losses[name, 1e-2] - adamw for name in GATES},
        "tuned": adamw - min(loss for (name, _), loss in losses.items() if name == "AdamW"),
        "model": saved["config"]["model"],
        "seeds": saved["config"]["seeds"],
    }


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    gate = "" if row["mean_gate"] is None else f" ({row['mean_gate']['value']:.3f})"
    return f"{row['loss']['value']:.2f}{gate}"
