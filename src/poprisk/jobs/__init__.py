"""Kernels, operators and retrainings as jobs: planned once, done by any number of processes that may die, assembled."""

from poprisk.jobs._assemble import assemble_matrix, assemble_resampled
from poprisk.jobs._disk_matrix import DiskMatrix
from poprisk.jobs._launch import run_jobs, slurm_script
from poprisk.jobs._manifest import Manifest
from poprisk.jobs._plan import Plan
from poprisk.jobs._status import Status, job_status
from poprisk.jobs._worker import WorkDone, work

__all__ = [
    "DiskMatrix",
    "Manifest",
    "Plan",
    "Status",
    "WorkDone",
    "assemble_matrix",
    "assemble_resampled",
    "job_status",
    "run_jobs",
    "slurm_script",
    "work",
]
