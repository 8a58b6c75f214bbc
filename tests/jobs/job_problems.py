"""Problems and kinds of jobs that a worker in another process can import."""

import time
from pathlib import Path

import torch
from torch import nn

from poprisk.errors import DataError
from poprisk.runs._problem import Problem


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


class Squares:
    """Jobs without a model: the square of the index, after some time; ``content`` may name indices that fail."""

    def __init__(self, group, folder: Path, device: torch.device) -> None:
        self._content, self._folder = group.content, folder

    def compute(self, indices):
        (i,) = indices
        time.sleep(self._content.get("seconds", 0.0))
        if i in self._content.get("failing", ()) and not (self._folder / "mended").exists():
            raise DataError(f"no square of {i} today")
        return {"block": torch.full((4, 4), float(i * i))}
