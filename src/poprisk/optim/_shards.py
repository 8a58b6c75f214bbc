"""Parameters sharded over processes (DTensors): the local part of each, and sums over all parts.

The backends see local tensors only, so all of them support sharded parameters. Element-wise gates need no
communication; a gate that pools coordinates adds up its sums over the processes that share a pool.
"""

import sys
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from poprisk.errors import GradientError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""Types that need no second look: what a single process trains."""


class Shard:
    r"""Position of the local part of a parameter in the whole.

    A mean over the whole is the sum of the parts' sums over the number of elements of the whole, so uneven and empty
    parts need no special case:

    .. math:: \bar x = \frac{1}{n} \sum_p \sum_{k \in p} x_k
    """

    def __init__(self, parameter: "DTensor") -> None:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        placements: Any = parameter.placements
        if any(p.is_partial() for p in placements):
            raise GradientError(
                f"a parameter must be sharded or replicated, got the placements {placements}: redistribute "
                "it before the optimizer is built"
            )
        self.mesh, self.placements = parameter.device_mesh, placements
        self.shape = parameter.shape
        # (axis of the mesh, axis of the tensor) wherever the tensor is cut
        self.cuts = tuple((i, p.dim) for i, p in enumerate(placements) if not p.is_replicate())
        _, begins = compute_local_shape_and_global_offset(self.shape, self.mesh, self.placements)
        self.offset = sum(begin * prod(self.shape[axis + 1 :]) for axis, begin in enumerate(begins))

    @property
    def mesh_axes(self) -> tuple[int, ...]:
        """The axes of the mesh along which the parts differ."""
        return tuple(i for i, _ in self.cuts)

    def means(self, parts: Sequence[Tensor], dims: tuple[int, ...]) -> list[Tensor]:
        """For each of several tensors its mean over the given axes of the whole; one message for all of them."""
        sums = torch.stack([x.sum(dims, keepdim=True) for x in parts])
        count = prod(self.shape[d] if d < len(self.shape) else parts[0].shape[d] for d in dims)
        self.add_up(sums, tuple(i for i, axis in self.cuts if axis in dims))
        return list((sums / count).unbind())

    def add_up(self, x: Tensor, mesh_axes: tuple[int, ...]) -> None:
        """Adds x up over the processes along some axes of the mesh, in place."""
        import torch.distributed as dist

        if not mesh_axes:
            return
        there = x.to(self.mesh.device_type)  # states may be offloaded to a device that the mesh does not use
        for axis in mesh_axes:
            dist.all_reduce(there, group=self.mesh.get_group(axis))
        if there is not x:
            x.copy_(there)

    def local(self, x: Tensor) -> Tensor:
        """This process's part of a tensor of the parameter's shape, in the parameter's own layout."""
        if not is_sharded(x):
            raise GradientError(
                f"a sharded parameter of shape {tuple(self.shape)} needs gradients and variances that are DTensors, "
                f"got {type(x).__name__}"
            )
        if x.device_mesh != self.mesh or x.placements != self.placements:
            x = x.redistribute(self.mesh, self.placements)
        return _here(x)


def is_sharded(x: Tensor) -> "TypeGuard[DTensor]":
    """Whether x is a DTensor; quick where torch.distributed.tensor was never imported."""
    if type(x) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def local_part(x: Tensor) -> Tensor:
    """The part of x in this process: all of it, unless it is a DTensor."""
    return _here(x) if is_sharded(x) else x


def as_part_of(parameter: Any, local: Tensor) -> Tensor:
    """A tensor laid out like the local part of a sharded parameter, as part of a whole laid out like the parameter."""
    from torch.distributed.tensor import DTensor

    extra = tuple(local.shape[parameter.dim() :])  # the pair of a complex number
    shape, stride = parameter.shape, parameter.stride()
    if extra:
        shape, stride = torch.Size((*shape, *extra)), (*(prod(extra) * st for st in stride), 1)
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def coordinates(parameter: Tensor) -> int:
    """Number of real numbers in a tensor; of a sharded one, over all processes."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _here(x: "DTensor") -> Tensor:
    local: Any = x._local_tensor  # to_local() makes a new view at each call, and fused plans go by identity
    return local.wait() if hasattr(local, "wait") else local
