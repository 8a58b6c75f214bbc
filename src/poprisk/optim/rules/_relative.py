r"""The gate in AdamW's units: relative to its mean over the tensor, so that AdamW's learning rates keep their meaning.

.. math:: \tilde q = \kappa \min(1, q/\bar q), \qquad \kappa = \mathrm{clip}(0.5/\bar r, 1, 3)

:math:`\bar q` is the mean of the gate over the tensor in the previous step, :math:`\bar r` that of
:math:`\min(1, q/\bar q)`: means of the previous step, so that a step needs one pass over memory. Before the first step
:math:`\bar q = 0` and :math:`\bar r = 1`. If :math:`\bar q = 0`, the ratio counts as 1 where q > 0.
"""

from math import prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

HALF = 0.5
"""The mean of the step that the factor κ aims at, as a share of AdamW's."""
MOST = 3.0
"""The largest κ."""
FIRST = (0.0, 1.0, 0.0, 1.0)
"""The scale before the first step: the means q̄ and r̄ of that step, then the reference and the κ that it used."""


def first_scale(like: Tensor, members: tuple[int, ...] = ()) -> Float[Tensor, "*members 4"]:
    """The scale before the first step, in float64 where the device has it."""
    dtype = torch.float32 if like.device.type == "mps" else torch.float64
    return torch.tensor(FIRST, dtype=dtype, device=like.device).expand(*members, 4).contiguous()


def factor(r_mean: Tensor) -> Tensor:
    """κ, from the mean of the ratios in the previous step.

    >>> factor(torch.tensor([0.0, 0.25, 0.9]))
    tensor([3., 2., 1.])
    """
    return HALF / r_mean.clamp(HALF / MOST, HALF)


def ratio(q: Tensor, reference: Tensor) -> Tensor:
    """min(1, q/reference); for a reference of 0, whether q > 0.

    >>> ratio(torch.tensor([0.0, 0.1, 0.4]), torch.tensor(0.2)), ratio(torch.tensor([0.0, 0.1]), torch.tensor(0.0))
    (tensor([0.0000, 0.5000, 1.0000]), tensor([0., 1.]))
    """
    known = reference > 0
    shares = (q / torch.where(known, reference, 1.0)).clamp(max=1)
    return torch.where(known, shares, (q > 0).to(q.dtype))


def to_adamw_units(q: Tensor, scale: Float[Tensor, "*members 4"], whole: Any) -> tuple[Tensor, Tensor]:
    """What multiplies AdamW's step in this step, and the scale after it.

    The scale's leading axes are those of q over which no mean is taken: none for one tensor, the first for stacked
    trainings.
    """
    lead, kept = scale.dim() - 1, scale.shape[:-1]
    reference, kappa = scale[..., 0], factor(scale[..., 1])
    r = ratio(q, _against(reference, q))
    dims = tuple(range(lead, q.dim()))
    if whole is not None:
        means = whole.means((q.to(scale.dtype), r.to(scale.dtype)), dims)
    elif not prod(q.shape[lead:]):
        means = [torch.zeros_like(reference), torch.ones_like(reference)]
    else:
        means = [x.mean(dims, dtype=scale.dtype) if dims else x.to(scale.dtype) for x in (q, r)]
    after = torch.stack([*(x.reshape(kept) for x in means), reference, kappa], -1)
    return _against(kappa, q) * r, after


def in_adamw_units(q: Tensor, scale: Float[Tensor, "*members 4"]) -> Tensor:
    """What multiplied AdamW's step in the last step, from its gate and the scale it left behind."""
    return _against(scale[..., 3], q) * ratio(q, _against(scale[..., 2], q))


def _against(x: Tensor, q: Tensor) -> Tensor:
    """One number per member, in the shape and dtype in which it multiplies q."""
    return x.reshape((*x.shape, *[1] * (q.dim() - x.dim()))).to(q.dtype)
