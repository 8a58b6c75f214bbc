"""Samples of a gradient, and what all variance sources share: their spread, a later rescaling, and their hooks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from poprisk.errors import DataError, GradientError

Hooked = TypeVar("Hooked", bound="HookedSource")


@dataclass(frozen=True)
class Samples:
    """Some samples: Σ (y - their mean)², Σ y, and their number; merging two sets is exact in exact arithmetic."""

    spread: Tensor
    total: Tensor
    count: int

    @classmethod
    def of(cls, rows: Tensor, divisor: float = 1.0, total_dtype: torch.dtype | None = None) -> "Samples":
        """From the rows of a matrix, each a sample times the divisor."""
        y = rows.detach().to(work_dtype(rows.dtype), copy=True)
        y = y if divisor == 1 else y.div_(divisor)
        total = y.sum(0, dtype=total_dtype)
        return cls(y.sub_((total / len(y)).to(y.dtype)).square_().sum(0), total, len(y))

    def part(self, where: slice, shape: tuple[int, ...]) -> "Samples":
        """The same of a stretch of the coordinates."""
        return Samples(self.spread[where].view(shape), self.total[where].view(shape), self.count)

    def merged(self, other: "Samples") -> "Samples":
        """Both sets together, by the update of Chan, Golub and LeVeque (1979)."""
        apart = (self.total / self.count - other.total / other.count).to(self.spread.dtype)
        weight = self.count * other.count / (self.count + other.count)
        spread = (self.spread + other.spread).addcmul_(apart, apart, value=weight)
        return Samples(spread, self.total + other.total, self.count + other.count)


def add_to_spread(spread: Tensor | None, total: Tensor, x: Tensor, n: int) -> Tensor:
    """Welford's update of Σ (x - mean)², in place, for a sample x after n others; ``total`` is the sum including x."""
    work = work_dtype(total.dtype)
    x = x.to(work)
    deviation = x - (total.to(work) - x) / n
    spread = torch.zeros_like(deviation) if spread is None else spread
    return spread.addcmul_(deviation, deviation, value=n / (n + 1))


class HookedSource:
    """A variance source with hooks, which stay until ``close()`` or the end of a ``with`` block."""

    def close(self) -> None:
        """Removes the hooks."""
        raise NotImplementedError

    def __enter__(self: Hooked) -> Hooked:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise DataError(
            f"{type(self).__name__} cannot be copied or pickled, because it has hooks on its parameters: copy or save "
            "the optimizer's state_dict() instead, and give the new optimizer a source of its own"
        )


def check_cleared(leftovers: Iterable[Tensor | None]) -> None:
    """Rejects gradients that were not zero before the first sample of a step, given their norms then."""
    norms = [norm for norm in leftovers if norm is not None]
    if norms and any(norm > 0 for norm in norms):
        raise GradientError(
            "gradients must be zero before the first micro-batch of a step, got some that were not: call "
            "optimizer.zero_grad() after every step, and create the source before the first backward"
        )


def gradient_norm(grad: Tensor) -> Tensor:
    """The norm of a gradient, in float32 or better, on its device."""
    return torch.linalg.vector_norm(grad.detach(), dtype=work_dtype(grad.dtype))


def gradient_ratio(grad: Tensor | None, norm: Tensor) -> Tensor:
    """Factor by which a gradient was rescaled since its norm was taken (clipping, unscaling); 1 where it is not known.

    >>> gradient_ratio(torch.tensor([3.0, 4.0]), torch.tensor(10.0))
    tensor(0.5000)
    """
    if grad is None:
        return torch.ones_like(norm)
    ratio = gradient_norm(grad) / norm
    return torch.where((norm > 0) & torch.isfinite(ratio), ratio, 1.0)


def rescale(variance: Tensor, ratio: Tensor) -> Tensor:
    """The variance of a gradient that was multiplied by the ratio."""
    return variance * ratio * ratio  # not the square first: it leaves float32's range for loss scales that do not


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Variances are kept in float32, or in float64 for float64 weights."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class Tally:
    """What is known of one parameter's samples beyond their sum, which ``.grad`` holds."""

    samples: int = 0
    present: Any = 0
    """Number of samples it had a part in; the others are zeros that are not in ``spread``."""
    spread: Tensor | None = None
    """Σ (y - center)², where the center is G / samples (with replicas: the mean of this replica)."""
    total: Tensor | None = None
    """With replicas: the sum over this replica's samples."""
    norm: Tensor | None = None
    leftover: Tensor | None = None


class Source(HookedSource):
    """What a transport collects for: the :class:`poprisk.RankVariance` of its model."""

    _tallies: dict[Tensor, Tally]
    _closed: bool

    def reset(self) -> None:
        """Discards the samples seen so far."""
        raise NotImplementedError

    def _tally_of(self, p: Tensor) -> Tally:
        return self._tallies.setdefault(p, Tally())


def used_here(*tensors: Tensor | None) -> None:
    """Keeps the memory of tensors from other streams until the current stream is done with them."""
    for x in tensors:
        if x is not None and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))
