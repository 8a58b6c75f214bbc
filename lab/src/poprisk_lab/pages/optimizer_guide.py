"""Numbers of the measured parts of ``docs/optimizer.md`` (``optimizer_guide.md.jinja``)."""

import json
from pathlib import Path
from typing import Any

from poprisk._core.statistics import mean_over_seeds
from poprisk_lab.engine import reading
from poprisk_lab.pages.comparison import DEFAULTS_LABEL
from poprisk_lab.pages.wording import power_of_ten, scaled

GATES = {"soft": "Algorithm 1 (soft, α = 1)", "calibrated": '`alpha="calibrated"`', "snr": '`gate="snr"`'}
"""The gates of strength 1, as users write them."""
_SPEED = {"optimizer_step_cpu.json": "2 CPU cores", "optimizer_step_cuda.json": "one H200"}


def slots(results: Path) -> dict[str, Any]:
    """The slots of the template, from the folder of results."""
    return {
        "defaults": _defaults(_load(results, "char_language.json")),
        "clean": _clean_text(_load(results, "clean_lm.json")),
        "clipping": _clipping(_load(results, "clipping.json")),
        "speed": _speed({device: _load(results, name) for name, device in _SPEED.items()}),
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


def _clipping(saved: dict[str, Any]) -> list[list[str]]:
    rows = []
    for row in saved["result"]["summary"]:
        if row["optimizer"] == "AdamW":
            continue
        norm = "none" if row["max_norm"] is None else f"{row['max_norm']:g}"
        last = f"{scaled(row['accuracy'], 100)} %" if row.get("accuracy") else f"{scaled(row['loss'], 1, 3)} nats"
        clipped = "0" if row["clipped_share"] is None else f"{100 * row['clipped_share']['value']:.0f}"
        rows.append([row["task"], norm, f"{clipped} %", f"{row['mean_gate']['value']:.4f}", last])
    return rows


def _speed(measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    devices = [
        {
            "name": device,
            "torch": saved["environment"]["torch"].split("+")[0],
            "rows": [
                [case, f"{r['ours_ms']:.2f}", f"{r['adamw_ms']:.2f}", f"{r['ratio']:.3f}"]
                for case, r in saved["cases"].items()
            ],
        }
        for device, saved in measured.items()
    ]
    large = measured["one H200"]["cases"]["494M, 1 tensor"]
    return {
        "devices": devices,
        "share": large["share_of_copy_bandwidth"],
        "extra": large["extra_bytes_per_parameter"],
    }
