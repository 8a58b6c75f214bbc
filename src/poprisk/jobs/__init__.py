"""Kernels, operators and retrainings as jobs: planned once, done by any number of processes that may die, assembled."""

import warnings
from typing import Any

from poprisk.jobs._assemble import assemble_matrix, assemble_resampled
from poprisk.jobs._disk_matrix import DiskMatrix
from poprisk.jobs._manifest import JobGroup, JobSpec, Manifest
from poprisk.jobs._operator_columns import probe_columns
from poprisk.jobs._plan import JobPlan
from poprisk.jobs._slurm import slurm_script
from poprisk.jobs._status import Status, job_status
from poprisk.jobs._worker import WorkDone, run_jobs, work

__all__ = [
    "DiskMatrix",
    "JobPlan",
    "Manifest",
    "Status",
    "WorkDone",
    "assemble_matrix",
    "assemble_resampled",
    "job_status",
    "probe_columns",
    "run_jobs",
    "slurm_script",
    "work",
]

_RENAMED = {"Plan": JobPlan, "Group": JobGroup, "Job": JobSpec}


def __getattr__(name: str) -> Any:
    """Names of version 0.1, which work for one more version."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    new = _RENAMED[name]
    place = __name__ if new.__name__ in __all__ else new.__module__
    message = f"{__name__}.{name} is now {place}.{new.__name__}; the old name goes in version 0.3"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return new
