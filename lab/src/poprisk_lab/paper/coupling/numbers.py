"""What the coupling page shows: the numbers of a saved result as slots of ``page.md.jinja``, and as a table."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk._core.store import load_result
from poprisk_lab.pages.template import render_blocks
from poprisk_lab.pages.wording import one_or_range, processor_minutes, short, spread
from poprisk_lab.paper.coupling.study import FULL_BATCH, KIND, MINIBATCH, REPEATED

Saved = Mapping[str, Any]
Row = Mapping[str, Any]
PAPER = {"error": 0.165, "correlation": 0.991, "peak": 4.8, "end": 2.4}
"""What the caption of the paper's figure reports."""
_EXACT = 1e-8  # a relative error below this is rounding, and given as the worst of all seeds
_IN_TERMINAL = ("error of", "kernel drift", "‖R⊥‖", "reservoir", "bounds")  # how the quantities shown there begin
_QUANTITIES: dict[str, Callable[[Row], str]] = {
    "error of A∘(Δu_S − source_S) + source_Q": lambda r: _error(r["coupled_error"], r["worst_coupled_error"]),
    "error of −G g(0) + source_Q": lambda r: f"≤ {short(r['worst_transferred_error'])}",
    "error of kernel regression with the initial kernel": lambda r: spread(r["frozen_error"], 2),
    "error of A∘ Δu_S, without sources": lambda r: spread(r["sourceless_error"], 4),
    "kernel drift, largest": lambda r: spread(r["drift_peak"], 1),
    "kernel drift, at the end": lambda r: spread(r["drift_end"], 1),
    "‖R⊥‖ / ‖C_Q‖": lambda r: _error(r["relative_remainder"], r["worst_relative_remainder"]),
    "σ_min(C_S), lowest over seeds": lambda r: short(r["lowest_train_root"]),
    "reservoir, number of directions": lambda r: one_or_range(r["reservoir_dimensions"]),
    "‖G P_res‖ / ‖G‖": lambda r: f"≤ {short(r['worst_reservoir_leak'])}" if any(r["reservoir_dimensions"]) else "–",
    "share of the final gradient in the reservoir": lambda r: (
        spread(r["residual_in_reservoir"], 2) if any(r["reservoir_dimensions"]) else "–"
    ),
    "‖Δu_Q − source_Q‖ relative to its bound": lambda r: spread(r["tightness"], 3),
    "largest secant correction of a step": lambda r: short(r["worst_correction"]),
    "training loss, start → end": lambda r: " → ".join(f"{mean['value']:.3f}" for mean in r["train_loss"]),
    "test error, start → end": lambda r: " → ".join(f"{mean['value']:.2f}" for mean in r["test_error"]),
    "bounds that hold": lambda r: f"{r['bounds_held']} of {r['bounds_checked']}",
}


def slots(saved: Saved) -> dict[str, Any]:
    """What ``page.md.jinja`` asks for."""
    config, result = saved["config"], saved["result"]
    rows = {row["case"]: row for row in result["summary"]}
    return {
        "config": config,
        "environment": saved["environment"],
        "paper": PAPER,
        "mini": rows[MINIBATCH],
        "full": rows[FULL_BATCH],
        "repeated": rows[REPEATED],
        "reservoir": one_or_range(rows[FULL_BATCH]["reservoir_dimensions"]),
        "batch": _setting(config, MINIBATCH)["batch_size"],
        "repeats": _setting(config, FULL_BATCH)["repeated"],
        "rows": quantities(saved),
        "correction": max(row["worst_correction"] for row in result["summary"]),
        "most_nodes": max(run["most_nodes"] for run in result["runs"]),
        "runs": len(result["runs"]),
        "minutes": processor_minutes(result["runs"]),
    }


def page_slots(results: Path) -> dict[str, Any]:
    """The slots from the stored ``coupling.json``."""
    return slots(load_result(results / "coupling.json", KIND))


def lines(saved: Saved) -> Iterator[RenderableType]:
    """The main rows of the table and a sentence, for a terminal."""
    words = render_blocks("poprisk_lab.paper.coupling", "page.md.jinja", slots(saved))
    head, *rows = quantities(saved)
    table = Table(title=words["error_note"], title_justify="left", title_style="")
    table.add_column(head[0], overflow="fold")
    for name in head[1:]:
        table.add_column(name, justify="right", overflow="fold")
    for row in rows:
        if row[0].startswith(_IN_TERMINAL):
            table.add_row(*row)
    yield table
    yield Text(words["headline"], style="bold")


def quantities(saved: Saved) -> list[list[str]]:
    """The table: a head with the cases, and a row for each quantity."""
    rows = saved["result"]["summary"]
    head = ["", *(_case_words(saved["config"], row["case"]) for row in rows)]
    return [head, *([name, *(write(row) for row in rows)] for name, write in _QUANTITIES.items())]


def _case_words(config: Mapping[str, Any], name: str) -> str:
    case = _setting(config, name)
    batch = "full batch" if case["batch_size"] is None else f"batches of {case['batch_size']}"
    return f"{batch}, {case['repeated'] or 'no'} inputs repeated"


def _setting(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(case for case in config["cases"] if case["name"] == name)


def _error(mean: Mapping[str, Any], worst: float) -> str:
    return f"≤ {short(worst)}" if worst < _EXACT else spread(mean, 3)
