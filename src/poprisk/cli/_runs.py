"""``poprisk runs``: a table of the recorded runs in a folder, and the repair of a damaged one."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poprisk.cli._options import AsJson, examples
from poprisk.cli._output import show, stdout, table
from poprisk.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from poprisk.runs import RunSummary

EXAMPLES = examples("poprisk runs", "poprisk runs runs --json", "poprisk runs repair runs/first")
_REPAIR = "repair"
_HEADINGS = ("run", "problem", "optimizer", "lr", "steps", "examples", "loss", "held-back risk", "recorded")


def runs(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder that holds recorded runs; or the word repair.")
    ] = Path(),
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="After repair: the run.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recorded runs in a folder and its subfolders; or repair one: poprisk runs repair RUN.

    Manifests, losses and held-back risks are read; nothing that a run names is executed. The loss is the mean over the
    batches of the last eighth of the steps.

    Repair reads every file of a run and cuts the record after the last good step, so that it can be opened and
    continued; nothing is changed if all files are good. Run.load(path, salvage=True) opens such a run as it is.
    """
    from poprisk.runs import list_runs

    if run is not None:
        if folder != Path(_REPAIR):
            raise DataError(f"expected one folder, or repair and a run, got {folder} and {run}")
        return repair(run, as_json)
    found = list_runs(folder)
    return show(run_lines(found, folder, stdout().width), {"runs": [each.to_dict() for each in found]}, as_json)


def repair(run: Path, as_json: bool) -> None:
    """Cut a damaged run after its last good step."""
    from poprisk.runs import repair as repair_run

    steps, before = repair_run(run)
    lost = before - steps
    words = f"{steps} of {before} steps are good" if lost else f"all {steps} steps are good"
    after = "; the record now ends there, and the same training continues it" if lost else "; nothing was changed"
    show([f"{run}: {words}{after}."], {"run": run.as_posix(), "steps": steps, "lost": lost}, as_json)


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
