"""``poprisk reproduce``: run the paper's experiments again."""

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from poprisk.cli._options import AsJson, examples
from poprisk.cli._outcome import Interrupted, fail, interrupt_says, note
from poprisk.cli._output import show
from poprisk.errors import DataError, HyperparameterError, PopRiskError
from poprisk_lab.reproductions import ALL, DATA, Reproduction, chosen_names, known, reproduction
from poprisk_lab.scheduler import on_scheduler


def _known_experiments() -> str:
    return "\n\n".join(f"{name}: {claim}." for name, claim in known().items())


EXAMPLES = (
    examples("poprisk reproduce coupling", "poprisk reproduce labels --data data", "poprisk reproduce all --smoke")
    + f"\n\nExperiments by NAME:\n\n{_known_experiments()}"
)


def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help=f"One of: {', '.join(known())}; or all, in turn.", show_default=False),
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run at a tiny size, a few seconds each; the numbers mean nothing.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Directory for NAME.json, NAME.png and NAME.pdf; made if missing. Default: poprisk-NAME.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Directory with the data sets, each in a folder of its own; not needed with --smoke. "
            f"Default: {DATA}.",
            show_default=False,
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="Address of a Dask scheduler, whose workers train the stacks of comparisons.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run one of the paper's experiments again, and write its result and its figure.

    Comparisons of optimizers keep finished parts in NAME.parts next to the result; if interrupted, run the same command
    to continue. With all, every experiment gets its own folder, and those whose data are missing are skipped.
    """
    names = chosen_names(name)
    with on_scheduler(scheduler):
        if name == ALL:
            raise typer.Exit(_reproduce_all(names, smoke, output or Path(f"poprisk-{ALL}"), data, as_json))
        lines, found = _reproduce(names[0], smoke, output or Path(f"poprisk-{names[0]}"), data)
        show(lines, found, as_json)


def _reproduce_all(names: list[str], smoke: bool, output: Path, data: Path | None, as_json: bool) -> int:
    """Each in turn, whatever becomes of the others. Returns the exit code: missing data alone are no failure."""
    from poprisk._core.store import writable_directory

    writable_directory(output)  # one line for all of them
    code, done, skipped, failed = 0, [], {}, {}
    for name in names:
        try:
            files = reproduction(name).files
            missing = None if smoke or files is None else files.missing(data or DATA)
            if missing is None:
                lines, found = _reproduce(name, smoke, output / name, data if files else None)
                done.append(found)
                if not as_json:
                    show(lines, {}, False)
            else:
                skipped[name] = missing
                note(f"skipped {name}: {missing}")
        except (PopRiskError, OSError) as error:
            failed[name] = str(error)
            code = fail(f"{name}: {error}")
        except (KeyboardInterrupt, Interrupted) as interrupt:
            there = [f"{', '.join(one['name'] for one in done)} can be found in {output}"] if done else []
            raise Interrupted("; ".join([*there, str(interrupt)] if str(interrupt) else there)) from None
    if as_json:
        show([], {"experiments": done, "skipped": skipped, "failed": failed}, True)
    return code


def _reproduce(name: str, smoke: bool, output: Path, data: Path | None) -> tuple[list[Any], dict[str, Any]]:
    """Runs and saves one. Returns what to print, and the same for programs."""
    chosen = reproduction(name)  # where a package is missing, before a directory is made
    from poprisk._core.store import load_result, write_figure

    files = [run_study(name, smoke, output, data)]
    directory = files[0].parent
    saved = load_result(files[0], chosen.kind)
    figure = chosen.draw(saved)
    files += [write_figure(directory / f"{name}.{kind}", figure) for kind in ("png", "pdf")]
    wrote = f"\nWrote {directory}: {', '.join(file.name for file in files)}"
    found = {"name": name, "smoke": smoke, "files": [file.as_posix() for file in files]}
    return [*chosen.lines(saved), wrote], found


def run_study(name: str, smoke: bool, output: Path, data: Path | None) -> Path:
    """Run one experiment and store its result as ``NAME.json`` in a directory. Returns the file."""
    chosen = reproduction(name)
    from poprisk._core.store import writable_directory

    config = _configured(name, chosen, smoke, data)
    directory = writable_directory(output)  # before anything slow
    from poprisk._core.progress import Progress

    parts = directory / f"{name}.parts"
    with interrupt_says(lambda: _kept(parts)):
        with Progress(name, counted="{done} of {total} runs") as bar:
            progress = lambda done, total, upcoming: bar.update(done, total=total, doing=upcoming)  # noqa: E731
            result = chosen.run(config, progress, parts) if chosen.resumable else chosen.run(config, progress)
        stored = result.save(directory / f"{name}.json")
    shutil.rmtree(parts, ignore_errors=True)  # the result holds it all
    return stored


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


def _kept(parts: Path) -> str:
    return f"finished parts are kept in {parts}; run the same command to continue" if any(parts.glob("*.json")) else ""
