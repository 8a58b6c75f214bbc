"""Plans jobs: kernels at recorded steps, columns of operators, trainings of a K-fold."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store import writable_directory
from poprisk.errors import HyperparameterError
from poprisk.jobs._fold_members import fold_group
from poprisk.jobs._kernel_tiles import kernel_group
from poprisk.jobs._manifest import MANIFEST, JobGroup, Manifest
from poprisk.jobs._operator_columns import Columns, operator_group
from poprisk.jobs._sources import open_run
from poprisk.operators import Diagonal, Method, Precision
from poprisk.runs import Run


class JobPlan:
    r"""Plans jobs into a directory, one group at a time; nothing is computed yet.

    Planning the same jobs again changes nothing, and finished jobs stay finished: the key of a job is a hash of
    everything that its result depends on, including the sources of the method. Only one process may plan at a time;
    workers see the jobs that existed when they started.

    Args:
        folder: The directory, on a file system shared by all workers; created if missing.
        threads: Number of threads of every worker; part of the plan because it affects the last bits of sums.
        device: ``"cpu"`` or ``"cuda"``; part of the plan for the same reason.
        memory_limit: Memory limit in bytes for the work on one tile, and later for the assembly of a kernel and for
            products with it, in addition to the model, examples and weights. It determines the tile size.

    Raises:
        HyperparameterError: an option is out of range.
        OSError: the directory is not writable.
    """

    def __init__(self, folder: str | Path, *, threads: int = 1, device: str = "cpu", memory_limit: int = 2**30) -> None:
        for name, value in (("threads", threads), ("memory_limit", memory_limit)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise HyperparameterError(f"{name} must be a whole number of at least 1, got {value!r}")
        if device not in ("cpu", "cuda"):
            raise HyperparameterError(f"device must be 'cpu' or 'cuda', without a number, got {device!r}")
        self.folder = writable_directory(folder)
        self._shared = {"threads": threads, "device": device}
        self._memory_limit = memory_limit

    def train_kernel(
        self,
        run: Run | str | Path,
        steps: int | Sequence[int],
        *,
        preconditioner: Diagonal | None = None,
        method: Method | str = Method.AUTO,
        dtype: torch.dtype | None = None,
        precision: Precision | str | None = None,
        side: int | None = None,
        name: str = "train kernel",
    ) -> list[str]:
        r"""The tiles of :math:`K_{SS} = J_S M J_S^\top`, on and above the diagonal, at the weights of some steps.

        Args:
            run: A run recorded into a directory, with a problem from ``Problem.build``; or that directory.
            steps: Steps before which the kernel is computed, from 0 to ``run.num_steps``.
            preconditioner: The diagonal of M: a number, or a vector like the weights.
            method: The algorithm, or its name.
            dtype: Data type of the kernel; default: that of the run.
            precision: Precision of the kernel products, see :class:`~poprisk.operators.Precision`; None means full
                precision. With it, tiles are float32 and stored with a bound on their error, and the largest of these
                is the ``bound`` of the matrix.
            side: Largest number of examples along a side of a tile; default: 512 outputs, or 2048 outputs in lower
                precision on a GPU.
            name: Name of the kernel; the step is appended.

        Returns:
            The name of each kernel, for :func:`~poprisk.jobs.assemble_matrix`.

        Raises:
            JobError: other processes cannot find the run or rebuild its problem.
            DataError: there is no such step, or a kernel of that name has other settings.
            HyperparameterError: the memory limit is too small for a tile of one example by one example, or the
                precision is unknown or does not go with the method or dtype.
            DeviceError: the device does not support the precision.
        """
        kind = {"preconditioner": preconditioner, "method": method, "dtype": dtype, "precision": precision}
        return self._kernels("train", run, steps, name, side=side, **kind)

    def cross_kernel(
        self,
        run: Run | str | Path,
        steps: int | Sequence[int],
        *,
        preconditioner: Diagonal | None = None,
        method: Method | str = Method.AUTO,
        dtype: torch.dtype | None = None,
        precision: Precision | str | None = None,
        side: int | None = None,
        name: str = "cross kernel",
    ) -> list[str]:
        r"""The tiles of :math:`K_{QS} = J_Q M J_S^\top`, where Q is the test set; arguments as in ``train_kernel``.

        Raises:
            JobError: other processes cannot find the run or rebuild its problem.
            DataError: there is no test set or no such step, or a kernel of that name has other settings.
            HyperparameterError: the memory limit is too small for a tile of one example by one example, or the
                precision is unknown or does not go with the method or dtype.
            DeviceError: the device does not support the precision.
        """
        kind = {"preconditioner": preconditioner, "method": method, "dtype": dtype, "precision": precision}
        return self._kernels("test", run, steps, name, side=side, **kind)

    def operator_columns(
        self,
        run: Run | str | Path,
        operator: str,
        *,
        start: int = 0,
        stop: int | None = None,
        columns: Columns = "identity",
        count: int | None = None,
        seed: int = 0,
        adjoint: bool = False,
        dtype: torch.dtype = torch.float64,
        columns_per_job: int = 16,
        name: str | None = None,
    ) -> str:
        """Products of a window's operator with columns of the identity (the matrix itself) or with random probes.

        Args:
            run: As in ``train_kernel``.
            operator: ``"propagator"``, ``"train_completion"``, ``"train_transfer"``, ``"test_transfer"`` or
                ``"dissipation_gramian"`` of :class:`poprisk.operators.Window`.
            start: First step of the window.
            stop: Step after the last one of the window; default: the end of the run.
            columns: ``"identity"``, or a kind of random probe: ``"rademacher"``, ``"gaussian"``, ``"sphere"``.
            count: Number of columns; default: all columns of the operator.
            seed: Seed for the random probes.
            adjoint: Use the adjoint of the operator.
            dtype: Data type of the operator.
            columns_per_job: Number of columns per job. The memory limit does not apply to these jobs.
            name: Name of the matrix; default: the operator and the window.

        Returns:
            The name, for :func:`~poprisk.jobs.assemble_matrix`.

        Raises:
            JobError: other processes cannot find the run or rebuild its problem.
            DataError: the window is empty or not within the run.
            HyperparameterError: unknown operator or kind of columns.
        """
        opened = open_run(run)
        last = opened.num_steps if stop is None else stop
        group = operator_group(
            opened,
            self.folder,
            name or f"{operator}{' adjoint' if adjoint else ''} of steps {start} to {last}",
            operator=operator,
            adjoint=adjoint,
            columns=columns,
            count=count,
            seed=seed,
            start=start,
            stop=stop,
            dtype=dtype,
            columns_per_job=columns_per_job,
            **self._shared,
        )
        return self._add(group)

    def k_fold(
        self,
        run: Run | str | Path,
        folds: int = 10,
        seed: int = 0,
        *,
        renormalize: bool = True,
        members_per_job: int = 1,
        name: str | None = None,
    ) -> str:
        """The trainings of :func:`poprisk.risk.k_fold`.

        Args:
            run: As in ``train_kernel``.
            folds: K, the number of folds.
            seed: Seed for the partition.
            renormalize: As in :func:`poprisk.risk.k_fold`.
            members_per_job: Number of trainings per job, trained together.
            name: Name of the resampling.

        Returns:
            The name, for :func:`~poprisk.jobs.assemble_resampled`.

        Raises:
            JobError: other processes cannot find the run or rebuild its problem.
            DataError: folds is out of range.
            RunError: the run cannot be retrained.
        """
        group = fold_group(
            open_run(run),
            self.folder,
            name or f"{folds}-fold, seed {seed}",
            folds=folds,
            seed=seed,
            renormalize=renormalize,
            members_per_job=members_per_job,
            **self._shared,
        )
        return self._add(group)

    def _kernels(
        self,
        rows: str,
        run: Run | str | Path,
        steps: int | Sequence[int],
        name: str,
        *,
        method: Method | str,
        precision: Precision | str | None,
        side: int | None,
        **options: Any,
    ) -> list[str]:
        if side is not None and side < 1:
            raise HyperparameterError(f"side must be at least 1 example, got {side}")
        opened = open_run(run)
        options |= {"side": side, "memory_limit": self._memory_limit, **self._shared, "method": Method.checked(method)}
        options["precision"] = None if precision is None else Precision.checked(precision)
        return [
            self._add(kernel_group(opened, self.folder, f"{name} at step {step}", step=step, rows=rows, **options))
            for step in ([steps] if isinstance(steps, int) else steps)
        ]

    def _add(self, group: JobGroup) -> str:
        there = Manifest.load(self.folder) if (self.folder / MANIFEST).exists() else Manifest(())
        wider = there.with_group(group)
        if wider is not there:
            wider.save(self.folder)
        return group.name
