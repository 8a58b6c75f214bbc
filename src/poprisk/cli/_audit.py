"""``poprisk audit``: which labels of a recorded run are probably wrong."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poprisk.cli._options import AsJson, Memory, ProblemReference, RunDirectory, Trust, examples, number, opened
from poprisk.cli._outcome import user_code
from poprisk.cli._output import show, stdout, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from poprisk.risk import AuditTable
    from poprisk.runs import Run

EXAMPLES = examples(
    "poprisk audit poprisk-run",
    "poprisk audit poprisk-run --top 5 --output audit.csv",
    "poprisk audit poprisk-run --apply decisions.json --output corrected.npy",
    "poprisk audit RUN --json",
)
_SHOWN = {
    "classes": ("example", "given_label", "suggested_label", "suspicion", "is_suspect", "mean_loss", "confidence"),
    "regression": ("example", "given_target", "suggested_target", "suspicion", "is_suspect", "residual_z"),
    "loss": ("example", "suspicion", "loss", "mean_loss"),
}
_HEADINGS = {
    "given_label": "given",
    "given_target": "given",
    "suggested_label": "suggested",
    "suggested_target": "suggested",
    "is_suspect": "suspect",
    "mean_loss": "mean loss",
    "residual_z": "residual z",
    "self_influence": "self-influence",
    "loo_loss": "left-out loss",
}


def audit(
    run: RunDirectory,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Also write the whole table to this .csv or .parquet file; with --apply, the corrected targets to "
            "this .npy or .csv file.",
            show_default=False,
        ),
    ] = None,
    apply: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Apply the decisions exported from a report (.json or .csv) to the targets, instead of an audit.",
            show_default=False,
        ),
    ] = None,
    top: Annotated[int, number(0, 100_000, "Number of most suspicious examples to print, suspects first.")] = 20,
    moments: Annotated[
        int, number(1, 10_000, "Number of moments of the training at which to evaluate the network.")
    ] = 20,
    tier: Annotated[
        str,
        typer.Option(help="any: what every run allows; exact: also self-influence and more; auto: exact if possible."),
    ] = "auto",
    retrain: Annotated[
        int,
        number(0, 100, "Number of trainings that may be spent on predictions of unseen examples: 0, or at least 3."),
    ] = 0,
    budget: Annotated[
        float | None,
        number(
            0.1,
            1e6,
            "Seconds that the audit may take; exact columns that would take longer are left out. Default: about 10 for "
            "the exact columns, no limit with --tier exact.",
            show_default=False,
        ),
    ] = None,
    memory: Memory = None,
    problem: ProblemReference = None,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """List the training labels of a recorded run that are probably wrong, and what they should be.

    Works on any run whose problem is available; notes say what is approximate. Nothing is trained again without
    --retrain. After a review of the labels in a report, --apply writes the corrected targets.
    """
    from poprisk._core.store import writable_file
    from poprisk.risk import audit as audit_run
    from poprisk.risk import check_format

    if apply is not None:
        _apply(opened(run, problem, trust, quiet=True), apply, output, as_json)
        return
    if output is not None:
        check_format(output)
        writable_file(output)  # before anything slow
    found = opened(run, problem, trust, quiet=True)
    audited = kept_table(found, retrain)
    if audited is None:
        with user_code("the audit"):
            limits = {"budget": budget, "memory": memory}
            audited = audit_run(found, tier=tier, moments=moments, retrain_budget=retrain, **limits)  # type: ignore[arg-type]  # checked there
    if output is not None:
        audited.save(output)
    written = [] if output is None else [f"Wrote {output}"]
    outcome = _found(audited, top) | ({} if output is None else {"output": output.as_posix()})
    show([*audit_lines(audited, top, stdout().width), *written], outcome, as_json)


def kept_table(found: "Run", retrain: int = 0) -> "AuditTable | None":
    """The audit kept with a run whose problem is not available; None if it is. Without it, nothing can be retrained."""
    from poprisk.errors import RunError
    from poprisk.report import WITHOUT_PROBLEM, can_rebuild
    from poprisk.risk import kept_audit

    table = None if retrain else kept_audit(found)
    try:
        _ = table or found.problem
    except RunError:
        if can_rebuild(found):
            raise
        said, call = (f"--retrain {retrain} cannot train: ", f"(run, retrain={retrain})") if retrain else ("", "(run)")
        raise RunError(f"{found.path}: {said}{WITHOUT_PROBLEM.replace('(run)', call)}") from None
    return table


def _apply(found: "Run", file: Path, output: Path | None, as_json: bool) -> None:
    """Write the targets with the decisions of a review."""
    from poprisk._core.store import writable_file
    from poprisk.risk import Decisions, check_targets_format, write_targets

    output = Path("corrected.npy") if output is None else output
    check_targets_format(output)
    decisions = Decisions.load(file)
    decisions.check_is_of(found)
    table = kept_table(found)
    given = found.problem.targets.cpu() if table is None else table.targets
    corrected = decisions.apply(given)
    writable_file(output)
    write_targets(output, given, corrected)
    changed, kept = decisions.changed, len(decisions.rows) - decisions.changed
    words = f"Changed {changed} of {decisions.examples} labels, kept {kept} that were in doubt, and wrote {output}"
    about = {"examples": decisions.examples, "changed": changed, "kept": kept, "output": output.as_posix()}
    show([words, *_train_next(found, output)], about, as_json)


def _train_next(found: "Run", output: Path) -> list[str]:
    """How to train on the corrected targets."""
    from poprisk.report import train_command

    place = found.path.as_posix() if found.path is not None else "run"
    command = train_command(found, path=f"{place}-corrected", labels=output.as_posix())
    return [f"Next: {command}" if command else "Next: train your model on these targets, in place of the given ones"]


def audit_lines(audited: "AuditTable", top: int, width: int) -> "Iterator[RenderableType]":
    """The estimated number of wrong labels, the most suspicious examples, and notes on what is approximate."""
    from rich.text import Text

    from poprisk._core.html import short
    from poprisk.report import as_command, headline
    from poprisk.risk import STILL_FALLING

    first = [line for line in audited.notes if line.startswith(STILL_FALLING)]
    for line in first:
        yield Text(f"{line[0].upper()}{line[1:]}.")
    yield Text(headline(audited), style="bold")
    if top:
        wanted = (*_SHOWN[audited.kind], "self_influence", "loo_loss")
        names = [name for name in wanted if name in audited.columns]
        rows = [[short(row[name]) for name in names] for row in audited.worst(top)]
        title = f"The {min(top, len(audited))} most suspicious examples, suspects first"
        yield from table(title, [_HEADINGS.get(name, name) for name in names], rows, width, named=False)
    for line in [line for line in audited.notes if line not in first]:
        yield Text(f"Note: {as_command(line)}.")


def _found(audited: "AuditTable", top: int) -> dict[str, Any]:
    return {
        "examples": len(audited),
        "kind": audited.kind,
        "wrong_labels": audited.wrong_labels.to_dict(),
        "suspects": int(audited.is_suspect.sum()),
        "moments": list(audited.moments),
        "notes": list(audited.notes),
        "worst": audited.worst(top),
    }
