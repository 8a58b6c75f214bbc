r"""Stochastic rounding to bfloat16 from a counter, so that every backend draws the same bits and a resumed run repeats.

Round-to-nearest freezes a bfloat16 average: with β2 = 0.999 the decay of one step is smaller than half a unit in the
last place, so v never falls. Rounding up with probability equal to the discarded fraction keeps the mean exact.
"""

from functools import cache

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


def hash32(x: int | Tensor) -> int | Tensor:
    """A 32-bit integer hash with low bias (two products, three shifts), the same in Python, torch, C and Triton."""
    x = x & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def rounding_seed(step: int | Tensor, key: int) -> int | Tensor:
    """One seed per optimizer step and parameter tensor; ``key`` is the tensor's place in the optimizer."""
    return hash32(step + tensor_key(key))


@cache
def tensor_key(key: int) -> int:
    """A tensor's place in the optimizer, spread over 32 bits so that neighbours do not share random numbers."""
    return int(hash32(key * _GOLDEN + 1))


def rounding_bits(seed: int | Tensor, like: Tensor) -> Tensor:
    """Thirty-two random bits for each element of a dense tensor, drawn in the order the elements lie in memory."""
    index = torch.empty_like(like, dtype=torch.int64)
    index.as_strided((like.numel(),), (1,)).copy_(torch.arange(like.numel(), device=like.device))
    bits = hash32(index + seed)
    assert isinstance(bits, Tensor)
    return bits


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """float32 to bfloat16, up with probability equal to the discarded fraction; ``bits`` holds 16 random bits each.

    NaN and infinity keep their value.

    >>> x = torch.full((4,), 1.0 + 2**-9)  # a quarter of the way from 1 to the next bfloat16
    >>> round_stochastically(x, torch.tensor([0, 0x3FFF, 0xC000, 0xFFFF])).tolist()
    [1.0, 1.0, 1.0078125, 1.0078125]
    """
    raw = x.to(torch.float32).view(torch.int32)
    rounded = (raw + bits.to(torch.int32)) & -65536
    rounded = torch.where(torch.isfinite(x), rounded, raw)
    return rounded.view(torch.float32).to(torch.bfloat16)
