"""The demo's table and sentences for a terminal, from its saved result."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_NARROW = 64
_COLUMNS = {"last": "last step", "best": "best step", "memorized": "wrong labels memorized"}


def demo_lines(saved: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The table, then the headline, then what the learning rate does; no table where it would not fit."""
    summary = saved["result"]["summary"]
    yield from _list(saved) if width < _NARROW else [_table(saved)]
    yield ""
    yield Text(summary["headline"], style="bold")
    if summary["sensitivity_line"]:
        yield Text(summary["sensitivity_line"])


def _table(saved: Mapping[str, Any]) -> Table:
    table = Table(title=_title(saved), title_justify="left", title_style="")
    table.add_column("optimizer", overflow="fold")
    for name in _COLUMNS.values():
        table.add_column(name, justify="right")
    for row in saved["result"]["summary"]["rows"]:
        table.add_row(row["label"], *(_percent(row[key]) for key in _COLUMNS))
    return table


def _list(saved: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text(_title(saved))
    for row in saved["result"]["summary"]["rows"]:
        yield Text(f"{row['label']}: " + ", ".join(f"{name} {_percent(row[key])}" for key, name in _COLUMNS.items()))


def _title(saved: Mapping[str, Any]) -> str:
    seeds = saved["config"]["seeds"]
    error = f"mean ± standard error over {seeds} seeds" if seeds > 1 else "one seed"
    return f"Digits with {saved['result']['wrong_share']:.0%} of the labels wrong: test accuracy in % ({error})"


def _percent(mean: Mapping[str, Any] | None) -> str:
    if mean is None:
        return "–"
    value = f"{100 * mean['value']:.1f}"
    return value if mean["standard_error"] is None else f"{value} ± {100 * mean['standard_error']:.1f}"
