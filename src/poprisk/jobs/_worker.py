"""A worker: does jobs that no other worker has claimed, and those of workers that died."""

import hashlib
import os
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torch import Tensor

from poprisk._core.progress import Progress
from poprisk._core.store import resolve
from poprisk.errors import DataError, HyperparameterError, JobError
from poprisk.jobs._claims import JobClaim, Mark, Watch, beating, try_claim
from poprisk.jobs._manifest import JobGroup, JobSpec, Manifest
from poprisk.jobs._numerics import check_numerics, chosen_device, pinned
from poprisk.jobs._results import WorkerLog, read_result, result_notes, result_path, write_result

LEASE = 90.0
# A job whose workers have died this often is abandoned: it may be what kills them.
_MOST_GENERATIONS = 20
# How often per lease waiting workers look again, and the longest pause in seconds.
_LOOKS_IN_A_LEASE, _LONGEST_SLEEP = 10, 5.0


class Computation(Protocol):
    """A group opened on one machine: an instance of the class that the group's ``kind`` names.

    The class is called with the group, the folder of the jobs and the device.
    """

    def compute(self, indices: tuple[int, ...]) -> dict[str, Tensor]:
        """The result of one job; its bits must not depend on the worker or on what was computed before."""
        ...


@dataclass(frozen=True)
class WorkDone:
    """What one worker did."""

    worker: str
    computed: int
    """Number of jobs finished."""
    taken_over: int
    """Number of these that had belonged to another worker."""
    seconds: float


def worker_name() -> str:
    """A unique name, from the SLURM task or torchrun rank if there is one and a random suffix.

    >>> worker_name() != worker_name()
    True
    """
    for variable, word in (("SLURM_ARRAY_TASK_ID", "task"), ("SLURM_PROCID", "slurm"), ("RANK", "rank")):
        if os.environ.get(variable):
            return f"{word}{os.environ[variable]}-{secrets.token_hex(4)}"
    return f"process{os.getpid()}-{secrets.token_hex(4)}"


def work(
    folder: str | Path,
    *,
    name: str | None = None,
    lease: float = LEASE,
    verify: bool = False,
    tolerate: bool = False,
    progress: bool | None = False,
) -> WorkDone:
    """Do jobs until all are done, by this worker or others.

    Args:
        folder: Directory in which the jobs were planned.
        name: Name of this worker in logs and results; default: a unique name.
        lease: Seconds without a sign of life after which another worker counts as dead. Use the same value for all
            workers, longer than a network file system caches directories (60 s by default).
        verify: Verify the checksum of finished results; by default only their size is checked.
        tolerate: Work even if this machine rounds differently from that of the first worker.
        progress: Show progress on stderr; None does so on a terminal.

    Returns:
        What this worker did.

    Raises:
        DataError: there are no jobs.
        JobError: jobs failed here, repeatedly killed their workers, or were planned by other code; or the machine
            rounds differently.
        HyperparameterError: the lease or the name is not valid.
    """
    if not lease > 0:
        raise HyperparameterError(f"lease must be a positive number of seconds, got {lease!r}: try {LEASE:.0f}")
    if name is not None and not re.fullmatch(r"[\w.-]{1,100}", name):
        raise HyperparameterError(f"name must be up to 100 letters, digits, '.', '-' and '_', got {name!r}")
    worker = _Worker(Path(folder), name or worker_name(), lease, verify)
    devices = {group.content.get("device", "cpu") for group in worker.manifest.groups}
    worker.numerics = check_numerics(folder, devices, tolerate=tolerate)
    return worker.run(progress)


def run_jobs(
    folder: str | Path,
    *,
    lease: float = LEASE,
    verify: bool = False,
    tolerate: bool = False,
    progress: bool | None = None,
) -> WorkDone:
    """Do all jobs of a directory in this process, together with any other workers.

    Like :func:`~poprisk.jobs.work`, with progress shown on a terminal.

    Args:
        folder: Directory in which the jobs were planned.
        lease: As in :func:`~poprisk.jobs.work`; the same for all workers.
        verify: Check the bytes of existing results, and compute damaged ones again.
        tolerate: Continue the work of machines that round differently.
        progress: Show progress and the time left on stderr; None does so on a terminal.

    Returns:
        What this process did; all jobs are done.

    Raises:
        DataError: there are no jobs.
        JobError: jobs failed.
    """
    return work(folder, lease=lease, verify=verify, tolerate=tolerate, progress=progress)


