"""What is known of a parameter's samples, and what the transports under DDP and FSDP2 share."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass
class Tally:
    """What is known of one parameter's samples beyond their sum, which ``.grad`` holds."""

    samples: int = 0
    present: Any = 0
    """In how many of them it had a part; the others are zeros that are not in ``spread``."""
    spread: Tensor | None = None
    """Σ (y - center)², where the center is G / samples (of replicas: their own mean)."""
    total: Tensor | None = None
    """Of replicas: the sum over their own samples."""
    norm: Tensor | None = None
    leftover: Tensor | None = None


@runtime_checkable
class Source(Protocol):
    """The :class:`poprisk.RankVariance` that a transport collects for."""

    _tallies: dict[Tensor, Tally]
    _closed: bool

    def reset(self) -> None:
        """Forgets the samples seen so far."""
        ...

    def _tally_of(self, p: Tensor) -> Tally: ...


def used_here(*tensors: Tensor | None) -> None:
    """Their memory is not given away before the current stream is done with them, whichever stream they come from."""
    for x in tensors:
        if x is not None and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))
