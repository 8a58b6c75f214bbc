"""``poprisk jobs``: show how many jobs are done, do the rest, start a worker, convert matrices of earlier versions."""

import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from poprisk.cli._options import ProblemReference, Trust, built
from poprisk.cli._outcome import interrupt_says, note
from poprisk.errors import JobError, MissingExtraError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
_Store = Annotated[str, typer.Argument(metavar="STORE", help="Directory or address of the store.", show_default=False)]
_Scheduler = Annotated[str | None, typer.Option(help="Address of Dask's scheduler.", show_default=False)]
_KEPT = "finished jobs are stored; the same command does the rest"


@app.callback()
def _root() -> None:
    """Compute kernels, operators and retrainings as jobs, on this machine or on any Dask cluster.

    Jobs are planned in Python with poprisk.jobs.JobPlan; each stores its result, and workers may die at any time.
    """


@app.command()
def status(store: _Store) -> None:
    """Show how many jobs are done."""
    from poprisk.jobs import job_status

    found = job_status(store)
    for name, (done, total) in found.items():
        typer.echo(f"{name}: {done} of {total} done")
    typer.echo(f"in all: {sum(done for done, _ in found.values())} of {sum(total for _, total in found.values())} done")


@app.command()
def resume(
    store: _Store,
    scheduler: _Scheduler = None,
    workers: Annotated[
        int | None, typer.Option(help="Number of processes to start here, without a scheduler. Default: one per core.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read what is stored, and compute again what is damaged.")
    ] = False,
    tolerate: Annotated[
        bool, typer.Option("--tolerate", help="Also use machines that round differently from the first ones.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for another process that does the same jobs.")] = False,
    problem: ProblemReference = None,
    trust: Trust = False,
) -> None:
    """Do the jobs that are not done yet: on a Dask cluster, or in processes of this machine."""
    from poprisk import cluster
    from poprisk.jobs import run_jobs

    signal.signal(signal.SIGTERM, _leave)
    options: Any = {"verify": verify, "tolerate": tolerate, "wait": wait, "progress": True, "trust": trust}
    if problem is not None:
        options["problem"] = built(problem)
    try:
        with interrupt_says(lambda: _KEPT), ExitStack() as stack:
            if scheduler is not None:
                options["client"] = stack.enter_context(connected(scheduler))
                if not options["client"].scheduler_info()["workers"]:
                    note(f"waiting for a first worker: poprisk jobs work --scheduler {scheduler}")
            elif workers is not None:
                stack.enter_context(cluster("in-process" if workers <= 1 else "processes", workers=workers))
            done = run_jobs(store, **options)
    except SystemExit:
        note(f"interrupted; {_KEPT}")
        raise
    typer.echo(f"did {done.computed} of {done.total} jobs in {done.seconds:.0f} s; all are done")


@app.command()
def work(
    scheduler: Annotated[str, typer.Option(help="Address of Dask's scheduler, as it prints it.", show_default=False)],
    memory_limit: Annotated[str, typer.Option(help="Memory of this worker, in Dask's notation.")] = "auto",
    gpu: Annotated[bool, typer.Option("--gpu", help="Take one GPU, for jobs planned with device='cuda'.")] = False,
) -> None:
    """Start a worker, which computes one task at a time. Start many, on any machine that sees runs and store."""
    from poprisk._core.cluster import WORKER_MEMORY, WORKER_SETTINGS

    connected(scheduler).close()  # or Dask would say on many lines that nobody answers
    options = ["--nthreads", "2" if gpu else "1", "--memory-limit", memory_limit, "--no-dashboard"]
    options += ["--resources", "GPU=2"] if gpu else []  # one task computes while the other stores
    # or the worker would import what lies in the current directory
    safe = {**WORKER_SETTINGS, **WORKER_MEMORY, **os.environ, "PYTHONSAFEPATH": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "dask", "worker", scheduler, *options], safe)


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A matrix of an earlier version: assembled/….npy.")],
    store: _Store,
    name: Annotated[str, typer.Option(help="Name of the matrix in the store.", show_default=False)],
    symmetric: Annotated[bool, typer.Option("--symmetric", help="The matrix is a training kernel.")] = False,
) -> None:
    """Copy a matrix from an earlier version into a store, with the bound on its error if it has one."""
    from poprisk.jobs import convert_matrix

    convert_matrix(file, store, name, symmetric=symmetric)
    typer.echo(f"{name}: in {store}; open it with poprisk.jobs.open_matrix")


def connected(scheduler: str) -> Any:
    """A client of a scheduler that answers."""
    try:
        from distributed import Client

        return Client(scheduler)
    except ImportError:
        raise MissingExtraError("distributed", "jobs", "a Dask cluster") from None
    except (ValueError, OSError) as error:
        raise JobError(f"no scheduler at {scheduler!r} ({error}): pass the address that it prints, tcp://…") from None


def _leave(number: int, _: Any) -> NoReturn:
    """On SIGTERM, as schedulers send it: exit in a way that cancels the tasks."""
    raise SystemExit(128 + number)
