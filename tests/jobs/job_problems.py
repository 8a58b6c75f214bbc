"""Problems and kinds of jobs that a worker in another process can import."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poprisk._core.store import VALUES, TiledArray, add_tiled, append_line, open_store
from poprisk.errors import DataError
from poprisk.jobs._kinds import KernelTiles
from poprisk.runs._problem import Problem
from poprisk.runs._training import train


def network(inputs: int = 3, width: int = 6, outputs: int = 2, norm: bool = False) -> nn.Module:
    between = [nn.BatchNorm1d(width)] if norm else []
    return nn.Sequential(nn.Linear(inputs, width), *between, nn.Tanh(), nn.Linear(width, outputs))


def blobs(
    n: int = 20, test: int = 7, inputs: int = 3, width: int = 6, outputs: int = 2, seed: int = 0, norm: bool = False
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n + test, inputs, generator=generator)
    y = (x[:, 0] > 0).long() + (outputs - 2) * (x[:, 1] > 1).long()
    sizes = {"inputs": inputs, "width": width, "outputs": outputs, **({"norm": True} if norm else {})}
    rest = None if test == 0 else (x[n:], y[n:])
    return Problem(network, "cross_entropy", x[:n], y[:n], arguments=sizes, test=rest, name="blobs")


def line(n: int = 9, test: int = 4) -> Problem:
    """One output."""
    x = torch.randn(n + test, 3, generator=torch.Generator().manual_seed(3))
    y = x.sum(1, keepdim=True)
    sizes = {"inputs": 3, "width": 6, "outputs": 1}
    return Problem(network, "squared", x[:n], y[:n], arguments=sizes, test=(x[n:], y[n:]), name="line")


class Logged:
    """Mixed into a kind of job: a line for each tile that is begun, and one for each that is stored."""

    def compute(self, cell):
        mixed: Any = self
        log(mixed._group, "start", cell)
        found = KernelTiles.compute(mixed, cell)
        time.sleep(float(os.environ.get("TILE_SECONDS", "0")))
        return found


class LoggedTiles(Logged, KernelTiles):
    pass


class Squares:
    """Jobs without a model: the square of the index, after some time; ``content`` may name indices that fail."""

    CODE = ()

    def __init__(self, group, run, device: torch.device) -> None:
        self._group = group

    def compute(self, cell):
        content = self._group.content
        log(self._group, "start", cell)
        time.sleep(content.get("seconds", 0.0))
        if cell[1] in content.get("failing", ()) and not Path(content["log"]).with_name("mended").exists():
            raise DataError(f"no square of {cell[1]} today")
        return {VALUES: torch.full((4, 4), float(cell[1] ** 2))}


def log(group, event, cell):
    path = group.content.get("log") or os.environ.get("JOBS_LOG")
    if path:
        append_line(path, f"{event} {cell[0]} {cell[1]} {os.getpid()}")


def begun(path) -> list[tuple[int, int]]:
    """The tiles of a log, as often as they were begun."""
    lines = [line.split() for line in Path(path).read_text().splitlines()] if Path(path).exists() else []
    return [(int(i), int(j)) for event, i, j, _ in lines if event == "start"]


def plan_squares(folder: Path, count: int = 6, run=None, **content):
    """A group of squares in ``folder/store``, with the options of ``run_jobs`` that do it."""
    content = {"threads": 1, "device": "cpu", "log": str(folder / "log"), **content}
    where = {"shape": [4, 4 * count], "tile": [4, 4], "dtype": "float32", "symmetric": False, "run": None}
    group = add_tiled(TiledArray(open_store(folder / "store"), "squares", "squares", content, where), {})
    run = run or train(blobs(), torch.optim.SGD, 1, progress=False)
    return group, {"runs": {"squares": run}, "client": "in-process"}


KEPT = []


def fill(most: int, item: int) -> int:
    """Take 88% of a worker's memory and keep it, and work for a moment."""
    used = 1024 * int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0])
    if not KEPT:
        KEPT.append(b"x" * max(0, int(0.88 * most) - used))
    time.sleep(0.3)
    return item
