"""``poprisk runs``: a table of the recorded runs in a folder."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poprisk.cli._options import AsJson, examples
from poprisk.cli._output import show, stdout, table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from poprisk.runs import RunSummary

EXAMPLES = examples("poprisk runs", "poprisk runs runs --json")
_HEADINGS = ("run", "problem", "optimizer", "lr", "steps", "examples", "loss", "held-back risk", "recorded")


def runs(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that holds recorded runs.")] = Path(),
    as_json: AsJson = False,
) -> None:
    """List the recorded runs in a folder and its subfolders.

    Manifests, losses and held-back risks are read; nothing that a run names is executed. The loss is the mean over the
    batches of the last eighth of the steps.
    """
    from poprisk.runs import list_runs

    found = list_runs(folder)
    show(run_lines(found, folder, stdout().width), {"runs": [run.to_dict() for run in found]}, as_json)


def run_lines(found: "list[RunSummary]", folder: Path, width: int) -> "Iterator[RenderableType]":
    """The table, and a line for each run that cannot be opened."""
    good = [run for run in found if not run.error]
    if not good:
        yield f"No recorded runs in {folder}: poprisk train records one"
    else:
        rows = [_row(run, folder) for run in good]
        yield from table(f"{len(good)} recorded runs", _HEADINGS, rows, width, narrow=110)
    for run in found:
        if run.error:
            yield f"{run.path} cannot be opened: {run.error}"


def _row(run: "RunSummary", folder: Path) -> tuple[str, ...]:
    from poprisk._core.html import short
    from poprisk.report import size_of

    place = run.path.relative_to(folder) if run.path.is_relative_to(folder) and run.path != folder else run.path
    risk = "–" if run.risk is None else size_of(run.risk) if run.risk.valid else "not valid"
    steps = f"{run.steps}" if run.finished else f"{run.steps} (not finished)"
    lr, loss = ("–" if math.isnan(value) else short(value) for value in (run.lr, run.loss))
    return str(place), run.problem, run.optimizer, lr, steps, str(run.examples), loss, risk, run.created[:16]
