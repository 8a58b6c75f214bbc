"""Write the report of a run: one self-contained HTML page, drawn from its analysis."""

import inspect
import json
import os
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

from poprisk._core.store import write_text
from poprisk.errors import MissingExtraError
from poprisk.optim import Gate, join_gate
from poprisk.report._analysis.analyze import Analysis, analyze
from poprisk.report._drawing.example_table import table_data
from poprisk.report._drawing.sections import sections
from poprisk.report._drawing.summary import size_of, summary_lines
from poprisk.report._drawing.svg_chart import number
from poprisk.runs import OPTIMIZERS, Run


def write_report(
    analysis: Analysis | Run, path: str | Path, *, examples: bool = True, command: str | None = None, **options: Any
) -> Path:
    """Write the report of a run: one HTML file that needs no server and no network.

    Args:
        analysis: What :func:`~poprisk.report.analyze` returned, or a run, which is then analyzed first.
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
    template = _template()  # before anything slow
    if isinstance(analysis, Run):
        analysis = analyze(analysis, **options)
    elif options:
        raise TypeError(f"{', '.join(options)}: pass these to analyze(…); write_report takes them with a run only")
    return write_text(path, _render(template, analysis, examples, command))


def report_page(found: Analysis, *, examples: bool = True, command: str | None = None) -> str:
    """The report as HTML text; see :func:`write_report`.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    return _render(_template(), found, examples, command)


def require_template() -> None:
    """Check, before anything slow, that a page can be written.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    _template()


def _template() -> Any:
    try:
        import jinja2
    except ImportError:
        raise MissingExtraError("jinja2", "report", "the report of a run") from None
    text = files("poprisk.report").joinpath("run_report.html").read_text(encoding="utf-8")
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(**options).from_string(text)


def _render(template: Any, found: Analysis, examples: bool, command: str | None) -> str:
    table = table_data(found, contents=examples)
    return template.render(
        title=_name(found.run),
        facts=_facts(found),
        summary=summary_lines(found),
        sections=sections(found),
        table=table,
        # No text may close the script element that contains it.
        data=json.dumps(table, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        no_table=found.left_out.get("examples", ""),
        environment=_environment(found.run),
        commands=_commands(found, command),
    )


def _name(run: Run) -> str:
    problem = run.manifest["problem"]
    return "run" if problem is None else str(problem["name"])


def _facts(found: Analysis) -> list[tuple[str, str]]:
    """The numbers at the top of the page."""
    run = found.run
    facts = [
        ("training examples", f"{run.num_examples}"),
        ("weights", f"{run.num_weights}"),
        ("steps", f"{run.num_steps}"),
        ("optimizer", run.manifest["optimizer"]["name"].rpartition(".")[2]),
    ]
    curves = found.curves
    if curves is not None:
        facts.append(("training loss", number(curves.train[-1])))
        if curves.test is not None:
            facts.append(("test loss", number(curves.test[-1])))
        if curves.test_accuracy is not None:
            facts.append(("test accuracy", f"{100 * curves.test_accuracy[-1]:.1f}%"))
    if found.risk is not None:
        label = "population risk" if found.run.kept is None else "population risk of the kept weights"
        facts.append((label if found.risk.valid else f"{label} (not valid)", size_of(found.risk)))
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
    where = "RUN" if run.path is None else run.path.as_posix()
    options = f" --retrain {found.retrain}" if found.retrain else ""
    rows = [("This page", command or f"poprisk report {shlex.quote(where)} --budget {found.budget:g}{options}")]
    again = training_call(run)
    return [*rows, ("This run, in Python", again)] if again else rows


def report_command(
    run: Path, output: Path, budget: float, retrain: int, examples: bool, clean: Path | None, problem: str | None
) -> str:
    """The command that writes this page.

    >>> report_command(Path("run 1"), Path("page.html"), 20.0, 0, False, None, None)
    "poprisk report 'run 1' --output page.html --budget 20 --no-examples"
    """
    words = ["poprisk", "report", run.as_posix(), "--output", output.as_posix(), "--budget", f"{budget:g}"]
    words += ["--retrain", str(retrain)] if retrain else []
    words += [] if examples else ["--no-examples"]
    words += [] if clean is None else ["--clean", clean.as_posix()]
    words += [] if problem is None else ["--problem", problem]
    return shlex.join(words)


def training_call(run: Run) -> str:
    """The call of ``poprisk.train`` that reproduces the run; empty if the record does not determine it.

    >>> import torch
    >>> from poprisk.runs import Problem, train
    >>> x = torch.eye(2)
    >>> problem = Problem(torch.nn.Linear, "squared", x, x, arguments={"in_features": 2, "out_features": 2})
    >>> training_call(train(problem, torch.optim.SGD, 2, progress=False))
    ''
    """
    manifest = run.manifest
    problem, training = manifest["problem"], manifest["training"]
    source = None if problem is None else problem["source"]
    if source is None or source["path"] is None or not isinstance(training, dict) or "batch_size" not in training:
        return ""  # a problem that cannot be rebuilt, or the user's own training loop
    groups = run.options(0)
    if len(groups) != 1 or groups != run.options(run.num_steps) or "refit" in training:
        return ""  # a schedule, of which only the values are known
    name = manifest["optimizer"]["name"]
    defaults = {k: p.default for k, p in inspect.signature(OPTIMIZERS[name].__init__).parameters.items()}
    given = join_gate(groups[0]) if "gate" in groups[0] else groups[0]
    kept = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in defaults}
    kept = {k: v for k, v in kept.items() if v not in (defaults[k], Gate())}
    options = "".join(f", {k}={v!r}" for k, v in kept.items())
    arguments = "".join(f", {k}={v!r}" for k, v in source["arguments"].items())
    extra = "".join(
        f", {k}={training[k]!r}" for k, usual in (("accumulate", 1), ("clip_norm", None)) if training.get(k) != usual
    )
    if held := training.get("hold_back"):
        extra += f", hold_back={held['share']!r}, tail={held['tail']!r}"
    extra += f", every={manifest['every']}" if manifest["every"] != 1 else ""
    extra += ", dtype=torch.float64" if run.layout.dtype.itemsize == 8 else ""
    module, short = name.rpartition(".")[::2]
    gate = "Gate, " * isinstance(kept.get("gate"), Gate)
    return (
        "from functools import partial\n"
        + ("import torch\n" if "torch.float64" in extra else "")
        + f"from {module} import {short}\nfrom poprisk import {gate}Problem, train\n"
        f'problem = Problem.build("{_path(run, source)}"{arguments})\n'
        f"train(problem, partial({short}{options}), {run.num_steps}, batch_size={training['batch_size']}, "
        f'seed={manifest["seed"]}, path="again"{extra})'
    )


def _path(run: Run, source: dict[str, Any]) -> str:
    """Path of the function that makes the problem; for a script, relative to the run's directory."""
    if "folder" not in source:
        return source["path"]
    where = Path(os.path.normpath((run.path or Path()) / source["folder"]))
    return (where / source["path"]).as_posix()
