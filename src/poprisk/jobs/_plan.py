"""Plans jobs: kernels at recorded steps, columns of operators, trainings of a K-fold."""

import os
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poprisk._core.cluster import current_cluster, worker_memory
from poprisk._core.linalg import probe_columns
from poprisk._core.store import TiledArray, add_tiled, directory_of, fingerprint, open_store
from poprisk.errors import DataError, HyperparameterError
from poprisk.jobs._engine import JobsDone, run_jobs
from poprisk.jobs._kinds import BUFFER, KINDS, NOTES, NOTES_BYTES, examples_of
from poprisk.operators import Diagonal, Method, Precision, TileMaker, Window, aligned, check_supported, plan_tiles
from poprisk.risk import k_fold_members
from poprisk.runs import Run, check_first_steps, code_digest, problem_digest, run_digest

OPERATORS = ("propagator", "train_completion", "train_transfer", "test_transfer", "dissipation_gramian")
# Number of copies of a tile held while it is written, or read and transposed.
_COPIES = 6


class JobPlan:
    r"""Plans jobs into a store; nothing is computed until :meth:`run` or :func:`run_jobs`.

    Planning the same jobs again changes nothing, and finished jobs stay finished: the store has a hash of all that the
    numbers depend on, including the sources of the method.

    Args:
        store: A directory, an address that fsspec knows (``s3://…``), or a Zarr store; all workers must see it.
        threads: Number of threads of every task; part of the plan because it affects the last bits of sums.
        device: ``"cpu"`` or ``"cuda"``; part of the plan for the same reason.
        memory_limit: Memory limit in bytes for the work on one tile, in addition to the model, examples and weights.
            It determines the tile size. Default: half of what a worker of the enclosing ``poprisk.cluster`` has, at
            most 1 GiB.

    Raises:
        HyperparameterError: an option is out of range.
    """

    def __init__(self, store: Any, *, threads: int = 1, device: str = "cpu", memory_limit: int | None = None) -> None:
        if memory_limit is None:
            memory_limit = min(2**30, (worker_memory(current_cluster()) or 2**31) // 2)
        for name, value in (("threads", threads), ("memory_limit", memory_limit)):
            _check_count(name, value)
        if device not in ("cpu", "cuda"):
            raise HyperparameterError(f"device must be 'cpu' or 'cuda', without a number, got {device!r}")
        self.store, self._runs = open_store(store), {}
        self._shared, self._memory_limit = {"threads": threads, "device": device}, memory_limit

    def run(self, **options: Any) -> JobsDone:
        """Do what is not done yet, with the runs that were passed; options as in :func:`run_jobs`."""
        return run_jobs(self.store, runs=self._runs, **options)

    def train_kernel(self, run: Run | str | Path, steps: int | Sequence[int], **options: Any) -> list[str]:
        r"""The tiles of :math:`K_{SS} = J_S M J_S^\top`, on and above the diagonal, at the weights of some steps.

        Args:
            run: A run with its problem, or its directory. For workers in other processes it must be in a directory.
            steps: Steps before which the kernel is computed, from 0 to ``run.num_steps``.
            options: ``preconditioner``: the diagonal of M, a number or a vector like the weights. ``method``: the
                algorithm. ``dtype``: of the kernel; default: that of the run. ``precision`` of the products, see
                :class:`~poprisk.operators.Precision`; tiles are then float32 and the matrix has a ``bound``. ``side``:
                largest number of examples along a side of a tile. ``name`` of the kernel; the step is appended.

        Returns:
            The name of each kernel, for :func:`~poprisk.jobs.open_matrix`.

        Raises:
            DataError: there is no such step, or a kernel of that name has other settings.
            HyperparameterError: the memory limit is too small for a tile of one example by one example, or the
                precision is unknown or does not go with the method or dtype.
            DeviceError: the device does not support the precision.
        """
        return self._kernels("train", run, steps, **{"name": "train kernel", **options})

    def cross_kernel(self, run: Run | str | Path, steps: int | Sequence[int], **options: Any) -> list[str]:
        r"""The tiles of :math:`K_{QS} = J_Q M J_S^\top`, where Q is the test set; all else as in ``train_kernel``."""
        return self._kernels("test", run, steps, **{"name": "cross kernel", **options})

    def operator_columns(
        self,
        run: Run | str | Path,
        operator: str,
        *,
        start: int = 0,
        stop: int | None = None,
        columns: str = "identity",
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
            name: Name of the matrix, which is returned for ``open_matrix``; default: the operator and the window.

        Raises:
            DataError: the window is empty or not within the run.
            HyperparameterError: unknown operator or kind of columns.
        """
        opened = _opened(run)
        if operator not in OPERATORS:
            raise HyperparameterError(f"operator must be one of {list(OPERATORS)}, got {operator!r}")
        last = opened.num_steps if stop is None else stop
        if not 0 <= start < last <= opened.num_steps:
            raise DataError(
                f"a window needs 0 ≤ start < stop ≤ {opened.num_steps}, the run's steps, got {start} and {last}"
            )
        window = Window.of_run(opened, start=start, stop=start + 1, dtype=dtype, dense=False)  # only to get sizes
        sizes = [window.num_test_outputs if operator == "test_transfer" else window.num_outputs, window.num_outputs]
        rows, inner = sizes[::-1] if adjoint else sizes
        count = inner if count is None else count
        if count < 1 or (columns == "identity" and count > inner) or not inner:
            raise HyperparameterError(f"the operator has {inner} columns, got count={count}")
        probe_columns(1, 0, 1, columns, seed)
        _check_count("columns_per_job", columns_per_job)
        where = {"shape": [rows, count], "tile": [rows, min(columns_per_job, count)], "dtype": _digits(dtype)}
        if operator == "dissipation_gramian" and columns == "identity" and count == inner:
            where["known_symmetric"] = True
        content = {"start": start, "stop": last, "operator": operator, "adjoint": adjoint, "columns": columns}
        content |= {"digest": run_digest(opened, last), "seed": seed, "dtype": where["dtype"]}
        name = name or f"{operator}{' adjoint' if adjoint else ''} of steps {start} to {last}"
        return self._add(opened, name, "columns", content, where)

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
            name: Name of the resampling, which is returned for ``open_resampled``.

        Raises:
            DataError: folds is out of range.
            RunError: the run has no problem.
        """
        opened = _opened(run)
        _check_count("members_per_job", members_per_job)
        count, d = k_fold_members(opened, folds, seed, renormalize=renormalize).count, opened.num_weights
        each = min(members_per_job, count)
        where = {"shape": [count, d], "tile": [each, d], "dtype": _digits(opened.layout.dtype)}
        content = {"digest": run_digest(opened), "folds": folds, "seed": seed, "renormalize": renormalize}
        arrays = {NOTES: {"shape": [ceil(count / each), NOTES_BYTES], "chunks": [1, NOTES_BYTES], "dtype": "uint8"}}
        for key, b in opened.module(opened.layout.dtype).named_buffers():
            sizes = {"shape": [count, *b.shape], "chunks": [each, *(max(1, n) for n in b.shape)]}
            arrays[f"{BUFFER}{key}"] = {**sizes, "dtype": str(b.dtype).removeprefix("torch.")}
        return self._add(opened, name or f"{folds}-fold, seed {seed}", "folds", content, where, arrays)

    def _kernels(
        self,
        rows: str,
        run: Run | str | Path,
        steps: int | Sequence[int],
        *,
        name: str,
        preconditioner: Diagonal | None = None,
        method: Method | str = Method.AUTO,
        dtype: torch.dtype | None = None,
        precision: Precision | str | None = None,
        side: int | None = None,
    ) -> list[str]:
        _check_count("side", 1 if side is None else side)
        opened, method, device = _opened(run), Method.checked(method), self._shared["device"]
        digits = _digits(dtype or opened.layout.dtype)
        precision = None if precision is None else Precision.checked(precision)
        if precision is not None:
            check_supported(precision, device)
            if digits != "float32":
                raise HyperparameterError(
                    f"precision={precision.value!r} makes float32 tiles from float32 Jacobians, but the dtype is "
                    f"{digits}: pass dtype=torch.float32, or leave precision out"
                )
        model = opened.model(getattr(torch, digits))
        check_first_steps(opened, model)
        sides = [examples_of(opened, which, model.weights.dtype) for which in (rows, "train")]
        counts = [len(x[0] if isinstance(x, tuple) else x) for x in sides]
        M = preconditioner.detach().cpu() if isinstance(preconditioner, Tensor) else preconditioner
        kind, sizes = {"preconditioner": M, "precision": precision}, {"side": side, "memory": self._memory_limit}
        inputs, names = (sides[0], None if rows == "train" else sides[1]), []
        for step in [steps] if isinstance(steps, int) else steps:
            w = aligned(opened.weights(step).to(model.weights))
            how = {"method": method, "separate": True, "copies": _COPIES, "device": torch.device(device)}
            plan = plan_tiles(model, w, *inputs, **kind, **sizes, **how)
            maker = TileMaker(model, w, sides[0], plan.method, plan.chunk, recipe=plan.recipe, graphs=False, **kind)
            vectors = {"weights": w} | ({"preconditioner": M} if isinstance(M, Tensor) else {})
            content = {"digest": problem_digest(opened), "rows": rows, "dtype": digits, "method": plan.method.value}
            content |= {"precision": precision and precision.value, "preconditioner": M}
            content |= {key: fingerprint({key: x}) for key, x in vectors.items()}
            sizes_of = zip(counts, (plan.rows, plan.columns), strict=True)
            tile = [plan.outputs * (size if precision else ceil(n / ceil(n / size))) for n, size in sizes_of]
            where = {"shape": [n * plan.outputs for n in counts], "tile": tile, "dtype": digits, "bound": maker.bound}
            where |= {"symmetric": rows == "train", "outputs": plan.outputs, "chunk": plan.chunk, "step": step}
            where |= {"memory_limit": self._memory_limit, "tile_bytes": plan.bytes}
            names.append(self._add(opened, f"{name} at step {step}", "kernel", content, where, vectors, side))
        return names

    def _add(
        self, run: Run, name: str, kind: str, content: dict, where: dict, arrays: Any = (), side: Any = None
    ) -> str:
        folder = directory_of(self.store)
        path = run.path and (os.path.relpath(run.path.resolve(), folder) if folder else str(run.path.resolve()))
        content = {**content, **self._shared, "code": code_digest(*KINDS[kind].CODE)}
        planned = TiledArray(self.store, name, kind, content, {"symmetric": False, **where, "run": path})
        add_tiled(planned, dict(arrays), same_tiles=side is not None)
        self._runs[name] = run
        return name


def _opened(run: Run | str | Path) -> Run:
    found = run if isinstance(run, Run) else Run.load(run)
    found.problem  # noqa: B018  # refuses a run without a problem
    return found


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HyperparameterError(f"{name} must be a whole number of at least 1, got {value!r}")


def _digits(dtype: torch.dtype) -> str:
    found = str(dtype).removeprefix("torch.")
    if found not in ("float32", "float64"):
        raise DataError(f"jobs compute in float32 or float64, got {found}: pass dtype=torch.float32")
    return found
