"""Output of the commands: words and tables for people, or one JSON object for programs, alone on stdout."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from poprisk._core.text import printable


def stdout() -> Console:
    """The console that results are printed to, of at least 20 columns."""
    console = Console(file=sys.stdout)
    console.width = max(console.width, 20)
    return console


def show(lines: Iterable[RenderableType], found: Mapping[str, Any], as_json: bool) -> None:
    """Print the outcome: its lines or, with ``--json``, the object and nothing else."""
    if as_json:
        from poprisk.report import finite

        text = json.dumps(finite(dict(found)), ensure_ascii=False, allow_nan=False)
        typer.echo("".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text))
        return
    console = stdout()
    for line in lines:
        shown = printable(line) if isinstance(line, str) else line
        if isinstance(shown, Text):
            shown = Text(printable(shown.plain), style=shown.style)
        console.print(shown, highlight=False, markup=False, emoji=False, soft_wrap=isinstance(line, str))


def table(
    title: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int,
    *,
    narrow: int = 72,
    named: bool = True,
) -> Iterator[RenderableType]:
    """A table or, if the terminal is narrower than ``narrow``, a line of text for each row.

    Args:
        title: Title above the table.
        headings: Headings of the columns.
        rows: Cells of each row.
        width: Width of the terminal, in characters.
        narrow: Width below which there is no table.
        named: Whether the first column names the row.
    """
    if width < narrow:
        yield Text(title)
        first = int(named)
        for row in rows:
            cells = ", ".join(f"{heading} {cell}" for heading, cell in list(zip(headings, row, strict=True))[first:])
            yield Text(printable(f"{row[0]}: {cells}" if named else cells))
        return
    drawn = Table(title=title, title_justify="left", title_style="")
    for place, heading in enumerate(headings):
        names = named and place == 0
        drawn.add_column(heading, justify="left" if names else "right", overflow="fold" if names else "ellipsis")
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))
    yield drawn
