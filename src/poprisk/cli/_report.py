"""``poprisk report``: what a recorded run says about itself, as one page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poprisk.cli._opening import opened
from poprisk.cli._options import AsJson, Budget, Clean, ProblemReference, Retrain, RunDirectory, examples
from poprisk.cli._outcome import interrupt_says, note, user_code
from poprisk.cli._output import show
from poprisk.errors import DataError

if TYPE_CHECKING:
    from poprisk.report import CleanTargets, KeptAnalysis
    from poprisk.runs import Run

EXAMPLES = examples(
    "poprisk report poprisk-run",
    "poprisk report poprisk-run -o report.html --budget 120 --retrain 10",
    "poprisk report poprisk-run --no-examples",
)


def report(
    run: RunDirectory,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write, one HTML file.")] = Path(
        "poprisk-report.html"
    ),
    budget: Budget = None,
    retrain: Retrain = None,
    examples: Annotated[
        bool,
        typer.Option("--examples/--no-examples", help="Show pictures and texts of the examples, or leave them out."),
    ] = True,
    clean: Clean = None,
    problem: ProblemReference = None,
    as_json: AsJson = False,
) -> None:
    """Write what a recorded run says about itself: one HTML page that needs no server and no network.

    What was memorized, the risk on new data, labels that look wrong, gates, spectra, drift, and every example in a
    table to sort and filter. Parts that are too dear for the budget say what they would take. Nothing is trained again
    without --retrain. What poprisk analyze has found with the same options is used.
    """
    from poprisk._core.store import writable_directory
    from poprisk.cli._progress import part_progress
    from poprisk.report import PARTS, CleanTargets, report_command, run_report

    if output.is_dir():
        raise DataError(
            f"--output must be a file, got the directory {output}: name the page, e.g. {output}/report.html"
        )
    writable_directory(output.parent)  # before anything slow
    found = opened(run, problem)
    targets = None if clean is None else CleanTargets.load(clean)
    kept = _kept(found, budget, retrain, targets)
    if kept.finished:
        note(f"using what is kept in {kept.folder}: {', '.join(kept.finished)}")
    with interrupt_says(kept.words), user_code("the report"), part_progress("report", PARTS) as progress:
        page = run_report(
            found,
            output,
            budget=kept.budget,
            retrain=kept.retrain,
            examples=examples,
            clean=targets,
            kept=kept,
            command=report_command(run, output, kept.budget, kept.retrain, examples, clean, problem),
            progress=progress,
        )
    about = {"page": page.as_posix(), "bytes": page.stat().st_size, "run": run.as_posix()}
    options = {"budget": kept.budget, "retrain": kept.retrain, "examples": examples}
    show([f"Wrote {page}: open it in a browser"], {**about, **options}, as_json)


def _kept(run: "Run", budget: float | None, retrain: int | None, clean: "CleanTargets | None") -> "KeptAnalysis":
    """Where the analysis is kept; of a run that cannot be written to, only what is there."""
    from poprisk.report import KeptAnalysis

    try:
        return KeptAnalysis(run, budget, retrain, clean)
    except OSError:
        return KeptAnalysis(run, budget, retrain, clean, writes=False)
