"""Numbers of clipped gradients and the gate, from the stored result: a part of ``docs/optimizer.md``."""

import json
from pathlib import Path
from typing import Any

from poprisk_lab.pages.wording import scaled


def slots(results: Path) -> dict[str, Any]:
    """The slots of ``claim.md.jinja``, from the folder of results."""
    return {"rows": _clipping(json.loads((results / "clipping.json").read_text(encoding="utf-8")))}


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
