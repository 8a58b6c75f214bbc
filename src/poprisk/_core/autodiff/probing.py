"""One look at a batch function: that its examples do not see each other, and how much a forward pass holds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from poprisk.errors import DataError


@dataclass(frozen=True)
class Probe:
    """What was found; it holds for all examples of one shape."""

    outputs: int
    """p, the numbers one example gives."""
    held: int
    """Numbers that the forward pass computes for one example: a bound on what a tangent or a cotangent needs."""


_SAME_SIZE, _OTHER_SIZE = 4.0, 100.0
"""Roundings of the model's largest number by which outputs may differ, in batches of the same and of other sizes."""


class _Largest(TorchDispatchMode):
    """Finds the largest finite number that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(part, Tensor) and part.is_floating_point() and part.numel():
                finite = part.detach().abs().nan_to_num(0.0, 0.0, 0.0)
                finite = finite.where(finite < _MASK, 0.0)
                self.largest = max(self.largest, float(finite.max()))
        return result


_MASK = 1e9
"""Numbers beyond it are masks, which are added before a softmax and take no part in what is computed."""


class _Count(TorchDispatchMode):
    """Counts the numbers in every new tensor; views and tensors written in place are not new."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, (tuple, list)) else (result,)
        for part, returned in zip(parts, func._schema.returns, strict=False):
            if isinstance(part, Tensor) and returned.alias_info is None:
                self.numbers += part.numel()
        return result


def probe(outputs: Callable[[list[int]], Tensor], examples: int) -> Probe:
    """Runs the first and the last example together and apart.

    >>> probe(lambda rows: torch.ones(len(rows), 3) * 2, examples=5)
    Probe(outputs=3, held=6)
    """
    first, alone = _counted(outputs, [0])
    if examples == 1:
        return Probe(first.numel(), alone)
    last, _ = _counted(outputs, [examples - 1])
    pair, together = _counted(outputs, [0, examples - 1])
    apart = torch.cat([first, last])
    # The kernels of a batch of one may sum in another order; half the digits are more than enough to see mixing.
    slack = torch.finfo(pair.dtype).eps ** 0.5
    largest = float(apart.abs().nan_to_num(0.0, 0.0, 0.0).max())
    if not torch.allclose(pair, apart, rtol=slack, atol=slack * largest, equal_nan=True) and not _is_rounding(
        outputs, [0, examples - 1], pair, apart, slack * largest
    ):
        raise DataError(
            "every example must be mapped by itself, but the outputs of an example changed with the other examples in "
            "its batch: find the operation over the first axis (normalization, centring) and make it act on one example"
        )
    return Probe(first.numel(), max(0, together - alone))


def _is_rounding(
    outputs: Callable[[list[int]], Tensor], rows: list[int], pair: Tensor, apart: Tensor, slack: float
) -> bool:
    """Whether two outputs differ from those of each example alone by no more than rounding inside of the model.

    Outputs that are small differences of large numbers, such as log-ratios to a reference at the start of a
    fine-tuning, are rounded as the large numbers are, which kernels for other batch sizes do differently. The outputs
    of an example must then not depend on its companion: the batch has the same size with every companion.
    """
    with torch.no_grad(), _Largest() as seen:
        twice = torch.cat([outputs([rows[0]] * 2)[:1], outputs([rows[1]] * 2)[1:]])
    rounding = torch.finfo(pair.dtype).eps * seen.largest
    alone = torch.allclose(pair, twice, rtol=0, atol=slack + _SAME_SIZE * rounding, equal_nan=True)
    return alone and torch.allclose(pair, apart, rtol=0, atol=slack + _OTHER_SIZE * rounding, equal_nan=True)


def _counted(outputs: Callable[[list[int]], Tensor], rows: list[int]) -> tuple[Tensor, int]:
    with torch.no_grad(), _Count() as count:
        result = outputs(rows)
    return result.detach(), count.numbers
