r"""Which jobs there shall be: kernels at recorded steps, columns of operators, members of a resampling."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store import writable_directory
from poprisk.errors import HyperparameterError
from poprisk.jobs._fold_members import fold_group
from poprisk.jobs._kernel_tiles import kernel_group
from poprisk.jobs._manifest import MANIFEST, Group, Manifest
from poprisk.jobs._numerics import check_device
from poprisk.jobs._operator_columns import Columns, operator_group
from poprisk.jobs._sources import open_run
from poprisk.operators import Diagonal, Method, Precision
from poprisk.runs import Run


class Plan:
    r"""Writes the manifest of a directory of jobs, one group at a time; nothing is computed yet.

    Planning the same again changes nothing, and jobs that are done stay done: a job's key is a hash of all that its
    result depends on, down to the sources of the method. One process plans at a time; workers that run meanwhile see
    the jobs that were there when they came.

    Args:
        folder: The directory, on a file system that all workers share; made if missing.
        threads: Threads of every worker: with another number sums are split otherwise, and the last bits change.
        device: ``"cpu"`` or ``"cuda"``, for the same reason.
        memory_limit: Bytes that the work on one tile may take, and later the assembly of a kernel and products with
            it, beyond a process at rest with its model, examples and weights. Tile sizes follow from it.

    Raises:
        HyperparameterError: an option is out of range.
        OSError: the directory cannot be written.
    """

    def __init__(self, folder: str | Path, *, threads: int = 1, device: str = "cpu", memory_limit: int = 2**30) -> None:
        for name, value in (("threads", threads), ("memory_limit", memory_limit)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise HyperparameterError(f"{name} must be a whole number of at least 1, got {value!r}")
        self.folder = writable_directory(folder)
        self._shared = {"threads": threads, "device": check_device(device)}
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
            run: Recorded into a directory, its problem made with ``Problem.build``; or that directory.
            steps: Before which steps of it, from 0 to ``run.num_steps``.
            preconditioner: The diagonal of M: a number, or a vector like the weights.
            method: The algorithm, or its name.
            dtype: Of the kernel; the run's own by default.
            precision: Multiply Jacobian rows in lower precision, see :class:`~poprisk.operators._kernels.Precision`: tiles are
                float32, each kept with a bound on its error, and the matrix has the largest as ``bound``. By default
                in full.
            side: Examples along a side of a tile, at most; by default 512 outputs, and 2048 in lower precision on a
                GPU.
            name: What to call it; the step is added.

        Returns:
            The name of each kernel, for :func:`~poprisk.jobs.assemble_matrix`.

        Raises:
            JobError: other processes could not find the run, or not rebuild its problem.
            DataError: there is no such step; or a kernel of that name has other settings.
            HyperparameterError: the memory limit is too small for a tile of one example by one; or the precision is
                unknown, or goes with another method or dtype only.
            DeviceError: the device has no products of that precision.
        """
        kind = {
            "method": Method.checked(method),
            "dtype": dtype,
            "precision": None if precision is None else Precision.checked(precision),
        }
        return self._kernels("train", run, steps, name, side=side, preconditioner=preconditioner, **kind)

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
        r"""The tiles of :math:`K_{QS} = J_Q M J_S^\top`, with the problem's test set as Q; else as ``train_kernel``.

        Raises:
            JobError: other processes could not find the run, or not rebuild its problem.
            DataError: no test set, or no such step; or a kernel of that name has other settings.
            HyperparameterError: the memory limit is too small for a tile of one example by one; or the precision is
                unknown, or goes with another method or dtype only.
            DeviceError: the device has no products of that precision.
        """
        kind = {
            "method": Method.checked(method),
            "dtype": dtype,
            "precision": None if precision is None else Precision.checked(precision),
        }
        return self._kernels("test", run, steps, name, side=side, preconditioner=preconditioner, **kind)

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
            run: As of ``train_kernel``.
            operator: ``"propagator"``, ``"train_completion"``, ``"train_transfer"``, ``"test_transfer"`` or
                ``"dissipation_gramian"`` of :class:`poprisk.operators.Window`.
            start: First step of the window.
            stop: The step after its last; the run's end by default.
            columns: ``"identity"``, or a kind of probe: ``"rademacher"``, ``"gaussian"``, ``"sphere"``. The same probes
                come from :func:`poprisk.jobs._operator_columns.probe_columns`.
            count: How many; by default as many as the operator has columns.
            seed: Of the probes.
            adjoint: Take the adjoint.
            dtype: Of the operator.
            columns_per_job: Columns that go through the window together. The memory limit does not govern these jobs.
            name: What to call it; by default the operator's name and the window.

        Returns:
            The name, for :func:`~poprisk.jobs.assemble_matrix`.

        Raises:
            JobError: other processes could not find the run, or not rebuild its problem.
            DataError: the window is empty or outside the run.
            HyperparameterError: no such operator or columns.
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
            run: As of ``train_kernel``.
            folds: K.
            seed: Of the partition.
            renormalize: As of :func:`poprisk.risk.k_fold`.
            members_per_job: Trainings that are stacked in one job.
            name: What to call it.

        Returns:
            The name, for :func:`~poprisk.jobs.assemble_resampled`.

        Raises:
            JobError: other processes could not find the run, or not rebuild its problem.
            DataError: folds is out of range.
            RunError: the run cannot be trained again.
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
        side: int | None,
        **options: Any,
    ) -> list[str]:
        opened = open_run(run)
        if side is not None and side < 1:
            raise HyperparameterError(f"side must be at least 1 example, got {side}")
        return [
            self._add(
                kernel_group(
                    opened,
                    self.folder,
                    f"{name} at step {step}",
                    step=step,
                    rows=rows,
                    memory_limit=self._memory_limit,
                    side=side,
                    **options,
                    **self._shared,
                )
            )
            for step in ([steps] if isinstance(steps, int) else steps)
        ]

    def _add(self, group: Group) -> str:
        there = Manifest.load(self.folder) if (self.folder / MANIFEST).exists() else Manifest(())
        wider = there.with_group(group)
        if wider is not there:
            wider.save(self.folder)
        return group.name
