r"""The gate in AdamW's units: relative to its mean over the tensor, so that AdamW's learning rates keep their meaning.

.. math:: \tilde q = \tfrac12 \big(1 + \min(1, q/\bar q)\big)

:math:`\bar q` is the mean of the gate over the tensor in the previous step, so that a step needs one pass over memory.
Before the first step :math:`\bar q = 0`. If :math:`\bar q = 0`, the ratio counts as 1 where q > 0 and as 0 where q = 0.
Every coordinate thus moves between half of AdamW's step and AdamW's step.
"""

from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

FIRST = (0.0, 0.0)
"""The scale before the first step: the mean q̄ of that step, then the reference that it used."""


def first_scale(like: Tensor, members: tuple[int, ...] = ()) -> Float[Tensor, "*members 2"]:
    """The scale before the first step, in float64 where the device has it."""
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    return torch.tensor(FIRST, dtype=dtype, device=like.device).expand(*members, 2).contiguous()


def ratio(q: Tensor, reference: Tensor) -> Tensor:
    """min(1, q/reference); for a reference of 0, whether q > 0.

    >>> ratio(torch.tensor([0.0, 0.1, 0.4]), torch.tensor(0.2)), ratio(torch.tensor([0.0, 0.1]), torch.tensor(0.0))
    (tensor([0.0000, 0.5000, 1.0000]), tensor([0., 1.]))
    """
    known = reference > 0
    shares = (q / torch.where(known, reference, 1.0)).clamp(max=1)
    return torch.where(known, shares, (q > 0).to(q.dtype))


def to_adamw_units(q: Tensor, scale: Float[Tensor, "*members 2"], whole: Any) -> tuple[Tensor, Tensor]:
    """What multiplies AdamW's step in this step, and the scale after it.

    The scale's leading axes are those of q over which no mean is taken: none for one tensor, the first for stacked
    trainings.
    """
    lead, kept = scale.dim() - 1, scale.shape[:-1]
    reference, dims = scale[..., 0], tuple(range(lead, q.dim()))
    if whole is not None:
        mean = whole.means((q.to(scale.dtype),), dims)[0]
    elif not prod(q.shape[lead:]):
        mean = torch.zeros_like(reference)
    else:
        mean = q.mean(dims, dtype=scale.dtype) if dims else q.to(scale.dtype)
    after = torch.stack([mean.reshape(kept), reference], -1)
    return 0.5 + 0.5 * ratio(q, _against(reference, q)), after


def in_adamw_units(q: Tensor, scale: Float[Tensor, "*members 2"]) -> Tensor:
    """What multiplied AdamW's step in the last step, from its gate and the scale it left behind."""
    return 0.5 + 0.5 * ratio(q, _against(scale[..., 1], q))


def _against(x: Tensor, q: Tensor) -> Tensor:
    """One number per member, in the shape and dtype in which it multiplies q."""
    return x.reshape((*x.shape, *[1] * (q.dim() - x.dim()))).to(q.dtype)
