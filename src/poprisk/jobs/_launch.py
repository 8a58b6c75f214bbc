"""Starting workers: in this process, and as a SLURM array; torchrun starts ``python -m poprisk jobs work`` itself."""

import shlex
from pathlib import Path

from poprisk.errors import HyperparameterError
from poprisk.jobs._manifest import Manifest
from poprisk.jobs._worker import LEASE, WorkDone, work

# What a process with torch takes before it has done anything, with room for a model and its examples.
_AT_REST = 4 * 2**30


def run_jobs(
    folder: str | Path,
    *,
    lease: float = LEASE,
    verify: bool = False,
    tolerate: bool = False,
    progress: bool | None = None,
) -> WorkDone:
    """Do all jobs of a directory in this process, with whoever else works on them.

    Args:
        folder: Where they were planned.
        lease: As of :func:`~poprisk.jobs.work`; the same for all workers.
        verify: Check the bytes of results that are there already, and do damaged ones again.
        tolerate: Go on with the work of machines that round differently.
        progress: Show how far it is, with the time left, on stderr; None does so on a terminal.

    Returns:
        What this process did; all jobs are done.

    Raises:
        DataError: there are no jobs.
        JobError: jobs failed.
    """
    return work(folder, lease=lease, verify=verify, tolerate=tolerate, progress=progress)


def slurm_script(
    folder: str | Path,
    *,
    tasks: int,
    time_limit: str = "04:00:00",
    memory: str | None = None,
    python: str = "python",
    lease: float = LEASE,
) -> str:
    """An sbatch script that starts so many workers as an array; the task's number is only the worker's name.

    Args:
        folder: Of the jobs, as the compute nodes see it.
        tasks: Workers, at most; SLURM starts as many as it has room for.
        time_limit: Of one worker; the jobs it leaves are done by others, or when the script is submitted again.
        memory: Of one worker, as SLURM writes it; by default the largest memory limit of the plan and 4 GiB.
        python: The interpreter to start.
        lease: As of :func:`~poprisk.jobs.work`.

    Raises:
        DataError: there are no jobs.
        HyperparameterError: fewer than one task.

    >>> import tempfile
    >>> from poprisk.jobs._manifest import Group
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Manifest((Group("squares", "package.module:Squares", {}, [[0], [1]]),)).save(folder)
    ...     script = slurm_script(folder, tasks=20)
    >>> [line for line in script.splitlines() if "array" in line][-1]
    '#SBATCH --array=0-19'
    """
    if tasks < 1:
        raise HyperparameterError(f"tasks must be at least 1, got {tasks}")
    groups = Manifest.load(folder).groups
    threads = max(group.content.get("threads", 1) for group in groups)
    limit = max(group.where.get("memory_limit", 2**30) for group in groups)
    gpu = any(group.content.get("device") == "cuda" for group in groups)
    count = sum(len(group.jobs) for group in groups)
    memory = memory or f"{-(-(limit + _AT_REST) // 2**20)}M"
    command = f"{python} -m poprisk jobs work {shlex.quote(str(folder))} --lease {lease:g}"
    gpu_line = "#SBATCH --gpus-per-task=1             # the jobs were planned for GPUs\n" if gpu else ""
    return f"""#!/bin/bash
# {count} jobs. Tasks of the array are workers, not jobs: each takes what nobody has until all is done, so any number
# of them will do, and any of them may be killed.
#SBATCH --job-name=poprisk-jobs
#SBATCH --array=0-{tasks - 1}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={threads}            # as planned: another number of threads rounds differently
{gpu_line}#SBATCH --mem={memory}
#SBATCH --time={time_limit}
#SBATCH --requeue                     # a worker that is preempted comes back as a new one
#SBATCH --signal=TERM@60              # a minute before the end: the worker gives its job back and leaves
#SBATCH --output=poprisk-jobs-%A-%a.log

# Activate the environment here, and put modules that hold your problem on PYTHONPATH.
export OMP_NUM_THREADS={threads}
exec srun {command}
"""
