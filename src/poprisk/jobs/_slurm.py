"""A SLURM script that starts workers as an array."""

import shlex
from pathlib import Path

from poprisk.errors import HyperparameterError
from poprisk.jobs._manifest import Manifest
from poprisk.jobs._worker import LEASE

# Memory of an idle process with torch, plus room for a model and its examples.
_AT_REST = 4 * 2**30


def slurm_script(
    folder: str | Path,
    *,
    tasks: int,
    time_limit: str = "04:00:00",
    memory: str | None = None,
    python: str = "python",
    lease: float = LEASE,
) -> str:
    """An sbatch script that starts workers as an array; the number of a task only names its worker.

    Args:
        folder: Directory of the jobs, as the compute nodes see it.
        tasks: Largest number of workers; SLURM starts as many as it has room for.
        time_limit: Time limit of one worker; other workers, or a later submission, do the rest.
        memory: Memory of one worker in SLURM's notation; default: the largest memory limit of the plan plus 4 GiB.
        python: Python interpreter to start.
        lease: As in :func:`~poprisk.jobs.work`.

    Raises:
        DataError: there are no jobs.
        HyperparameterError: fewer than one task.

    >>> import tempfile
    >>> from poprisk.jobs._manifest import JobGroup
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Manifest((JobGroup("squares", "package.module:Squares", {}, [[0], [1]]),)).save(folder)
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
# {count} jobs. Tasks of the array are workers, not jobs: each does jobs that no other worker has claimed until all are
# done. Any number of tasks works, and any of them may be killed.
#SBATCH --job-name=poprisk-jobs
#SBATCH --array=0-{tasks - 1}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={threads}            # as planned: the number of threads affects rounding
{gpu_line}#SBATCH --mem={memory}
#SBATCH --time={time_limit}
#SBATCH --requeue                     # a worker that is preempted comes back as a new one
#SBATCH --signal=TERM@60              # one minute before the end: the worker releases its job and stops
#SBATCH --output=poprisk-jobs-%A-%a.log

# Activate the environment here, and put modules that hold your problem on PYTHONPATH.
export OMP_NUM_THREADS={threads}
exec srun {command}
"""
