"""``poprisk compare``: two to five recorded runs side by side."""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poprisk.cli._options import AsJson, Budget, ProblemReference, Trust, examples, opened
from poprisk.cli._outcome import user_code
from poprisk.cli._output import show, stdout, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from poprisk.report import Comparison

EXAMPLES = examples("poprisk compare runs/first runs/second", "poprisk compare runs/* -o compare.html")


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Directories of two to five recorded runs.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path(
        "poprisk-compare.html"
    ),
    budget: Budget = None,
    examples: Annotated[
        bool,
        typer.Option("--examples/--no-examples", help="Whether to include pictures and texts of the examples."),
    ] = True,
    problem: ProblemReference = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Compare two to five recorded runs: which does best on new data, curves, memorization, and disputed labels.

    Writes one HTML page that needs no server and no network. Examples, curves and risk are computed where they are not
    kept with the run; operators, gates and kernels are shown where poprisk analyze or report kept them.
    """
    from poprisk._core.store import writable_file
    from poprisk.report import compare_runs, comparison_json, require_template, write_comparison

    require_template()  # before anything slow
    writable_file(output)
    found = [opened(run, problem, trust) for run in runs]
    with user_code("the comparison"):
        comparison = compare_runs(found, budget=budget)
    command = shlex.join(["poprisk", "compare", *(run.as_posix() for run in runs), "--output", output.as_posix()])
    page = write_comparison(comparison, output, examples=examples, command=command)
    about = {**comparison_json(comparison), "page": page.as_posix(), "bytes": page.stat().st_size}
    show([*_lines(comparison, stdout().width), f"Wrote {page}: open it in a browser"], about, as_json)


def _lines(comparison: "Comparison", width: int) -> "Iterator[RenderableType]":
    from rich.text import Text

    from poprisk.report import compared, comparison_lines

    headings, rows = compared(comparison)
    yield from table(f"{len(rows)} runs", headings, rows, width, narrow=110)
    for line in comparison_lines(comparison):
        yield Text(line)
