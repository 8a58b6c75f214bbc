"""Does the jobs of a store as tasks: each stores its tile itself, and a tile that is stored is not computed again."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from poprisk._core.cluster import COMPUTING, check_seen, cluster, current_cluster, is_remote, run_tasks, worker_memory
from poprisk._core.progress import Progress
from poprisk._core.store import Cell, TiledArray, directory_of, load_all, locked, open_store
from poprisk.errors import DeviceError, JobError
from poprisk.jobs._kinds import KINDS, Computation
from poprisk.operators import numerics_here, pinned
from poprisk.runs import Problem, Run, ShippedRun

_OPENED: dict[str, Computation] = {}


@dataclass(frozen=True)
class JobsDone:
    """What a call did; all jobs of the store are done."""

    computed: int
    """Number of jobs computed by this call."""
    total: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """What all tasks of a group share, sent once to each worker."""

    group: TiledArray
    run: ShippedRun
    computation: Any
    """Class of the computation, chosen by the process that starts the tasks."""
    numerics: list[dict[str, Any]]
    """Kinds of machine that may compute."""

    def do(self, cell: Cell) -> None:
        """Compute a tile and store it."""
        if self.group.has(cell):  # by a worker of a client that has died since this one looked
            return
        content, here = self.group.content, numerics_here(self.group.content["device"])
        if content["device"] == "cuda" and not torch.cuda.is_available():
            raise DeviceError("the jobs were planned for device 'cuda', but this worker has no GPU: plan with 'cpu'")
        if here not in self.numerics:
            raise JobError(f"this worker has {here}, the others {self.numerics}: repeat the call with tolerate")
        with COMPUTING, pinned(content["threads"]):
            key = f"{self.group.store} {self.group.path} {self.group.digest(tiles=True)}"
            if key not in _OPENED:
                _OPENED.clear()  # one at a time: each holds a model and its examples
                device = torch.device(content["device"])
                _OPENED[key] = self.computation(self.group, self.run.open(device), device)
            found = {name: x.cpu() for name, x in _OPENED[key].compute(cell).items()}
        self.group.write(cell, found)


def run_jobs(
    store: Any,
    *,
    client: Any = None,
    runs: Mapping[str, Run] | None = None,
    problem: Problem | None = None,
    verify: bool = False,
    tolerate: bool = False,
    wait: bool = False,
    trust: bool = False,
    progress: bool | None = None,
) -> JobsDone:
    """Do all jobs of a store that are not done yet.

    If a worker dies, others do its job. If this process or Dask's scheduler dies, the same call continues with what is
    stored. The numbers are the same, bit by bit, for any number of workers.

    Args:
        store: The store in which the jobs were planned.
        client: Where: a ``distributed.Client``, ``"processes"``, ``"threads"`` or ``"in-process"``, see
            :func:`poprisk.cluster`. Default: the enclosing ``poprisk.cluster``, or a Dask cluster of this machine's
            cores that is started and closed here.
        runs: The run of each group; default: the directories that were planned with.
        problem: The problem of these runs, where their directories' own descriptions shall not be used.
        verify: Read what is stored, and compute again what is damaged.
        tolerate: Also use machines that round differently from those that computed before.
        wait: Wait for another process that does jobs of the same store, instead of refusing.
        trust: Import and call what the runs name as their task, even if this user has not run it on this machine.
        progress: Show progress and the time left on stderr; None does so on a terminal.

    Raises:
        DataError: there are no jobs, or their metadata is damaged.
        JobError: jobs failed, another process is doing them, or the machines round differently.
        HyperparameterError: the client is none of these, or its workers cannot see the store.
    """
    opened, began = open_store(store), time.perf_counter()
    groups, folder = load_all(opened), directory_of(opened)
    with ExitStack() as stack:
        if folder is not None:
            stack.enter_context(locked(folder.with_name(f"{folder.name}.lock"), wait=wait))
        left, total = {}, 0
        for group in groups:
            known, cells = group.done(verify=verify), group.cells()
            left[group.name], total = [cell for cell in cells if cell not in known], total + len(cells)
        groups = [group for group in groups if left[group.name]]
        if groups:
            pool = stack.enter_context(cluster(client or current_cluster() or "processes"))
            list(run_tasks(pow, [(1, 1)], pool))  # by a first worker: an adaptive cluster starts it for a task
            check_seen(opened, pool)
            works = [_work(group, runs or {}, problem, pool, tolerate, trust) for group in groups]
            tasks = [(work, cell) for work in works for cell in left[work.group.name]]
            _do_all(tasks, total, pool, progress)
        for group in groups:
            group.remove_leftovers()
    return JobsDone(sum(map(len, left.values())), total, time.perf_counter() - began)


def job_status(store: Any) -> dict[str, tuple[int, int]]:
    """Number of jobs done and in total, by name; nothing is changed, and no tile is read.

    Raises:
        DataError: there are no jobs, or their metadata is damaged.
    """
    found = [(group, set(group.cells())) for group in load_all(open_store(store))]
    return {group.name: (len(group.done() & cells), len(cells)) for group, cells in found}


def shipped_run(group: TiledArray, runs: Mapping[str, Run], problem: Problem | None, trust: bool = False) -> ShippedRun:
    """The run of a group: one of those passed, or the directory that was planned with.

    Raises:
        JobError: the run was only in memory.
    """
    if group.name in runs:
        return ShippedRun(runs[group.name])
    path, folder = group.where.get("run"), directory_of(group.store)
    if path is None:
        raise JobError(f"the run of {group.name!r} was only in memory: plan with it again, and call JobPlan.run")
    return ShippedRun(Run.load(folder / path if folder else path, problem=problem, trust=trust))


def _do_all(tasks: list[tuple[Work, Cell]], total: int, pool: Any, progress: bool | None) -> None:
    before, failed = total - len(tasks), []
    on_gpus = is_remote(pool) and any(work.group.content["device"] == "cuda" for work, _ in tasks)
    with Progress("jobs", total, start=before, counted="{done} of {total} done", shown=progress) as bar:
        for count, (place, found) in enumerate(run_tasks(Work.do, tasks, pool, {"GPU": 1} if on_gpus else None), 1):
            failed += [(place, found)] if isinstance(found, BaseException) else []
            bar.update(before + count - len(failed))
    _OPENED.clear()
    if failed:
        place, error = min(failed, key=lambda each: each[0])
        work, cell = tasks[place]
        raise JobError(
            f"{len(failed)} of {total} jobs failed, the first, {list(cell)} of {work.group.name!r}, with "
            f"{type(error).__name__}: {error}; the others are stored: fix the cause and repeat the call"
        )


def _work(
    group: TiledArray, runs: Mapping[str, Run], problem: Problem | None, pool: Any, tolerate: bool, trust: bool
) -> Work:
    if group.kind not in KINDS:
        raise JobError(f"{group.name!r} is of kind {group.kind!r}, which cannot be computed again")
    limit, needed, device = worker_memory(pool), group.where.get("tile_bytes", 0), group.content["device"]
    if limit is not None and needed > limit and device == "cpu":  # on a GPU it is the GPU's memory
        raise JobError(f"a tile of {group.name!r} takes {needed} bytes, and a worker has {limit}: start larger workers")
    here = list(pool.run(numerics_here, device).values()) if is_remote(pool) else [numerics_here(device)]
    kinds = list(group.where["numerics"]) or here[:1]
    for other in here:
        if other not in kinds:
            if not tolerate:
                raise JobError(
                    f"{group.name!r} was begun with {kinds[0]}, a machine has {other}: results would agree only up to "
                    "rounding; use machines of one kind, or allow it with tolerate (--tolerate)"
                )
            kinds.append(other)
    if kinds != group.where["numerics"]:
        group.annotate(numerics=kinds)
    run = shipped_run(group, runs, problem, trust)
    return Work(group, run.packed() if is_remote(pool) else run, KINDS[group.kind], kinds)
