"""``python -m poprisk.jobs``: a worker, a look at how far the jobs are, a SLURM script, and assembly."""

import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from poprisk.errors import PopRiskError

EXIT_WRONG, EXIT_INTERRUPTED, EXIT_TERMINATED = 2, 130, 143

app = typer.Typer(
    name="python -m poprisk.jobs",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_CommandLineError: type[Exception] = next(b for b in typer.BadParameter.__mro__ if b.__name__ == "ClickException")

_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The directory that Plan wrote.", show_default=False)]


@app.callback()
def _root() -> None:
    """Kernels, operators and retrainings as jobs that any number of processes may do."""


@app.command()
def work(
    folder: _Folder,
    name: Annotated[str | None, typer.Option(help="Of this worker, in logs; made unique if not given.")] = None,
    lease: Annotated[
        float, typer.Option(help="Seconds without a sign of life after which a worker is dead; the same for all.")
    ] = 90.0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the bytes of results that are there already.")
    ] = False,
    tolerate: Annotated[
        bool, typer.Option("--tolerate", help="Work although this machine rounds differently from the first worker's.")
    ] = False,
) -> None:
    """Do jobs until all are done. Start as many workers as you like, when and where you like; kill any of them."""
    from poprisk.jobs import work as do_work

    signal.signal(signal.SIGTERM, _leave)
    done = do_work(folder, name=name, lease=lease, verify=verify, tolerate=tolerate, progress=True)
    typer.echo(f"{done.worker} finished {done.computed} jobs in {done.seconds:.0f} s; all are done")


@app.command()
def status(folder: _Folder) -> None:
    """How many jobs are done, claimed and failed, and about how long the rest will take."""
    from poprisk.jobs import job_status

    for line in job_status(folder).lines():
        typer.echo(line)


@app.command()
def slurm(
    folder: _Folder,
    tasks: Annotated[int, typer.Option(help="Workers of the array.")] = 10,
    time_limit: Annotated[str, typer.Option("--time", help="Of one worker.")] = "04:00:00",
    lease: Annotated[float, typer.Option(help="As of work.")] = 90.0,
) -> None:
    """Print a commented sbatch script that starts workers as an array: redirect it to a file, look at it, submit it."""
    from poprisk.jobs import slurm_script

    typer.echo(slurm_script(folder, tasks=tasks, time_limit=time_limit, lease=lease), nl=False)


@app.command()
def assemble(folder: _Folder) -> None:
    """Put every finished matrix together into a .npy file that numpy maps, and print where, with error bounds."""
    from poprisk.jobs import Manifest, assemble_matrix

    for group in Manifest.load(folder).groups:
        if group.where.get("layout") in ("tiles", "columns"):
            matrix = assemble_matrix(folder, group.name)
            bound = "" if matrix.bound is None else f", |dK_ij| <= {matrix.bound:.2g} sqrt(K_ii K_jj)"
            typer.echo(f"{group.name}: {matrix.path}{bound}")


def _leave(number: int, _: Any) -> NoReturn:
    """SLURM's and torchrun's way to say goodbye: an exit that lets the worker give its job back."""
    raise SystemExit(128 + number)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point; whatever goes wrong is one line and an exit code."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        code: Any = app(arguments, standalone_mode=False)
    except _CommandLineError as error:
        return _fail(error.format_message())  # type: ignore[attr-defined]
    except (PopRiskError, OSError) as error:
        return _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except SystemExit as leaving:
        code = leaving.code
    if code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        typer.echo("poprisk: interrupted; what is done is kept, start a worker again to go on", err=True)
    return code if isinstance(code, int) else 0


def _fail(message: str) -> int:
    if message.strip():
        typer.echo(f"poprisk: error: {' '.join(message.split())}", err=True)
    return EXIT_WRONG


if __name__ == "__main__":
    main()
