"""Write the report of a run: one self-contained HTML page, drawn from its analysis."""

import inspect
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from poprisk._core.store import write_text
from poprisk.optim import Gate, join_gate
from poprisk.report._analysis.analyze import Analysis, analyze
from poprisk.report._drawing.advice import Action, actions, judgement, numbers
from poprisk.report._drawing.example_table import table_data
from poprisk.report._drawing.first_screen import facts_of
from poprisk.report._drawing.sections import sections
from poprisk.report._drawing.summary import summary_lines
from poprisk.report._drawing.svg_chart import number
from poprisk.report._drawing.templates import render, require_template
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
    require_template()  # before anything slow
    if isinstance(analysis, Run):
        analysis = analyze(analysis, **options)
    elif options:
        raise TypeError(f"{', '.join(options)}: pass these to analyze(…); write_report takes them with a run only")
    return write_text(path, report_page(analysis, examples=examples, command=command))


def report_page(found: Analysis, *, examples: bool = True, command: str | None = None) -> str:
    """The report as HTML text; see :func:`write_report`.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    table, parts, facts = table_data(found, contents=examples), sections(found), facts_of(found)
    return render(
        "report.html",
        () if table is None else ("examples.js", "review.js"),
        data=table,
        title=_name(found.run),
        facts=_facts(found),
        judgement=judgement(facts),
        numbers=numbers(facts),
        actions=[_with_command(found.run, action) for action in actions(facts)],
        summary=summary_lines(found),
        sections=[part for part in parts if not part.missing],
        missing=[part for part in parts if part.missing],
        table=table,
        no_table=found.left_out.get("examples", ""),
        environment=_environment(found.run),
        commands=_commands(found, command),
    )


def _with_command(run: Run, action: Action) -> Action:
    """The action with the call of ``train`` that it asks for, or its change in words for a loop of the user's own."""
    if action.call is None:
        return action
    name, changes = action.call
    text = training_call(run, path=name, **changes)  # type: ignore[arg-type]
    if text:
        return replace(action, command=text.rpartition("\n")[2])
    words = {
        "steps": "train for {} steps instead of " + str(run.num_steps),
        "lr": "multiply the learning rate by {}",
        "hold_back": "hold back a share of {} with poprisk.hold_back and poprisk.KeepBest",
    }
    return replace(
        action, command="# in your training loop: " + ", ".join(words[k].format(v) for k, v in changes.items())
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
    curves, last = found.curves, "" if run.kept is None else ", last step"
    if curves is not None:
        facts.append((f"training loss{last}", number(curves.train[-1])))
        if curves.test is not None:
            facts.append((f"test loss{last}", number(curves.test[-1])))
        if curves.test_accuracy is not None:
            facts.append((f"test accuracy{last}", f"{100 * curves.test_accuracy[-1]:.1f}%"))
    if curves is not None and curves.kept is not None:
        facts.append(("test loss, kept weights", number(curves.kept[0])))
        if curves.kept[2] is not None:
            facts.append(("test accuracy, kept weights", f"{100 * curves.kept[2]:.1f}%"))
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


def training_call(
    run: Run, *, steps: int | None = None, lr: float = 1.0, hold_back: float | None = None, path: str = "again"
) -> str:
    """The call of ``poprisk.train`` that reproduces the run; empty if the record does not determine it.

    Args:
        run: The run.
        steps: Another number of steps.
        lr: Factor for the learning rate.
        hold_back: Another share of examples to hold back.
        path: Directory of the new run.

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
    if not all(name.isidentifier() for name in source["arguments"]):
        return ""  # made by hand: no code to be copied comes of it
    groups = run.options(0)
    if len(groups) != 1 or groups != run.options(run.num_steps) or "refit" in training:
        return ""  # a schedule, of which only the values are known
    name = manifest["optimizer"]["name"]
    defaults = {k: p.default for k, p in inspect.signature(OPTIMIZERS[name].__init__).parameters.items()}
    given = join_gate(groups[0]) if "gate" in groups[0] else groups[0]
    kept: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if k in defaults}
    kept |= {"lr": float(f"{kept['lr'] * lr:.6g}")} if "lr" in kept and lr != 1 else {}
    kept = {k: v for k, v in kept.items() if v not in (defaults[k], Gate())}
    options = "".join(f", {k}={v!r}" for k, v in kept.items())
    arguments = "".join(f", {k}={v!r}" for k, v in source["arguments"].items())
    extra = "".join(
        f", {k}={training[k]!r}" for k, usual in (("accumulate", 1), ("clip_norm", None)) if training.get(k) != usual
    )
    if held := training.get("hold_back"):
        extra += f", hold_back={hold_back or held['share']!r}, tail={held['tail']!r}"
    elif hold_back is not None:
        extra += f", hold_back={hold_back!r}"
    extra += f", every={manifest['every']}" if manifest["every"] != 1 else ""
    extra += ", dtype=torch.float64" if run.layout.dtype.itemsize == 8 else ""
    module, short = name.rpartition(".")[::2]
    gate = "Gate, " * isinstance(kept.get("gate"), Gate)
    return (
        "from functools import partial\n"
        + ("import torch\n" if "torch.float64" in extra else "")
        + f"from {module} import {short}\nfrom poprisk import {gate}Problem, train\n"
        f"problem = Problem.build({_path(run, source)!r}{arguments})\n"
        f"train(problem, partial({short}{options}), {steps or run.num_steps}, batch_size={training['batch_size']}, "
        f'seed={manifest["seed"]}, path="{path}"{extra})'
    )


def _path(run: Run, source: dict[str, Any]) -> str:
    """Path of the function that makes the problem; for a script, relative to the run's directory."""
    if source.get("folder") is None:
        return source["path"]
    where = Path(os.path.normpath((run.path or Path()) / source["folder"]))
    return (where / source["path"]).as_posix()
