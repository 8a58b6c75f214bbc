"""``poprisk report``: write the report of a recorded run."""

from pathlib import Path
from typing import Annotated

import typer

from poprisk.cli import _options as given
from poprisk.cli._analyze import analyzed
from poprisk.cli._options import examples
from poprisk.cli._outcome import note
from poprisk.cli._output import show

EXAMPLES = examples(
    "poprisk report poprisk-run",
    "poprisk report poprisk-run -o report.html --budget 120 --retrain 10",
    "poprisk report poprisk-run --no-examples",
)


def report(
    run: given.RunDirectory,
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path(
        "poprisk-report.html"
    ),
    budget: given.Budget = None,
    retrain: given.Retrain = None,
    memory: given.Memory = None,
    examples: Annotated[
        bool,
        typer.Option("--examples/--no-examples", help="Whether to include pictures and texts of the examples."),
    ] = True,
    clean: given.Clean = None,
    problem: given.ProblemReference = None,
    trust: given.Trust = False,
    as_json: given.AsJson = False,
) -> None:
    """Write the report of a recorded run: one HTML page that needs no server and no network.

    The page shows what was memorized, the risk on new data, labels that look wrong, gates, spectra, drift, and a
    table of all examples to sort and filter. Sections over the time budget are skipped; the page says how long each
    would take. Without --retrain only a few deletions are trained, to check the risk, where quick. Results of
    poprisk analyze with the same options are used.
    """
    from poprisk._core.store import writable_file
    from poprisk.report import CleanTargets, KeptAnalysis, report_command, require_template, write_report

    require_template()  # before anything slow
    writable_file(output)
    found = given.opened(run, problem, trust)
    targets = None if clean is None else CleanTargets.load(clean)
    kept = KeptAnalysis.of(found, budget, retrain, targets)
    if kept.finished:
        note(f"using the parts kept in {kept.folder}: {', '.join(kept.finished)}")
    command = report_command(run, output, kept.budget, kept.retrain, examples, clean, problem)
    page = write_report(analyzed(found, kept, targets, memory), output, examples=examples, command=command)
    about = {"page": page.as_posix(), "bytes": page.stat().st_size, "run": run.as_posix()}
    options = {"budget": kept.budget, "retrain": kept.retrain, "examples": examples}
    show([f"Wrote {page}: open it in a browser"], {**about, **options}, as_json)