@dataclass
class _Worker:
    folder: Path
    name: str
    lease: float
    verify: bool
    numerics: dict = field(default_factory=dict)
    computed: int = 0
    taken_over: int = 0

    def __post_init__(self) -> None:
        self.manifest = Manifest.load(self.folder)
        self.log = WorkerLog(self.folder, self.name)
        self._failed: dict[str, str] = {}
        self._watches: dict[str, Watch] = {}
        self._open: tuple[str, Computation] | None = None

    def run(self, progress: bool | None) -> WorkDone:
        began = time.perf_counter()
        jobs = _rotated(self.manifest.jobs(), self.name)
        self.log.add("joined")
        with Progress("jobs", len(jobs), counted="{done} of {total} done", shown=progress) as bar:
            waiting = []
            for place, job in enumerate(jobs):
                before = self.computed
                if not self._first_attempt(job):
                    waiting.append(job)
                bar.update(place + 1 - len(waiting), worked=self.computed > before)
            while waiting:
                left = [job for job in waiting if not self._next_attempt(job)]
                if len(left) < len(waiting):
                    bar.update(len(jobs) - len(left))
                elif left:
                    self._check_hope(left)
                    time.sleep(min(self.lease / _LOOKS_IN_A_LEASE, _LONGEST_SLEEP))
                waiting = left
        self.log.add("left", computed=self.computed)
        return WorkDone(self.name, self.computed, self.taken_over, time.perf_counter() - began)

    def _first_attempt(self, job: JobSpec) -> bool:
        """Whether the job is done, by another worker or just now by this one."""
        if self._is_done(job):
            return True
        computation = self._computation(job.group)  # before the claim, because opening may take longer than a lease
        claim = try_claim(self.folder, job.key, 0, self.name)
        if claim is None:
            self._watch(job).look()  # its lease starts to run while we do other jobs
            return False
        return self._do(job, claim, computation)

    def _next_attempt(self, job: JobSpec) -> bool:
        """The same for a job that another worker had claimed, or that failed."""
        if self._is_done(job):
            return True
        watch = self._watch(job)
        mark, silent = watch.look()
        if watch.generation >= _MOST_GENERATIONS or not self._is_free(job, mark, silent):
            return False
        computation = self._computation(job.group)
        claim = try_claim(self.folder, job.key, watch.generation + 1, self.name)
        if claim is None:
            return False
        if self._is_done(job):  # its last worker was slow, or died after writing the result
            claim.mark("done")
            return True
        done = self._do(job, claim, computation)
        self.taken_over += done
        return done

    def _is_free(self, job: JobSpec, mark: Mark, silent: bool) -> bool:
        if mark.state == "failed":
            return job.key not in self._failed
        damaged = mark.state == "done" and result_path(self.folder, job.key).exists()
        return silent or mark.state == "released" or damaged

    def _do(self, job: JobSpec, claim: JobClaim, computation: Computation) -> bool:
        self.log.add("start", key=job.key, generation=claim.generation)
        began = time.perf_counter()
        try:
            with beating(claim, self.lease), pinned(job.group.content.get("threads", 1)):
                tensors = computation.compute(job.indices)
                notes = {"worker": self.name, "numerics": self.numerics, "seconds": time.perf_counter() - began}
                write_result(self.folder, job.key, tensors, notes)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._failed[job.key] = reason
            self.log.add("failed", key=job.key, reason=reason)
            claim.mark("failed", reason=reason)
            return False
        except BaseException:
            self.log.add("released", key=job.key)
            claim.mark("released")
            raise
        claim.mark("done")
        self.log.add("done", key=job.key, seconds=round(time.perf_counter() - began, 3))
        self.computed += 1
        return True

    def _is_done(self, job: JobSpec) -> bool:
        if result_notes(self.folder, job.key) is None:
            return False
        if not self.verify:
            return True
        try:
            read_result(self.folder, job.key)
        except DataError:
            return False
        return True

    def _watch(self, job: JobSpec) -> Watch:
        if job.key not in self._watches:
            self._watches[job.key] = Watch(self.folder, job.key, self.lease)
        return self._watches[job.key]

    def _computation(self, group: JobGroup) -> Computation:
        """The opened group; only one at a time, because each holds a model and its examples."""
        if self._open is None or self._open[0] != group.name:
            self._open = None
            rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID")
            device = chosen_device(group.content.get("device", "cpu"), int(rank) if rank else None)
            with pinned(group.content.get("threads", 1)):
                self._open = (group.name, resolve(group.kind)(group, self.folder, device))
        return self._open[1]

    def _check_hope(self, left: list[JobSpec]) -> None:
        """Raises an error if only jobs that cannot be done here are left."""
        reasons = []
        for job in left:
            watch = self._watch(job)
            mark, silent = watch.look()
            if watch.generation >= _MOST_GENERATIONS and (silent or mark.state != "working"):
                reasons.append(f"its workers failed or died {watch.generation + 1} times")
            elif job.key in self._failed and mark.state == "failed":
                reasons.append(self._failed[job.key])
            else:
                return
        self.log.add("left", computed=self.computed)
        first = left[0]
        raise JobError(
            f"{len(left)} of {len(self.manifest.jobs())} jobs failed, the first in {first.group.name!r} "
            f"{list(first.indices)} with {reasons[0]}; fix the cause and start a worker again (or remove "
            f"{self.folder / 'claims'} while no worker is running)"
        )


def _rotated(jobs: list[JobSpec], name: str) -> list[JobSpec]:
    """Each worker starts at a different job and continues in order: neighbouring jobs share intermediate results."""
    start = int(hashlib.sha256(name.encode()).hexdigest(), 16) % max(1, len(jobs))
    return jobs[start:] + jobs[:start]
