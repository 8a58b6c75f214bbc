"""What the page on the time axis shows: the numbers of a saved result as slots of ``page.md.jinja``."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from poprisk._core.store import load_result
from poprisk_lab.pages.template import render_blocks
from poprisk_lab.pages.wording import processor_minutes
from poprisk_lab.paper.time_axis.study import KIND

Saved = Mapping[str, Any]
PAPER = {"interpolated": 1e3, "generalized": 1e5}
"""What the caption of the paper's figure reports."""
_EVENTS = ("interpolated", "generalized", "overtaken")


def slots(saved: Saved) -> dict[str, Any]:
    """What ``page.md.jinja`` asks for."""
    runs, found = saved["result"]["runs"], saved["result"]["summary"]
    return {
        "config": saved["config"],
        "environment": saved["environment"],
        "paper": PAPER,
        "found": found,
        "when": {name: _when(found[f"{name}_at"]) for name in _EVENTS},
        "fast": _mode(runs[0]["modes"][0]),
        "slow": _mode(runs[0]["modes"][-1]),
        "ratio": _ratio(found),
        "rows": [
            [str(r["seed"]), *(_time(r[f"{name}_at"]) for name in _EVENTS), f"{r['test_accuracy'][-1]:.3f}"]
            for r in runs
        ],
        "runs": len(runs),
        "minutes": processor_minutes(runs),
    }


def page_slots(results: Path) -> dict[str, Any]:
    """The slots from the stored ``time.json``."""
    return slots(load_result(results / "time.json", KIND))


def lines(saved: Saved) -> Iterator[RenderableType]:
    """A sentence, for a terminal."""
    yield Text(render_blocks("poprisk_lab.paper.time_axis", "page.md.jinja", slots(saved))["headline"], style="bold")


def _mode(mode: Saved) -> dict[str, Any]:
    """A direction with its place from 1, its σ² and when half of it is fitted."""
    return {"place": mode["index"] + 1, "mobility": mode["mobility"], "half_time": _time(mode["half_time"])}


def _ratio(found: Saved) -> str:
    if found["overtaken_at"] is None or found["generalized_at"] is None:
        return "–"
    return f"{found['overtaken_at'] / found['generalized_at']:.1f}"


def _time(value: float | None) -> str:
    if value is None:
        return "never"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{value:.0f}" if value < 1e4 else f"{mantissa}e{int(exponent)}"


def _when(value: float | None) -> str:
    return "at no time" if value is None else f"at t = {_time(value)}"
