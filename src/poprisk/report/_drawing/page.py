"""Write the report of a run: one self-contained HTML page, drawn from its analysis."""

from pathlib import Path
from typing import Any

from poprisk._core.store import write_text
from poprisk._core.text import first_line
from poprisk.errors import DataError, PopRiskError
from poprisk.report._analysis.analyze import Analysis, analyze
from poprisk.report._drawing.advice import actions, judgement, numbers
from poprisk.report._drawing.commands import training_call, with_command
from poprisk.report._drawing.example_table import table_data
from poprisk.report._drawing.first_screen import facts_of
from poprisk.report._drawing.sections import sections
from poprisk.report._drawing.summary import summary_lines
from poprisk.report._drawing.svg_chart import number
from poprisk.report._drawing.templates import render, require_template
from poprisk.runs import Run


def write_report(
    analysis: Analysis | Run | str | Path,
    path: str | Path,
    *,
    examples: bool = True,
    command: str | None = None,
    **options: Any,
) -> Path:
    """Write the report of a run: one HTML file that needs no server and no network.

    Args:
        analysis: What :func:`~poprisk.report.analyze` returned, or a run or its directory, to be analyzed first.
        path: The file to write. It is replaced in one go, so it is never incomplete.
        examples: Whether to include the contents of the examples (pictures, texts, values to predict).
        command: The command that the page names as the one that wrote it.
        options: Options of :func:`~poprisk.report.analyze`, such as ``budget``; only if a run is given.

    Returns:
        The path of the file.

    Raises:
        MissingExtraError: jinja2 is not installed.
        TypeError: ``options`` are given together with an analysis.
        OSError: The file cannot be written.

    >>> import tempfile, torch
    >>> from poprisk import Problem, analyze, train, write_report
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(4).repeat(4, 1), torch.ones(16, 1),
    ...                   arguments={"in_features": 4, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.2), steps=9, progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_report(analyze(run, progress=False), f"{folder}/report.html").name
    'report.html'
    """
    require_template()  # before anything slow
    if not isinstance(analysis, Analysis):
        analysis = analyze(analysis, **options)
    elif options:
        raise TypeError(f"{', '.join(options)}: pass these to analyze(…); write_report takes them with a run only")
    return write_text(path, report_page(analysis, examples=examples, command=command))


def report_page(found: Analysis, *, examples: bool = True, command: str | None = None) -> str:
    """The report as HTML text; see :func:`write_report`. A DataError if a part kept with the run is damaged."""
    try:
        return _drawn(found, examples, command)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        if isinstance(error, PopRiskError) or found.run.path is None:
            raise
        kept = f"the analysis kept in {found.run.path} cannot be drawn ({first_line(error)})"
        again = "compute it again with poprisk analyze RUN --again; if that does not help, please report it as a bug"
        raise DataError(f"{kept}: {again}") from error


def _drawn(found: Analysis, examples: bool, command: str | None) -> str:
    table, parts, facts = table_data(found, contents=examples), sections(found), facts_of(found)
    return render(
        "report.html",
        () if table is None else ("examples.js", "review.js"),
        data=table,
        title=_name(found.run),
        facts=_facts(found),
        judgement=judgement(facts),
        numbers=numbers(facts),
        actions=[with_command(found.run, action) for action in actions(facts)],
        summary=summary_lines(found),
        sections=[part for part in parts if not part.missing],
        missing=[part for part in parts if part.missing],
        table=table,
        no_table=found.left_out.get("examples", ""),
        environment=_environment(found.run),
        commands=_commands(found, command),
    )


def _name(run: Run) -> str:
    problem = run.manifest["problem"]
    if problem is not None and problem["name"] != "problem":  # what a problem is called if it was given no name
        return str(problem["name"])
    return "A training run" if run.path is None else run.path.as_posix()


def _facts(found: Analysis) -> list[tuple[str, str]]:
    """The numbers at the top of the page."""
    run = found.run
    facts = [
        ("training examples", f"{run.num_examples}"),
        ("weights", f"{run.num_weights}"),
        ("steps", f"{run.num_steps}"),
        ("optimizer", run.manifest["optimizer"]["name"].rpartition(".")[2]),
    ]
    curves, last = found.curves, "" if run.kept is None else ", last step"
    if curves is None:
        return facts
    if curves.kept is not None:
        if curves.kept[2] is not None:
            facts.append(("test accuracy, kept weights", f"{100 * curves.kept[2]:.1f}%"))
        facts.append(("test loss, kept weights", number(curves.kept[0])))
    if curves.test_accuracy is not None:
        facts.append((f"test accuracy{last}", f"{100 * curves.test_accuracy[-1]:.1f}%"))
    if curves.test is not None:
        facts.append((f"test loss{last}", number(curves.test[-1])))
    name = "training loss" if run.kept is None else "loss of all examples, last step"
    facts.append((name, number(curves.train[-1])))
    return facts


def _environment(run: Run) -> list[tuple[str, str]]:
    """What the numbers may depend on."""
    manifest = run.manifest
    rows = [("recorded", manifest["created"])]
    rows += [(name, str(value)) for name, value in manifest["environment"].items() if value is not None]
    numerics = manifest["numerics"]
    rows += [("device", numerics["device"]), ("seed for the batches", str(manifest["seed"]))]
    rows += [("weights recorded", "at every step" if run.is_dense else f"every {manifest['every']} steps")]
    if isinstance(manifest["training"], dict):
        rows += [(name.replace("_", " "), str(value)) for name, value in manifest["training"].items()]
    for g, options in enumerate(run.options(0)):
        shown = ", ".join(f"{k} = {v}" for k, v in options.items() if v is not None)
        rows.append(("optimizer" if g == 0 else f"optimizer, group {g + 1}", shown))
    problem = manifest["problem"]
    if problem is not None:
        rows += [("data", ", ".join(f"{k} {v}" for k, v in problem["data"].items()))]
        rows += [("data fingerprint", problem["fingerprint"])]
    return rows


def _commands(found: Analysis, command: str | None) -> list[tuple[str, str]]:
    """How to reproduce the page and the run."""
    run = found.run
    options = f" --retrain {found.retrain}" if found.retrain else ""
    rows = [("This page", command or f"poprisk report {facts_of(found).run} --budget {found.budget:g}{options}")]
    again = training_call(run)
    return [*rows, ("This run, in Python", again)] if again else rows
