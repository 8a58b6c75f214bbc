"""``poprisk jobs``: start a worker, show how many jobs are done, write a SLURM script, assemble the results."""

import signal
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from poprisk.cli._outcome import interrupt_says, note

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The directory that JobPlan wrote.", show_default=False)]
_KEPT = "finished jobs are kept; start a worker again to go on"


@app.callback()
def _root() -> None:
    """Compute kernels, operators and retrainings as jobs that any number of processes can share.

    A jobs directory is planned in Python with poprisk.jobs.JobPlan; workers may join, leave and die at any time.
    """


@app.command()
def work(
    folder: _Folder,
    name: Annotated[
        str | None, typer.Option(help="Name of this worker in the logs. Default: a unique one.", show_default=False)
    ] = None,
    lease: Annotated[
        float,
        typer.Option(help="Seconds without a sign of life after which a worker counts as dead; the same for all."),
    ] = 90.0,
    verify: Annotated[bool, typer.Option("--verify", help="Check the contents of existing results.")] = False,
    tolerate: Annotated[
        bool,
        typer.Option("--tolerate", help="Work even if this machine rounds differently from the first worker's."),
    ] = False,
) -> None:
    """Do jobs until all are done. You can start and kill any number of workers, at any time and on any machine."""
    from poprisk.jobs import work as do_work

    signal.signal(signal.SIGTERM, _leave)
    try:
        with interrupt_says(lambda: _KEPT):
            done = do_work(folder, name=name, lease=lease, verify=verify, tolerate=tolerate, progress=True)
    except SystemExit:
        note(f"interrupted; {_KEPT}")
        raise
    typer.echo(f"{done.worker} finished {done.computed} jobs in {done.seconds:.0f} s; all jobs are done")


@app.command()
def status(folder: _Folder) -> None:
    """Show how many jobs are done, in progress and failed, and about how long the rest will take."""
    from poprisk.jobs import job_status

    for line in job_status(folder).lines():
        typer.echo(line)


@app.command()
def slurm(
    folder: _Folder,
    tasks: Annotated[int, typer.Option(help="Number of workers in the array.")] = 10,
    time_limit: Annotated[str, typer.Option("--time", help="Time limit of each worker.")] = "04:00:00",
    lease: Annotated[float, typer.Option(help="Lease of each worker, in seconds; see poprisk jobs work.")] = 90.0,
) -> None:
    """Print a commented sbatch script that starts an array of workers. Save it to a file, check it, submit it."""
    from poprisk.jobs import slurm_script

    typer.echo(slurm_script(folder, tasks=tasks, time_limit=time_limit, lease=lease), nl=False)


@app.command()
def assemble(folder: _Folder) -> None:
    """Assemble every finished matrix into a .npy file, and print its path and error bound."""
    from poprisk.jobs import Manifest, assemble_matrix

    for group in Manifest.load(folder).groups:
        if group.where.get("layout") in ("tiles", "columns"):
            matrix = assemble_matrix(folder, group.name)
            bound = "" if matrix.bound is None else f", |dK_ij| <= {matrix.bound:.2g} sqrt(K_ii K_jj)"
            typer.echo(f"{group.name}: {matrix.path}{bound}")


def _leave(number: int, _: Any) -> NoReturn:
    """On SIGTERM, as SLURM and torchrun send it: exit in a way that lets the worker give its job back."""
    raise SystemExit(128 + number)
