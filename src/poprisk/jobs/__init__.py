"""Kernels, operators and retrainings as jobs: planned once, done by any number of processes that may die, assembled."""

from typing import Any

from poprisk import _moved
from poprisk.jobs._assemble import assemble_matrix, assemble_resampled
from poprisk.jobs._disk_matrix import DiskMatrix
from poprisk.jobs._manifest import Manifest
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


def __getattr__(name: str) -> Any:
    return _moved.facade_attribute(__name__, name)
