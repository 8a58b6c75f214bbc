"""What the capacity page shows: the numbers of a saved result as slots of ``page.md.jinja``, and as a table."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk._core.store import load_result
from poprisk_lab.pages.template import render_blocks
from poprisk_lab.pages.wording import short
from poprisk_lab.paper.capacity.study import KIND

Saved = Mapping[str, Any]
HEAD = ["features", "tr Γ_0 / m", "slope measured", "distance in standard errors", "worst training error / σ²"]


def slots(saved: Saved) -> dict[str, Any]:
    """What ``page.md.jinja`` asks for."""
    config, result = saved["config"], saved["result"]
    ranks, noise = result["ranks"], result["noise"]
    return {
        "config": config,
        "environment": saved["environment"],
        "ranks": ranks,
        "compared": result["widths"]["compared"],
        "noise": noise,
        "worst_slope": max(abs(_deviation(study)) for study in noise),
        "widths": (min(config["widths"]), max(config["widths"])),
        "prominence": max(ranks["prominences"]),
        "median_prominence": median(ranks["prominences"]),
        "gap": _largest_gap(result["widths"]),
        "reservoir": max(config["sweep_examples"] - study["rank"] for study in noise),
        "head": HEAD,
        "rows": slopes(saved),
        "seconds": result["processor_seconds"],
    }


def page_slots(results: Path) -> dict[str, Any]:
    """The slots from the stored ``capacity.json``."""
    return slots(load_result(results / "capacity.json", KIND))


def lines(saved: Saved) -> Iterator[RenderableType]:
    """The slopes and a sentence, for a terminal."""
    shown = Table(title="Error of interpolated noise against its variance", title_justify="left", title_style="")
    for name in HEAD:
        shown.add_column(name, justify="right", overflow="fold")
    for row in slopes(saved):
        shown.add_row(*row)
    yield shown
    yield Text(render_blocks("poprisk_lab.paper.capacity", "page.md.jinja", slots(saved))["headline"], style="bold")


def slopes(saved: Saved) -> list[list[str]]:
    """For each width: the predicted and the measured slope of the error against the variance of the noise."""
    return [
        [
            str(study["width"]),
            f"{study['visibility']:.4g}",
            f"{study['slope']:.4g} ± {study['slope_error']:.2g}",
            f"{_deviation(study):+.1f}",
            short(study["train_error"]),
        ]
        for study in saved["result"]["noise"]
    ]


def _deviation(study: Saved) -> float:
    return (study["slope"] - study["visibility"]) / study["slope_error"]


def _largest_gap(widths: Saved) -> float:
    pairs = zip(widths["compared"]["theory"], widths["without_misfit"], strict=True)
    return max(abs(exact - without) / exact for exact, without in pairs)
