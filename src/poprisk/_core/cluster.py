"""Where tasks run: in this process, in its threads, in processes of this machine, or on any Dask cluster."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from poprisk._core.store import open_store
from poprisk.errors import HyperparameterError, JobError, MissingExtraError

_CURRENT: ContextVar[Any] = ContextVar("poprisk_cluster", default=None)
_STORE: ContextVar[Any] = ContextVar("poprisk_store", default=None)
COMPUTING = threading.Lock()
"""One thread of a process computes at a time, since torch's forward mode is global, while others store results."""


WORKER_SETTINGS = {f"DASK_DISTRIBUTED__WORKER__MEMORY__{what}": "False" for what in ("TARGET", "SPILL", "PAUSE")}
"""For the environment of workers: results are not kept there, so that a worker that waits for memory waits forever."""
WORKER_MEMORY = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**40), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""For their environment, too, where they start here: glibc keeps what was freed, rather than ask the system for zeroed
pages again with each large tensor, which takes up to a third of the time of a tile."""


@contextmanager
def cluster(
    client: Any = "processes",
    *,
    workers: int | None = None,
    memory_limit: int | str = "auto",
    gpus: int = 0,
    store: Any = None,
) -> Iterator[Any]:
    """Run the tasks of kernels, operators and retrainings on a Dask cluster within a block.

    Jobs (:mod:`poprisk.jobs`) run there, and so do trainings: :func:`poprisk.risk.k_fold`, the folds and real deletions
    of :func:`poprisk.population_risk`, :func:`poprisk.risk.retrain`. Each task computes with one thread (jobs: with
    those of their plan), and the numbers are the same, bit by bit, for any number of workers on machines of one kind.

    Args:
        client: A ``distributed.Client``, or what to start here and close at the end of the block: ``"processes"`` (a
            Dask cluster of this machine's cores), ``"threads"`` (one computes while others write), or ``"in-process"``.
        workers: Number of processes or threads to start; default: the number of cores, or of ``gpus``.
        memory_limit: Memory of each process in bytes, or in Dask's notation; default: an equal share of the machine's.
        gpus: Number of GPUs of this machine; each of the processes gets one of them.
        store: Where finished trainings are kept, so that the same call continues after an interruption: a directory or
            an address that fsspec knows (``s3://…``), which all workers see. Jobs have a store of their own.

    Yields:
        What ``run_tasks`` runs on; for processes, the client, whose ``dashboard_link`` shows Dask's dashboard.

    Raises:
        HyperparameterError: the client is none of these, or its workers cannot see the store.
        MissingExtraError: Dask is needed and not installed.

    >>> with cluster("threads", workers=2) as pool:
    ...     sorted(run_tasks(pow, [(2, 3), (2, 4)]))
    [(0, 8), (1, 16)]
    """
    with ExitStack() as stack:
        pool = client
        count = workers or gpus or os.cpu_count() or 1
        if client == "threads":
            pool = stack.enter_context(ThreadPoolExecutor(count, thread_name_prefix="poprisk"))
        elif client == "processes":
            pool = stack.enter_context(_local(count, memory_limit, gpus))
        elif client != "in-process" and not callable(getattr(client, "submit", None)):
            raise HyperparameterError(
                f"client must be a distributed.Client, 'processes', 'threads' or 'in-process', got {client!r}"
            )
        opened = None if store is None else open_store(store)
        check_seen(opened, pool)
        for variable, value in ((_CURRENT, pool), (_STORE, opened)):
            stack.callback(variable.reset, variable.set(value))
        yield pool


def current_cluster() -> Any:
    """What the enclosing ``with poprisk.cluster(…)`` runs tasks on; None outside of one."""
    return _CURRENT.get()


def current_store() -> Any:
    """Where the enclosing ``with poprisk.cluster(…, store=…)`` keeps trainings; None for nowhere."""
    return _STORE.get()


def is_remote(pool: Any) -> bool:
    """Whether tasks and what they share are pickled and sent to other processes.

    >>> is_remote(None), is_remote("in-process")
    (False, False)
    """
    return pool is not None and pool != "in-process" and not isinstance(pool, ThreadPoolExecutor)


def run_tasks(
    function: Callable[[Any, Any], Any],
    tasks: Sequence[tuple[Any, Any]],
    pool: Any = None,
    resources: dict[str, float] | None = None,
) -> Iterator[tuple[int, Any]]:
    """Call ``function(shared, item)`` for each task, in any order, and yield its position with what came of it.

    An exception of the function is yielded in place of its result. What is shared by tasks is sent once to each worker.
    A task whose worker died is done by another worker. Tasks that are left when the iteration ends are cancelled.

    The function must be of a module that workers can import; by default it is called where :func:`cluster` says.

    Raises:
        JobError: the connection to the scheduler was lost.
    """
    pool = current_cluster() if pool is None else pool
    if pool is None or pool == "in-process":
        for place, (shared, item) in enumerate(tasks):
            yield place, _outcome(function, shared, item)
    elif isinstance(pool, ThreadPoolExecutor):
        futures = {pool.submit(_outcome, function, *task): place for place, task in enumerate(tasks)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()
    else:
        yield from _on_dask(function, tasks, pool, resources)


def check_seen(store: Any, pool: Any) -> None:
    """Refuse a store in memory for other processes, each of which would write into a copy: a HyperparameterError."""
    kind = f"{type(store).__name__} {getattr(getattr(store, 'fs', None), 'protocol', '')}".lower()
    if "memory" in kind and is_remote(pool) and set(pool.run(os.getpid).values()) != {os.getpid()}:
        raise HyperparameterError("other processes do not see a store in memory: use 'threads', or another store")


def worker_memory(pool: Any) -> int | None:
    """The smallest memory limit of a task on the workers of a Dask cluster; None if there is no limit."""
    if not is_remote(pool):
        return None
    about = pool.scheduler_info(n_workers=-1)["workers"].values()
    limits = [each["memory_limit"] // max(1, each["nthreads"]) for each in about if each["memory_limit"]]
    return min(limits, default=None)


def _outcome(function: Callable[[Any, Any], Any], shared: Any, item: Any) -> Any:
    before = _CURRENT.set(None)  # a task of this process does what it calls by itself
    try:
        return function(shared, item)
    except Exception as error:
        return error
    finally:
        _CURRENT.reset(before)


def _same(shared: Any) -> Any:
    return shared


def _on_dask(function: Callable, tasks: Sequence[tuple[Any, Any]], client: Any, resources: dict | None) -> Iterator:
    from distributed import as_completed as as_finished

    # A task that hands over what is shared can be done again if the worker that has it dies; scattered data cannot.
    shared = {id(each): each for each, _ in tasks}
    sent = {name: client.submit(_same, each, pure=False) for name, each in shared.items()}
    options = {"resources": resources} if resources else {}
    common, items = [sent[id(each)] for each, _ in tasks], [item for _, item in tasks]
    futures = client.map(function, common, items, pure=False, **options)
    places = {future.key: place for place, future in enumerate(futures)}
    try:
        for batch in as_finished(futures).batches():
            if any(future.status not in ("finished", "error") for future in batch):
                raise JobError(
                    "the connection to Dask's scheduler was lost: start it again and repeat the call, which keeps what "
                    "is finished"
                )
            whole = [future for future in batch if future.status == "finished"]
            found = dict(zip([future.key for future in whole], client.gather(whole), strict=True))
            for future in batch:
                done = found[future.key] if future.key in found else future.exception()
                yield places[future.key], done
    finally:
        with suppress(Exception):  # a scheduler that is gone has nothing left to cancel
            client.cancel([*futures, *sent.values()])


@contextmanager
def _local(workers: int, memory_limit: int | str, gpus: int) -> Iterator[Any]:
    """A client of a cluster of this machine's processes; these import no script, so that none needs a main guard."""
    try:
        import dask
        from distributed.deploy.subprocess import SubprocessWorker
        from distributed.system import MEMORY_LIMIT

        from distributed import Client, Scheduler, SpecCluster
    except ImportError:
        raise MissingExtraError("distributed", "jobs", "a cluster of processes") from None
    limit = MEMORY_LIMIT // workers if memory_limit == "auto" else memory_limit
    options: dict[str, Any] = {"nthreads": 2 if gpus else 1, "memory_limit": limit, "dashboard": False}
    started = {
        i: {
            "cls": SubprocessWorker,
            "options": {"worker_kwargs": options | (_gpu(i % gpus) if gpus else {})},
        }
        for i in range(workers)
    }
    about = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
    with (
        _environment(),
        dask.config.set({"distributed.scheduler.allowed-failures": 10}),
        SpecCluster(started, {"cls": Scheduler, "options": about}, silence_logs=50) as found,  # type: ignore[arg-type]
        Client(found) as client,
    ):
        client.wait_for_workers(workers)
        yield client


def _gpu(index: int) -> dict[str, Any]:
    """Two tasks, of which one computes while the other stores."""
    return {"resources": {"GPU": 2}, "env": {"CUDA_VISIBLE_DEVICES": str(index)}}


@contextmanager
def _environment() -> Iterator[None]:
    """Processes started in the block find the modules that this one finds, no others, and log errors only."""
    path = os.pathsep.join(each or os.getcwd() for each in sys.path)
    ours = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1", "DASK_LOGGING__DISTRIBUTED": "error"} | WORKER_SETTINGS
    ours |= {name: value for name, value in WORKER_MEMORY.items() if name not in os.environ}
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
