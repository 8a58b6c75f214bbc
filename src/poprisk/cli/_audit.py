"""``poprisk audit``: which labels of a recorded run are probably wrong."""

import json
from pathlib import Path
from typing import Annotated

import typer

from poprisk.cli._opening import opened
from poprisk.cli._options import AsJson, ProblemReference, RunDirectory, examples, number
from poprisk.cli._outcome import user_code
from poprisk.cli._output import show

EXAMPLES = examples(
    "poprisk audit poprisk-run", "poprisk audit poprisk-run --top 5 --output audit.csv", "poprisk audit RUN --json"
)


def audit(
    run: RunDirectory,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write the whole table here: a .csv or .parquet file.", show_default=False),
    ] = None,
    top: Annotated[int, number(0, 100_000, "How many of the most suspicious examples to print.")] = 20,
    moments: Annotated[int, number(1, 10_000, "At how many moments of the training to evaluate the network.")] = 20,
    tier: Annotated[str, typer.Option(help="any, exact (self-influence and more, where possible) or auto.")] = "auto",
    problem: ProblemReference = None,
    as_json: AsJson = False,
) -> None:
    """Say which training labels of a recorded run are probably wrong, and what they should be.

    Works on any run whose problem is known; what is approximate is said in notes. Nothing is trained again.
    """
    from poprisk._core.store import writable_directory
    from poprisk.cli._progress import stdout
    from poprisk.report import audit_json, audit_lines
    from poprisk.risk import audit as audit_run
    from poprisk.risk import check_format

    if output is not None:
        check_format(output)
        writable_directory(output.parent)  # before anything slow
    found = opened(run, problem, needs_problem=True)
    with user_code("the audit"):
        table = audit_run(found, tier=tier, moments=moments)  # type: ignore[arg-type]  # checked there
    if output is not None:
        table.save(output)
    lines = [*audit_lines(table, top, stdout().width), *([f"Wrote {output}"] if output is not None else [])]
    written = {} if output is None else {"output": output.as_posix()}
    show(lines, {**json.loads(audit_json(table, top)), **written}, as_json)
