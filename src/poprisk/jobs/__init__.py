"""Kernels, operators and retrainings as jobs: planned once, done by any number of workers that may die, in a store."""

from typing import Any

from poprisk import _moved
from poprisk._core.cluster import cluster
from poprisk._core.linalg import StoredMatrix, probe_columns
from poprisk._core.store import convert_matrix
from poprisk.jobs._engine import JobsDone, job_status, run_jobs
from poprisk.jobs._plan import JobPlan
from poprisk.jobs._results import open_matrix, open_resampled

__all__ = [
    "JobPlan", "JobsDone", "StoredMatrix", "cluster", "convert_matrix", "job_status", "open_matrix",
    "open_resampled", "probe_columns", "run_jobs",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return _moved.facade_attribute(__name__, name)
