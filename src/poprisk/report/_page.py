"""The report of a run: one self-contained page, assembled from its analysis."""

import inspect
import json
import os
import shlex
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from poprisk._core.store import write_text
from poprisk.errors import MissingExtraError
from poprisk.report._analysis import Analysis, analyze
from poprisk.report._example_table import table_data
from poprisk.report._kept_analysis import BUDGET, KeptAnalysis
from poprisk.report._sections import sections, summary_lines
from poprisk.report._svg_chart import number
from poprisk.report._window import CleanTargets
from poprisk.runs import OPTIMIZERS, Run


def run_report(
    run: Run,
    path: str | Path,
    *,
    budget: float = BUDGET,
    retrain: int = 0,
    examples: bool = True,
    clean: CleanTargets | None = None,
    kept: KeptAnalysis | None = None,
    command: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Analyse a run and write its report: one HTML file that needs no server and no network.

    Args:
        run: The run.
        path: The file.
        budget: Seconds on one CPU core, about, that each part of the analysis may take.
        retrain: How many trainings may be spent on the risk where the run alone cannot tell it; 0, or at least 3.
        examples: Whether the examples' contents (pictures, texts, values to predict) may be in it.
        clean: The targets without noise, where they are known; for the four cells of test error.
        kept: Finished parts of the analysis with the same options; the others are put there.
        command: What to say that the report was made with.
        progress: Called with the name of each part before it is computed.

    Raises:
        MissingExtraError: jinja2 is not installed.
        HyperparameterError: a budget that is not a number of seconds, or too few trainings.
        RunError: the run has no steps.
        DataError: clean targets that do not fit.
        OSError: the file cannot be written.
    """
    template = _template()  # before anything slow
    found = analyze(run, budget=budget, retrain=retrain, clean=clean, kept=kept, progress=progress)
    return write_text(path, _render(template, found, examples, command))


def report_page(found: Analysis, *, examples: bool = True, command: str | None = None) -> str:
    """The page of an analysis, as text.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    return _render(_template(), found, examples, command)


def require_template() -> None:
    """Refuses, before anything slow, where no page can be made.

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
        # A text must not end the script it is in.
        data=json.dumps(table, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        no_table=found.left_out.get("examples", ""),
        environment=_environment(found.run),
        commands=_commands(found, command),
    )


def _name(run: Run) -> str:
    problem = run.manifest["problem"]
    return "run" if problem is None else str(problem["name"])


def _facts(found: Analysis) -> list[tuple[str, str]]:
    """The first line of numbers."""
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
        label = "population risk" if found.risk.valid else "population risk (not valid)"
        facts.append((label, str(found.risk).partition(" (")[0]))
    return facts


def _environment(run: Run) -> list[tuple[str, str]]:
    """What numbers may depend on."""
    manifest = run.manifest
    rows = [("recorded", manifest["created"])]
    rows += [(name, str(value)) for name, value in manifest["environment"].items() if value is not None]
    numerics = manifest["numerics"]
    rows += [("device", numerics["device"]), ("seed of batches", str(manifest["seed"]))]
    rows += [("weights recorded", "at every step" if run.is_dense else f"every {manifest['every']} steps")]
    if isinstance(manifest["training"], dict):
        rows += [(name.replace("_", " "), str(value)) for name, value in manifest["training"].items()]
    for g, options in enumerate(run.options(0)):
        shown = ", ".join(f"{k} = {v}" for k, v in options.items() if v is not None)
        rows.append(("optimizer" if g == 0 else f"optimizer, group {g + 1}", shown))
    problem = manifest["problem"]
    if problem is not None:
        rows += [("data", ", ".join(f"{k} {v}" for k, v in problem["data"].items()))]
        rows += [("fingerprint of the data", problem["fingerprint"])]
    return rows


def _commands(found: Analysis, command: str | None) -> list[tuple[str, str]]:
    """How to have the page, and the run, again."""
    run = found.run
    where = "RUN" if run.path is None else run.path.as_posix()
    options = f" --retrain {found.retrain}" if found.retrain else ""
    rows = [("This page", command or f"poprisk report {shlex.quote(where)} --budget {found.budget:g}{options}")]
    again = training_call(run)
    return [*rows, ("This run, in Python", again)] if again else rows


def report_command(
    run: Path, output: Path, budget: float, retrain: int, examples: bool, clean: Path | None, problem: str | None
) -> str:
    """The command that makes this page again.

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
    """The call of ``poprisk.train`` that trains the same run again; empty where the record does not determine it.

    >>> import torch
    >>> from poprisk.runs import Problem
    >>> from poprisk.runs import train
    >>> x = torch.eye(2)
    >>> problem = Problem(torch.nn.Linear, "squared", x, x, arguments={"in_features": 2, "out_features": 2})
    >>> training_call(train(problem, torch.optim.SGD, 2, progress=False))
    ''
    """
    manifest = run.manifest
    problem, training = manifest["problem"], manifest["training"]
    source = None if problem is None else problem["source"]
    if source is None or source["path"] is None or not isinstance(training, dict) or "batch_size" not in training:
        return ""  # not a problem that can be built again, or a loop of the user's own
    groups = run.options(0)
    if len(groups) != 1 or groups != run.options(run.num_steps):
        return ""  # of a schedule only the values are known
    name = manifest["optimizer"]["name"]
    defaults = {k: p.default for k, p in inspect.signature(OPTIMIZERS[name].__init__).parameters.items()}
    kept = {k: tuple(v) if isinstance(v, list) else v for k, v in groups[0].items() if k in defaults}
    options = "".join(f", {k}={v!r}" for k, v in kept.items() if v != defaults[k])
    arguments = "".join(f", {k}={v!r}" for k, v in source["arguments"].items())
    extra = "".join(
        f", {k}={training[k]!r}" for k, usual in (("accumulate", 1), ("clip_norm", None)) if training.get(k) != usual
    )
    extra += f", every={manifest['every']}" if manifest["every"] != 1 else ""
    extra += ", dtype=torch.float64" if run.layout.dtype.itemsize == 8 else ""
    module, short = name.rpartition(".")[::2]
    return (
        "from functools import partial\n"
        + ("import torch\n" if "torch.float64" in extra else "")
        + f"from {module} import {short}\nfrom poprisk import Problem, train\n"
        f'problem = Problem.build("{_path(run, source)}"{arguments})\n'
        f"train(problem, partial({short}{options}), {run.num_steps}, batch_size={training['batch_size']}, "
        f'seed={manifest["seed"]}, path="again"{extra})'
    )


def _path(run: Run, source: dict[str, Any]) -> str:
    """Where the function is that makes the problem: of a script as seen from where the run is."""
    if "folder" not in source:
        return source["path"]
    where = Path(os.path.normpath((run.path or Path()) / source["folder"]))
    return (where / source["path"]).as_posix()
