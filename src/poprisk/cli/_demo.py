"""``poprisk demo``: train on digits with wrong labels, with and without KeepBest, and write the report of a run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poprisk.cli._analyze import analyzed
from poprisk.cli._options import AsJson, examples, number
from poprisk.cli._outcome import interrupt_says
from poprisk.cli._output import show, stdout, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from poprisk.cli._demonstration.study import DemoConfig

_NARROW = 64
_COLUMNS = {"last": "at the end", "best": "best step", "memorized": "wrong labels memorized"}
EXAMPLES = examples("poprisk demo", "poprisk demo --noise 0.2 --seeds 3 --output easier", "poprisk demo --no-report")


def demo(
    seeds: Annotated[
        int, number(1, 100, "Number of repetitions, each with other images, wrong labels and initial weights.")
    ] = 5,
    noise: Annotated[
        float,
        number(0.0, 0.9, "Noise level: share of training labels that are replaced by a wrong one; 0.9 is chance."),
    ] = 0.4,
    size: Annotated[
        int,
        number(100, 1697, "Number of training images out of 1797; the others, correctly labelled, are the test set."),
    ] = 1000,
    steps: Annotated[int, number(1, 1_000_000, "Number of optimizer steps in each training.")] = 500,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Directory for result.json, demo.png, run and report.html; created if needed."
        ),
    ] = Path("poprisk-demo"),
    report: Annotated[
        bool,
        typer.Option("--report/--no-report", help="Whether to record the first run of AdamW and write its report."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Compare AdamW with and without KeepBest over a grid of learning rates, on digits with wrong labels.

    KeepBest holds 5% of the training images back and ends training with the averaged weights that do best on them.
    Prints the accuracy on correctly labelled test images at the end and at the best step, and how many wrong labels
    were memorized; then writes the report of the first run of AdamW. Needs no download, and takes about two
    minutes on two cores.
    """
    from poprisk._core.progress import Progress
    from poprisk._core.store import load_result, writable_directory, write_figure

    directory = writable_directory(output)  # before anything slow
    from poprisk.cli._demonstration.figure import draw_demo
    from poprisk.cli._demonstration.study import ADAMW, KEPT, KIND, DemoConfig, run_demo

    config = DemoConfig(seeds=seeds, noise=noise, train_size=size, steps=steps)
    if report:
        _check_report(directory / "run")
    with Progress((ADAMW, KEPT), config.steps, counted="step {done} of {total}") as progress:
        told = lambda name, step, accuracy: progress.update(step, f"test accuracy {accuracy:.1%}", name=name)  # noqa: E731
        result = run_demo(config, told)
    saved_at = result.save(directory / "result.json")
    saved = load_result(saved_at, KIND)
    files = [saved_at, write_figure(directory / "demo.png", draw_demo(saved))]
    if report:
        with interrupt_says(lambda: f"{' and '.join(file.name for file in files)} are in {directory}"):
            files.append(_write_report(config, directory))
    summary = saved["result"]["summary"]
    lines = [*demo_lines(saved, stdout().width), f"\nWrote {directory}: {', '.join(file.name for file in files)}"]
    if report:
        lines.append(f"To see what that run learned and memorized, open in your browser: {files[-1]}")
    found = {key: summary[key] for key in ("headline", "sensitivity_line", "difference")}
    rows = [{k: v for k, v in row.items() if k != "curve"} for row in summary["rows"]]
    show(lines, {**found, "rows": rows, "files": [file.as_posix() for file in files]}, as_json)


def _check_report(run: Path) -> None:
    """Fail before anything slow if the report could not be written."""
    from poprisk.cli._demonstration.recorded import check_place
    from poprisk.report import require_template

    require_template()
    check_place(run)


def _write_report(config: "DemoConfig", directory: Path) -> Path:
    from poprisk.cli._demonstration.recorded import REPORT_TRAININGS, record_demo, report_budget
    from poprisk.report import KeptAnalysis, report_command, write_report

    page, place = directory / "report.html", directory / "run"
    budget, retrain = report_budget(config), REPORT_TRAININGS
    run = record_demo(config, place)
    command = report_command(place, page, budget, retrain, True, None, None)
    return write_report(analyzed(run, KeptAnalysis(run, budget, retrain)), page, command=command)


def demo_lines(saved: Mapping[str, Any], width: int) -> "Iterator[RenderableType]":
    """The table of results, the headline, and how much the learning rate matters."""
    from rich.text import Text

    summary, seeds = saved["result"]["summary"], saved["config"]["seeds"]
    error = f"mean ± standard error over {seeds} seeds" if seeds > 1 else "one seed"
    title = f"Digits with {saved['result']['wrong_share']:.0%} of the labels wrong: test accuracy in % ({error})"
    rows = [(row["label"], *(_percent(row[key]) for key in _COLUMNS)) for row in summary["rows"]]
    yield from table(title, ("recipe", *_COLUMNS.values()), rows, width, narrow=_NARROW)
    yield ""
    yield Text(summary["headline"], style="bold")
    if summary["sensitivity_line"]:
        yield Text(summary["sensitivity_line"])


def _percent(mean: Mapping[str, Any] | None) -> str:
    if mean is None:
        return "–"
    value = f"{100 * mean['value']:.1f}"
    return value if mean["standard_error"] is None else f"{value} ± {100 * mean['standard_error']:.1f}"
