"""Kernels, operators and retrainings as jobs: planned once, done by any number of processes that may die, assembled."""

from poprisk.jobs.assemble import assemble_matrix as assemble_matrix
from poprisk.jobs.assemble import assemble_resampled as assemble_resampled
from poprisk.jobs.disk_matrix import DiskMatrix as DiskMatrix
from poprisk.jobs.launch import run_jobs as run_jobs
from poprisk.jobs.launch import slurm_script as slurm_script
from poprisk.jobs.manifest import Group as Group
from poprisk.jobs.manifest import Job as Job
from poprisk.jobs.manifest import Manifest as Manifest
from poprisk.jobs.plan import Plan as Plan
from poprisk.jobs.status import Status as Status
from poprisk.jobs.status import job_status as job_status
from poprisk.jobs.worker import WorkDone as WorkDone
from poprisk.jobs.worker import work as work
