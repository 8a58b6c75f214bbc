"""The measured parts of ``docs/optimizer.md``: gates on clean text, clipping, and the speed of a step."""

import json
from pathlib import Path
from typing import Any

from poprisk_lab.pages.template import render_parts
from poprisk_lab.paper.clean_lm import numbers as clean_lm
from poprisk_lab.paper.clipping import numbers as clipping

_SPEED = {"optimizer_step_cpu.json": "2 CPU cores", "optimizer_step_cuda.json": "one H200"}


def parts(results: Path) -> dict[str, str]:
    """The parts by their marks, from the folder of results."""
    speed = _speed({device: _load(results, name) for name, device in _SPEED.items()})
    return {
        **render_parts("poprisk_lab.paper.clean_lm", "claim.md.jinja", clean_lm.slots(results)),
        **render_parts("poprisk_lab.paper.clipping", "claim.md.jinja", clipping.slots(results)),
        **render_parts("poprisk_lab.pages", "optimizer_guide.md.jinja", {"speed": speed}),
    }


def _load(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / name).read_text(encoding="utf-8"))


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
