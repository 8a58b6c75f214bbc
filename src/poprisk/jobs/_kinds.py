r"""What jobs compute: tiles of tangent kernels, columns of a window's operators, weights of retrained models."""

import json
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from poprisk._core.autodiff import Inputs, take_examples
from poprisk._core.linalg import probe_columns
from poprisk._core.store import VALUES, Cell, TiledArray
from poprisk.errors import DataError, JobError
from poprisk.operators import Method, Precision, Side, TileMaker, Window, aligned, check_supported
from poprisk.risk import Members, cast, k_fold_members, moved, retrain
from poprisk.runs import Run, check_first_steps, code_digest, problem_digest, run_digest

NOTES, NOTES_BYTES, BUFFER = "notes", 4096, "buffer."


class Computation(Protocol):
    """A group opened by a worker: a class that is called with the group, the run and the device."""

    def compute(self, cell: Cell) -> dict[str, Tensor]:
        """The tile, and what belongs to it; its bits must not depend on the worker or on earlier tiles."""
        ...


class KernelTiles:
    r"""Tiles of :math:`K_{SS}` or :math:`K_{QS}` at the weights of a recorded step, and the two sides used last."""

    CODE: ClassVar = ("poprisk.operators._kernels", "poprisk._core.autodiff")

    def __init__(self, group: TiledArray, run: Run, device: torch.device) -> None:
        content = group.content
        _check_planned(group, run, problem_digest(run), self.CODE)
        dtype, precision = getattr(torch, content["dtype"]), content["precision"] and Precision(content["precision"])
        if precision and device.type == "cuda":
            check_supported(precision, device.type, torch.cuda.get_device_capability(device))
        model = run.model(dtype)
        check_first_steps(run, model)
        M = content["preconditioner"]
        M = aligned(group.whole("preconditioner").to(device)) if isinstance(M, str) else M
        w = aligned(group.whole("weights").to(device))
        self._group, self._examples = group, [examples_of(run, which, dtype) for which in (content["rows"], "train")]
        first = take_examples(self._examples[0], slice(0, 1))
        self._maker = TileMaker(model, w, first, Method(content["method"]), group.where["chunk"], M, precision)
        self._maker.warm(first)
        self._sides: dict[tuple[int, int, int], Side] = {}

    def compute(self, cell: Cell) -> dict[str, Tensor]:
        """The block of a tile."""
        p, one = self._group.where["outputs"], self._group.where["symmetric"]
        parts = enumerate(self._group.region(cell))
        names = [(0 if one else axis, part.start // p, part.stop // p) for axis, part in parts]
        self._sides = {name: side for name, side in self._sides.items() if name in names}
        for name in names:
            if name not in self._sides:
                self._sides[name] = self._maker.side(self._taken(*name))
        return {VALUES: self._maker.block(*(self._sides[name] for name in names))}

    def _taken(self, axis: int, start: int, stop: int) -> Inputs:
        taken = take_examples(self._examples[axis], slice(start, stop))
        return tuple(aligned(x) for x in taken) if isinstance(taken, tuple) else aligned(taken)


class OperatorColumns:
    """Products of a window's operator with columns, matrix-free."""

    CODE: ClassVar = ("poprisk.operators", "poprisk.runs", "poprisk._core.linalg", "poprisk._core.autodiff")

    def __init__(self, group: TiledArray, run: Run, device: torch.device) -> None:
        content = group.content
        _check_planned(group, run, run_digest(run, content["stop"]), self.CODE)
        steps = {"start": content["start"], "stop": content["stop"]}
        window = Window.of_run(run, **steps, dtype=getattr(torch, content["dtype"]), dense=False)
        operator = getattr(window, content["operator"])
        self._operator = operator.T if content["adjoint"] else operator
        self._group, self._probes = group, (content["columns"], content["seed"])

    def compute(self, cell: Cell) -> dict[str, Tensor]:
        """Some of the columns."""
        part, A = self._group.region(cell)[1], self._operator
        X = probe_columns(A.shape[1], part.start, part.stop, *self._probes, A.dtype)
        return {VALUES: A @ X.to(A.device)}


class FoldMembers:
    """A run trained again without some of the folds; a row of the array is the weights of one member."""

    CODE: ClassVar = ("poprisk.risk", "poprisk.runs", "poprisk.optim.rules", "poprisk._core.autodiff")

    def __init__(self, group: TiledArray, run: Run, device: torch.device) -> None:
        content = group.content
        _check_planned(group, run, run_digest(run), self.CODE)
        self._group, self._run = group, run
        self._members = k_fold_members(run, content["folds"], content["seed"], renormalize=content["renormalize"])

    def compute(self, cell: Cell) -> dict[str, Tensor]:
        """The last weights of some members, their buffers, and notes on what was taken from the recorded run."""
        found = retrain(self._run, Members(self._members.weights[self._group.region(cell)[0]]), progress=False)
        own = found.buffers.get(found.step)
        text = json.dumps({"notes": found.notes, "alone": own is not None}).encode().ljust(NOTES_BYTES)
        first = dict(self._run.module(found.weights.dtype).named_buffers()) if own else {}
        stacked = {name: [each.get(name, b) for each in own or ()] for name, b in first.items()}
        buffers = {f"{BUFFER}{name}": torch.stack(each) for name, each in stacked.items()}
        return {**buffers, NOTES: torch.frombuffer(bytearray(text), dtype=torch.uint8)[None], VALUES: found.weights}


KINDS: dict[str, Any] = {"kernel": KernelTiles, "columns": OperatorColumns, "folds": FoldMembers}


def _check_planned(group: TiledArray, run: Run, digest: str, code: tuple[str, ...]) -> None:
    if code_digest(*code) != group.content["code"]:
        raise JobError(
            f"{group.name!r} was planned by another version of the code: use that one, or plan into a new store"
        )
    if digest != group.content["digest"]:
        raise JobError(f"{run.path} is not the run that {group.name!r} was planned with: plan into a new store")


def examples_of(run: Run, which: str, dtype: torch.dtype) -> Inputs:
    """All training or all test inputs."""
    if which == "train":
        return run.problem.batch(dtype=dtype)[0]
    if run.problem.test is None:
        raise DataError(f"problem {run.problem.name!r} has no test set: pass test=… to Problem, or use train_kernel")
    inputs = moved(run.problem.test[0], run.problem.device)
    return tuple(cast(x, dtype) for x in inputs) if isinstance(inputs, tuple) else cast(inputs, dtype)
