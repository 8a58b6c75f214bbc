"""The demo's table and sentences for a terminal, from its saved result."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text


def demo_lines(saved: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The table, then the headline, then what the learning rate does."""
    summary = saved["result"]["summary"]
    yield _table(saved)
    yield ""
    yield Text(summary["headline"], style="bold")
    if summary["sensitivity_line"]:
        yield Text(summary["sensitivity_line"])


def _table(saved: Mapping[str, Any]) -> Table:
    config, result = saved["config"], saved["result"]
    seeds = config["seeds"]
    error = f"mean ± standard error over {seeds} seeds" if seeds > 1 else "one seed"
    table = Table(
        title=f"Digits with {result['wrong_share']:.0%} of the labels wrong: test accuracy in % ({error})",
        title_justify="left",
        title_style="",
    )
    table.add_column("optimizer")
    for name in ("last step", "best step", "wrong labels memorized"):
        table.add_column(name, justify="right")
    for row in result["summary"]["rows"]:
        cells = [_percent(row[key]) for key in ("last", "best", "memorized")]
        table.add_row(row["label"], *cells)
    return table


def _percent(mean: Mapping[str, Any] | None) -> str:
    if mean is None:
        return "–"
    value = f"{100 * mean['value']:.1f}"
    return value if mean["standard_error"] is None else f"{value} ± {100 * mean['standard_error']:.1f}"
