"""``poprisk demo``: both optimizers on wrongly labelled digits, and the report of one of the runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from poprisk.cli._options import AsJson, examples, number
from poprisk.cli._outcome import interrupt_says
from poprisk.cli._output import show

if TYPE_CHECKING:
    from poprisk.cli._demonstration.study import DemoConfig

EXAMPLES = examples("poprisk demo", "poprisk demo --noise 0.2 --seeds 3 --output easier", "poprisk demo --no-report")


def demo(
    seeds: Annotated[
        int, number(1, 100, "How often to repeat everything, each time with other images, wrong labels and weights.")
    ] = 5,
    noise: Annotated[
        float, number(0.0, 0.9, "Noise level: the share of training labels replaced by a wrong one; 0.9 is chance.")
    ] = 0.4,
    size: Annotated[
        int, number(100, 1697, "How many of the 1797 digits to train on; the others are the test, their labels right.")
    ] = 1000,
    steps: Annotated[int, number(1, 1_000_000, "Optimizer steps of each training.")] = 500,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", help="Directory for result.json, demo.png, run and report.html; made if missing."
        ),
    ] = Path("poprisk-demo"),
    report: Annotated[
        bool,
        typer.Option("--report/--no-report", help="Record PopRiskAdamW's first run and write its report, or do not."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Train on wrongly labelled digits: PopRiskAdamW at its defaults beside AdamW over a grid of learning rates.

    Shows accuracy on clean test images at the last step and at the best one, and how many wrong labels were memorized;
    then writes the report of PopRiskAdamW's first run. Needs no download; the defaults take about two minutes on two
    cores.
    """
    from poprisk._core.store import load_result, writable_directory, write_figure

    directory = writable_directory(output)  # before anything slow
    from poprisk.cli._demonstration.figure import draw_demo
    from poprisk.cli._demonstration.study import KIND, OPTIMIZERS, DemoConfig, run_demo
    from poprisk.cli._progress import demo_progress, stdout
    from poprisk.cli._terminal import demo_lines

    config = DemoConfig(seeds=seeds, noise=noise, train_size=size, steps=steps)
    if report:
        _check_report(directory / "run")
    with demo_progress(OPTIMIZERS, config.steps) as progress:
        result = run_demo(config, progress)
    saved_at = result.save(directory / "result.json")
    saved = load_result(saved_at, KIND)
    files = [saved_at, write_figure(directory / "demo.png", draw_demo(saved))]
    if report:
        with interrupt_says(lambda: f"{' and '.join(file.name for file in files)} are in {directory}"):
            files.append(_write_report(config, directory))
    summary = saved["result"]["summary"]
    lines = [*demo_lines(saved, stdout().width), f"\nWrote {directory}: {', '.join(file.name for file in files)}"]
    if report:
        lines.append(f"What that run learned and memorized, in your browser: {files[-1]}")
    found = {key: summary[key] for key in ("headline", "sensitivity_line", "difference")}
    rows = [{k: v for k, v in row.items() if k != "curve"} for row in summary["rows"]]
    show(lines, {**found, "rows": rows, "files": [file.as_posix() for file in files]}, as_json)


def _check_report(run: Path) -> None:
    """What would stop the report is said before anything slow."""
    from poprisk.cli._demonstration.recorded import check_place
    from poprisk.report import require_template

    require_template()
    check_place(run)


def _write_report(config: "DemoConfig", directory: Path) -> Path:
    from poprisk.cli._demonstration.recorded import REPORT_TRAININGS, record_demo, report_budget
    from poprisk.cli._progress import part_progress
    from poprisk.report import PARTS, KeptAnalysis, report_command, run_report

    page, place = directory / "report.html", directory / "run"
    budget, retrain = report_budget(config), REPORT_TRAININGS
    run = record_demo(config, place)
    with part_progress("report", PARTS) as progress:
        return run_report(
            run,
            page,
            budget=budget,
            retrain=retrain,
            kept=KeptAnalysis(run, budget, retrain),
            command=report_command(place, page, budget, retrain, True, None, None),
            progress=progress,
        )
