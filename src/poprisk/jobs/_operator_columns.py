r"""Columns of the operators of a window by products :math:`A X`, for columns X of the identity or random probes."""

from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import slices
from poprisk._core.linalg import probes
from poprisk.errors import DataError, HyperparameterError
from poprisk.jobs._manifest import JobGroup, content_key
from poprisk.jobs._sources import dtype_named, find_run, run_digest, settings, where_is
from poprisk.operators import Window
from poprisk.runs import Run

KIND = "poprisk.jobs._operator_columns:OperatorColumns"
CODE = ("poprisk.operators", "poprisk.runs", "poprisk._core.linalg", "poprisk._core.autodiff", "poprisk.optim.rules")
OPERATORS = ("propagator", "train_completion", "train_transfer", "test_transfer", "dissipation_gramian")
SYMMETRIC = ("dissipation_gramian",)
Columns = Literal["identity", "rademacher", "gaussian", "sphere"]


class OperatorColumns:
    """A window opened by a worker, matrix-free."""

    def __init__(self, group: JobGroup, folder: Path, device: torch.device) -> None:
        content = group.content
        run = find_run(group, folder, device)
        window = Window.of_run(
            run, start=content["start"], stop=content["stop"], dtype=dtype_named(content["dtype"]), dense=False
        )
        operator = getattr(window, content["operator"])
        self._operator = operator.T if content["adjoint"] else operator
        self._columns, self._seed = content["columns"], content["seed"]

    def compute(self, indices: tuple[int, ...]) -> dict[str, Tensor]:
        """Columns a … b."""
        start, stop = indices
        X = probe_columns(self._operator.shape[1], start, stop, self._columns, self._seed, self._operator.dtype)
        return {"block": self._operator @ X.to(self._operator.device)}


def probe_columns(
    n: int, start: int, stop: int, columns: str, seed: int, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "n k"]:
    """Columns ``start`` … ``stop`` of the identity, or of an infinite sequence of random probes.

    Each probe has a seed of its own, so that the same probes come from any start.

    Raises:
        HyperparameterError: unknown kind of columns.

    >>> probe_columns(3, 1, 3, "identity", 0, torch.float32)
    tensor([[0., 0.],
            [1., 0.],
            [0., 1.]])
    >>> whole = probe_columns(5, 0, 4, "rademacher", seed=7)
    >>> torch.equal(whole[:, 2:], probe_columns(5, 2, 4, "rademacher", seed=7))
    True
    """
    X = torch.zeros(n, stop - start, dtype=dtype)
    if columns == "identity":
        X[start:stop].fill_diagonal_(1)
        return X
    if columns not in ("rademacher", "gaussian", "sphere"):
        raise HyperparameterError(
            f"columns must be 'identity', 'rademacher', 'gaussian' or 'sphere', got {columns!r}: try 'rademacher'"
        )
    for place in range(start, stop):
        generator = torch.Generator().manual_seed(int(content_key([seed, place])[:12], 16))
        X[:, place - start] = probes(n, 1, columns, generator, X).squeeze(1)
    return X


def operator_group(
    run: Run,
    folder: Path,
    name: str,
    *,
    operator: str,
    adjoint: bool,
    columns: str,
    count: int | None,
    seed: int,
    start: int,
    stop: int | None,
    dtype: torch.dtype,
    columns_per_job: int,
    threads: int,
    device: str,
) -> JobGroup:
    """The jobs of some columns of one operator."""
    if operator not in OPERATORS:
        raise HyperparameterError(f"operator must be one of {list(OPERATORS)}, got {operator!r}")
    if columns_per_job < 1:
        raise HyperparameterError(f"columns_per_job must be at least 1, got {columns_per_job}")
    stop = run.num_steps if stop is None else stop
    if not 0 <= start < stop <= run.num_steps:
        raise DataError(f"a window needs 0 ≤ start < stop ≤ {run.num_steps}, the run's steps, got {start} and {stop}")
    window = Window.of_run(run, start=start, stop=start + 1, dtype=dtype, dense=False)  # only to get sizes
    N, M = window.num_outputs, window.num_test_outputs
    rows, inner = (M if operator == "test_transfer" else N), N
    if adjoint:
        rows, inner = inner, rows
    count = inner if count is None else count
    if count < 1 or (columns == "identity" and count > inner) or not inner:
        raise HyperparameterError(f"the operator has {inner} columns, got count={count}")
    probe_columns(1, 0, 1, columns, seed)
    digits = str(dtype).removeprefix("torch.")
    content = {
        **settings(run_digest(run, stop), "steps", CODE, threads, device),
        "start": start,
        "stop": stop,
        "dtype": digits,
        "operator": operator,
        "adjoint": adjoint,
        "columns": columns,
        "seed": seed,
    }
    where = {
        "run": where_is(run, folder),
        "code": list(CODE),
        "stop": stop,
        "layout": "columns",
        "shape": [rows, count],
        "symmetric": operator in SYMMETRIC and columns == "identity" and count == inner,
        "dtype": digits,
    }
    return JobGroup(name, KIND, content, [[part.start, part.stop] for part in slices(count, columns_per_job)], where)
