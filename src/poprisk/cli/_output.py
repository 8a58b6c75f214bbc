"""What commands have in common on their way out: words for people or one JSON object, alone on stdout."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import typer
from rich.console import RenderableType


def show(lines: Iterable[RenderableType], found: Mapping[str, Any], as_json: bool) -> None:
    """Print the outcome: its lines, or with ``--json`` the object and nothing else."""
    if as_json:
        from poprisk.report import finite

        typer.echo(json.dumps(finite(dict(found)), ensure_ascii=False, allow_nan=False))
        return
    from poprisk.cli._progress import stdout

    console = stdout()
    for line in lines:
        console.print(line, highlight=False, soft_wrap=isinstance(line, str))
