"""The command line: parse, run, save, draw; whatever goes wrong is one line and an exit code."""

import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from poprisk import __version__
from poprisk.errors import DataError, HyperparameterError, PopRiskError, RunError
from poprisk.report.reproductions import ALL, DATA, Reproduction, chosen_names, known, reproduction

EXIT_WRONG, EXIT_INTERRUPTED = 2, 130

app = typer.Typer(
    name="poprisk",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# typer brings click along or inside, depending on its version; its errors have this base in either case.
_CommandLineError: type[Exception] = next(b for b in typer.BadParameter.__mro__ if b.__name__ == "ClickException")


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"poprisk {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train on population risk instead of training loss."""


def _between(low: Any, high: Any) -> Callable[[Any], Any]:
    """Parses a number of the kind of ``low``; a wrong one is answered with what was expected and what came."""
    kind, words = (int, "a whole number") if isinstance(low, int) else (float, "a number")

    def parse(given: Any) -> Any:
        try:
            value = kind(given)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise typer.BadParameter(f"expected {words} from {low} to {high}, got {given}")
        return value

    return parse


def _number(low: Any, high: Any, explanation: str) -> Any:
    return typer.Option(parser=_between(low, high), metavar=f"{low}…{high}", help=explanation)


@app.command()
def demo(
    seeds: Annotated[
        int, _number(1, 100, "How often to repeat everything, each time with other images, wrong labels and weights.")
    ] = 5,
    noise: Annotated[
        float, _number(0.0, 0.9, "Noise level: the share of training labels replaced by a wrong one; 0.9 is chance.")
    ] = 0.4,
    size: Annotated[
        int, _number(100, 1697, "How many of the 1797 digits to train on; the others are the test, their labels right.")
    ] = 1000,
    steps: Annotated[int, _number(1, 1_000_000, "Optimizer steps of each training.")] = 500,
    output: Annotated[Path, typer.Option(help="Directory for result.json and demo.png; made if missing.")] = Path(
        "poprisk-demo"
    ),
) -> None:
    """Train on wrongly labelled digits: PopRiskAdamW at its defaults beside AdamW over a grid of learning rates.

    Shows accuracy on clean test images at the last step and at the best one, and how many wrong labels were memorized.
    Needs no download; the defaults take a minute or two on two cores.
    """
    from poprisk.store import load_result, writable_directory, write_figure

    directory = writable_directory(output)  # before anything slow
    from poprisk.experiments.demo import KIND, OPTIMIZERS, DemoConfig, run_demo
    from poprisk.report.demo import draw_demo
    from poprisk.report.progress import demo_progress, stdout
    from poprisk.report.terminal import demo_lines

    config = DemoConfig(seeds=seeds, noise=noise, train_size=size, steps=steps)
    with demo_progress(OPTIMIZERS, config.steps) as progress:
        result = run_demo(config, progress)
    saved_at = result.save(directory / "result.json")
    saved = load_result(saved_at, KIND)
    figure_at = write_figure(directory / "demo.png", draw_demo(saved))
    console = stdout()
    for line in demo_lines(saved, console.width):
        console.print(line)
    console.print(f"\nWrote {directory}: {saved_at.name}, {figure_at.name}", highlight=False, soft_wrap=True)


def _known_experiments() -> str:
    return "\n\n".join(f"{name}: {claim}." for name, claim in known().items())


@app.command(epilog=f"Experiments by NAME:\n\n{_known_experiments()}")
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help=f"One of: {', '.join(known())}; or all, in turn.", show_default=False),
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few seconds each; the numbers mean nothing.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Directory for NAME.json, NAME.png and NAME.pdf; made if missing. Default: poprisk-NAME."),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Directory with the data sets that an experiment needs, each in a folder of its own; --smoke reads "
            f"none. Default: {DATA}.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run one of the paper's experiments again, and write what came out of it with its figure.

    Comparisons of optimizers keep what is done in NAME.parts beside their result: started again, they go on from there.
    With all, each has a folder of its own, and an experiment whose data are missing is skipped.
    """
    names = chosen_names(name)
    if name == ALL:
        raise typer.Exit(_reproduce_all(names, smoke, output or Path(f"poprisk-{ALL}"), data))
    _reproduce(names[0], smoke, output or Path(f"poprisk-{names[0]}"), data)


def _reproduce_all(names: list[str], smoke: bool, output: Path, data: Path | None) -> int:
    """Each in turn, whatever becomes of the others. Returns the exit code: missing data alone are no failure."""
    from poprisk.store import writable_directory

    writable_directory(output)  # one line for all of them
    code, done = 0, []
    for name in names:
        try:
            files = reproduction(name).files
            missing = None if smoke or files is None else files.missing(data or DATA)
            if missing is None:
                _reproduce(name, smoke, output / name, data if files else None)
                done.append(name)
            else:
                typer.echo(f"poprisk: skipped {name}: {missing}", err=True)
        except (PopRiskError, OSError) as error:
            code = _fail(f"{name}: {error}")
        except (KeyboardInterrupt, _Interrupted) as interrupt:
            kept = [f"{', '.join(done)} can be found in {output}"] if done else []
            raise _Interrupted("; ".join([*kept, str(interrupt)] if str(interrupt) else kept)) from None
    return code


def _reproduce(name: str, smoke: bool, output: Path, data: Path | None) -> None:
    chosen = reproduction(name)  # where a package is missing, before a directory is made
    from poprisk.store import load_result, writable_directory, write_figure

    config = _configured(name, chosen, smoke, data)
    directory = writable_directory(output)  # before anything slow
    from poprisk.report.job_progress import job_progress
    from poprisk.report.progress import stdout

    parts = directory / f"{name}.parts"
    with _parts_kept(parts):
        with job_progress(name) as progress:
            result = chosen.run(config, progress, parts) if chosen.resumable else chosen.run(config, progress)
        files = [result.save(directory / f"{name}.json")]
        saved = load_result(files[0], chosen.kind)
        figure = chosen.draw(saved)
        files += [write_figure(directory / f"{name}.{kind}", figure) for kind in ("png", "pdf")]
    shutil.rmtree(parts, ignore_errors=True)  # the result holds it all
    console = stdout()
    for line in chosen.lines(saved):
        console.print(line)
    names = ", ".join(file.name for file in files)
    console.print(f"\nWrote {directory}: {names}", highlight=False, soft_wrap=True)


def _configured(name: str, chosen: Reproduction, smoke: bool, data: Path | None) -> Any:
    """The configuration asked for; refused at once if data are missing, or given where none are read."""
    if data is not None and chosen.with_data is None:
        raise HyperparameterError(f"{name} reads no data, got --data {data}: leave it out")
    if smoke:
        return chosen.smoke
    missing = None if chosen.files is None else chosen.files.missing(data or DATA)
    if missing is not None:
        raise DataError(f"{missing}, or name another directory with --data")
    return chosen.full if data is None or chosen.with_data is None else chosen.with_data(chosen.full, data.as_posix())


class _Interrupted(Exception):
    """The user stopped the command; the message says what is on disk."""


@contextmanager
def _parts_kept(parts: Path) -> Iterator[None]:
    """An interrupt inside says that what is finished was kept, if it was."""
    try:
        yield
    except KeyboardInterrupt:
        if not any(parts.glob("*.json")):
            raise
        raise _Interrupted(f"what is finished is kept in {parts} and will be used again") from None


@app.command()
def audit(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a recorded run.")],
    output: Annotated[
        Path | None, typer.Option(help="Write the whole table here: a .csv or .parquet file.", show_default=False)
    ] = None,
    top: Annotated[int, _number(0, 100_000, "How many of the most suspicious examples to print.")] = 20,
    moments: Annotated[int, _number(1, 10_000, "At how many moments of the training to evaluate the network.")] = 20,
    tier: Annotated[str, typer.Option(help="any, exact (self-influence and more, where possible) or auto.")] = "auto",
    problem: Annotated[
        str | None,
        typer.Option(help="package.module:function that makes the problem, where the run cannot rebuild it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")] = False,
) -> None:
    """Say which training labels of a recorded run are probably wrong, and what they should be.

    Works on any run whose problem is known; what is approximate is said in notes. Nothing is trained again.
    """
    from poprisk.audit import audit as audit_run
    from poprisk.audit.table import check_format
    from poprisk.problems import Problem
    from poprisk.report.audit import audit_json, audit_lines
    from poprisk.report.progress import stdout
    from poprisk.runs import Run
    from poprisk.store import writable_directory

    if output is not None:
        check_format(output)
        writable_directory(output.parent)  # before anything slow
    opened = Run.load(run, problem=None if problem is None else Problem.build(problem))
    try:
        _ = opened.problem
    except RunError as error:
        raise RunError(f"{error}; on the command line: --problem package.module:function") from None
    table = audit_run(opened, tier=tier, moments=moments)  # type: ignore[arg-type]  # checked there
    if output is not None:
        table.save(output)
    if as_json:
        typer.echo(audit_json(table, top))
        return
    console = stdout()
    for line in audit_lines(table, top, console.width):
        console.print(line)
    if output is not None:
        console.print(f"Wrote {output}", highlight=False, soft_wrap=True)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a recorded run.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page to write, one HTML file.")] = Path(
        "poprisk-report.html"
    ),
    budget: Annotated[
        float,
        _number(0.1, 1e6, "Seconds on one CPU core, about, that each part may take; dearer ones are left out."),
    ] = 30.0,
    retrain: Annotated[
        int,
        _number(
            0, 100, "Trainings that may be spent on the risk where the run alone cannot tell it: 0, or at least 3."
        ),
    ] = 0,
    examples: Annotated[
        bool,
        typer.Option("--examples/--no-examples", help="Show pictures and texts of the examples, or leave them out."),
    ] = True,
    clean: Annotated[
        Path | None,
        typer.Option(
            help="The targets without noise, for the four cells of test error: a .npz file with train and test.",
            show_default=False,
        ),
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(help="package.module:function that makes the problem, where the run cannot rebuild it."),
    ] = None,
) -> None:
    """Write what a recorded run says about itself: one HTML page that needs no server and no network.

    What was memorized, the risk on new data, labels that look wrong, gates, spectra, drift, and every example in a
    table to sort and filter. Parts that are too dear for the budget say what they would take. Nothing is trained again
    without --retrain.
    """
    from poprisk.experiments.run_window import CleanTargets
    from poprisk.problems import Problem
    from poprisk.report.run_report import report_command, run_report
    from poprisk.runs import Run
    from poprisk.store import writable_directory

    if output.is_dir():
        raise DataError(
            f"--output must be a file, got the directory {output}: name the page, e.g. {output}/report.html"
        )
    writable_directory(output.parent)  # before anything slow
    opened = Run.load(run, problem=None if problem is None else Problem.build(problem))
    written = run_report(
        opened,
        output,
        budget=budget,
        retrain=retrain,
        examples=examples,
        clean=None if clean is None else CleanTargets.load(clean),
        command=report_command(run, output, budget, retrain, examples, clean, problem),
        progress=lambda part: typer.echo(f"poprisk: looking at: {part}", err=True),
    )
    typer.echo(f"Wrote {written}: open it in a browser")


@app.command()
def explore(
    output: Annotated[Path, typer.Option(help="The page to write, one HTML file.")] = Path("poprisk-explore.html"),
    kernel: Annotated[
        Path | None,
        typer.Option(
            help="Your own kernel: a .npz file with K_SS, K_QS and signal (the clean targets), perhaps truth (at the "
            "test inputs). Default: a built-in one.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a page to play with: sliders for noise, capacity, ridge and time move the filter and the risk of a kernel.

    One HTML file that needs no server and no network; open it in a browser.
    """
    from poprisk.experiments.explorable import builtin_kernel, kernel_from_file
    from poprisk.report.explore import explore_page
    from poprisk.store import write_text

    chosen = builtin_kernel() if kernel is None else kernel_from_file(kernel)
    typer.echo(f"Wrote {write_text(output, explore_page(chosen))}: open it in a browser")


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of the ``poprisk`` command."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    kept = ""
    try:
        code: Any = app(arguments, standalone_mode=False)
    except _CommandLineError as error:
        return _fail(error.format_message())  # type: ignore[attr-defined]
    except (PopRiskError, OSError) as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort, _Interrupted) as interrupt:
        kept, code = str(interrupt), EXIT_INTERRUPTED
    if code == EXIT_INTERRUPTED:
        typer.echo(f"poprisk: interrupted; {kept or 'nothing was written'}", err=True)
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    """One line, whatever the message was made of; none where the help was the answer."""
    if message.strip():
        typer.echo(f"poprisk: error: {' '.join(message.split())}", err=True)
    return EXIT_WRONG


if __name__ == "__main__":
    main()
