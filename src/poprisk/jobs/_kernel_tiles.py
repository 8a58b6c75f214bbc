r"""Tiles (i, j, t) of tangent kernels: :math:`K_{SS}` or :math:`K_{QS}` at the weights of a recorded step t."""

from pathlib import Path

import torch
from torch import Tensor

from poprisk._core.autodiff import Inputs, take_examples
from poprisk.errors import HyperparameterError
from poprisk.jobs._manifest import JobGroup
from poprisk.jobs._sources import (
    dtype_name,
    dtype_named,
    examples_of,
    find_run,
    keep_vector,
    problem_digest,
    settings,
    take_vector,
    where_is,
)
from poprisk.operators import (
    Diagonal,
    Method,
    Precision,
    Side,
    TileMaker,
    aligned,
    check_supported,
    cut,
    plan_tiles,
)
from poprisk.runs import Run, check_first_steps

KIND = "poprisk.jobs._kernel_tiles:KernelTiles"
CODE = ("poprisk.operators._kernels", "poprisk._core.autodiff")
# Number of copies of a tile held while it is written, or read and transposed.
_COPIES = 4


class KernelTiles:
    """A kernel opened by a worker: model, weights and examples, and the two sides used last."""

    def __init__(self, group: JobGroup, folder: Path, device: torch.device) -> None:
        content, run = group.content, find_run(group, folder, device)
        dtype, precision = dtype_named(content["dtype"]), precision_of(group)
        if precision is not None and device.type == "cuda":
            check_supported(precision, device.type, torch.cuda.get_device_capability(device))
        model = run.model(dtype)
        check_first_steps(run, model)
        M = content["preconditioner"]
        M = take_vector(folder, M, device) if isinstance(M, str) else M
        w = take_vector(folder, content["weights"], device)
        self._rows = examples_of(run, content["rows"], dtype)
        self._columns = examples_of(run, content["columns"], dtype)
        self._symmetric = content["rows"] == content["columns"]
        first = take_examples(self._rows, slice(0, 1))
        self._maker = TileMaker(model, w, first, Method(content["method"]), content["chunk"], M, precision)
        self._maker.warm(first)
        self._sides: dict[tuple[str, int, int], Side] = {}

    def compute(self, indices: tuple[int, ...]) -> dict[str, Tensor]:
        """The block of rows a … b and columns c … d, in examples, and the bound on its error."""
        a, b, c, d = indices
        names = (("rows", a, b), ("rows" if self._symmetric else "columns", c, d))
        self._sides = {name: side for name, side in self._sides.items() if name in names}
        for name in names:
            if name not in self._sides:
                self._sides[name] = self._maker.side(self._examples(*name))
        block = self._maker.block(*(self._sides[name] for name in names))
        if self._maker.bound is None:
            return {"block": block}
        return {"block": block, "bound": torch.tensor(self._maker.bound, dtype=torch.float64)}

    def _examples(self, which: str, start: int, stop: int) -> Inputs:
        inputs = self._rows if which == "rows" else self._columns
        taken = take_examples(inputs, slice(start, stop))
        return tuple(aligned(x) for x in taken) if isinstance(taken, tuple) else aligned(taken)


def kernel_group(
    run: Run,
    folder: Path,
    name: str,
    *,
    step: int,
    rows: str,
    preconditioner: Diagonal | None,
    method: Method,
    dtype: torch.dtype | None,
    precision: Precision | None,
    memory_limit: int,
    side: int | None,
    threads: int,
    device: str,
) -> JobGroup:
    """The jobs of one kernel; the memory limit determines the tile size."""
    digits = dtype_name(dtype, run)
    if precision is not None:
        _check_rounded(precision, digits, device)
    exact = dtype_named(digits)
    model = run.model(exact)
    check_first_steps(run, model)
    w = aligned(run.weights(step).to(model.weights))
    left, right = examples_of(run, rows, exact), examples_of(run, "train", exact)
    symmetric = rows == "train"
    M = preconditioner.detach().cpu() if isinstance(preconditioner, Tensor) else preconditioner
    plan = plan_tiles(
        model,
        w,
        left,
        None if symmetric else right,
        preconditioner=M,
        method=method,
        precision=precision,
        memory=memory_limit,
        separate=True,
        side=side,
        copies=_COPIES,
        device=torch.device(device),
    )
    counts = [(x[0] if isinstance(x, tuple) else x).shape[0] for x in (left, right)]
    content = {
        **settings(problem_digest(run), "problem", CODE, threads, device),
        "weights": keep_vector(folder, w.cpu()),
        "rows": rows,
        "columns": "train",
        "dtype": digits,
        "method": plan.method.value,
        "chunk": plan.chunk,
        "preconditioner": keep_vector(folder, M) if isinstance(M, Tensor) else M,
        **({} if precision is None else {"precision": precision.value}),
    }
    where = {
        "run": where_is(run, folder),
        "code": list(CODE),
        "step": step,
        "layout": "tiles",
        "outputs": plan.outputs,
        "shape": [counts[0] * plan.outputs, counts[1] * plan.outputs],
        "symmetric": symmetric,
        "dtype": digits,
        "memory_limit": memory_limit,
        "tile_bytes": plan.bytes,
    }
    sides = [list(cut(count, plan.rows, precision)) for count in counts]
    return JobGroup(name, KIND, content, _tiles(sides[0], None if symmetric else sides[1]), where)


def precision_of(group: JobGroup) -> Precision | None:
    """Precision of the kernel products; None for full precision.

    >>> precision_of(JobGroup("K", KIND, {"precision": "float16"}, [])), precision_of(JobGroup("K", KIND, {}, []))
    (<Precision.FLOAT16: 'float16'>, None)
    """
    name = group.content.get("precision")
    return None if name is None else Precision(name)


def _check_rounded(precision: Precision, dtype: str, device: str) -> None:
    """Refuses a precision that no worker could use, or that would have no effect."""
    check_supported(precision, device)
    if dtype != "float32":
        raise HyperparameterError(
            f"precision={precision.value!r} makes float32 tiles from float32 Jacobians, but the dtype is "
            f"{dtype}: pass dtype=torch.float32, or leave precision out"
        )


def _tiles(rows: list[slice], columns: list[slice] | None) -> list[list[int]]:
    """All tiles row by row; for a symmetric kernel, those on and above the diagonal."""
    pairs = ((row, column) for i, row in enumerate(rows) for column in (rows[i:] if columns is None else columns))
    return [[row.start, row.stop, column.start, column.stop] for row, column in pairs]
