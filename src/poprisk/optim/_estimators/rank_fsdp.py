"""Samples of the ranks under FSDP2: every rank's part goes to the rank that owns it."""

import weakref
from collections.abc import Sequence
from math import ceil, prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from poprisk.errors import GradientError
from poprisk.optim._estimators.samples import Samples, Source, Tally, gradient_norm, used_here
from poprisk.optim._shards import is_sharded, local_part


class ReduceScatters:
    """FSDP2: each module's reduce-scatter is followed by an all-to-all; each parameter then takes its part."""

    def __init__(self, source: Source, modules: Sequence[Any]) -> None:
        self.source = weakref.ref(source)
        self.open: _SamplesToo | None = None
        self.begins = True
        self.last: dict[Tensor, weakref.ref[Tensor]] = {}
        self.handles = []
        for module in modules:
            module.reshard()  # a forward without backward leaves the root's parameters whole
        everything = dict.fromkeys(p for module in modules for p in module.parameters())
        self.parameters = [p for p in everything if not p.is_complex() and is_sharded(p)]
        for p in self.parameters:
            _check_placements(p)
        self.messengers: list[_SamplesToo] = []
        left = set(self.parameters)
        for module in reversed(modules):  # the inner ones come first, and take their own
            own = left.intersection(module.parameters())
            left -= own
            if own:
                self.messengers.append(_SamplesToo(self, module, next(iter(own))))
                module.set_custom_reduce_scatter(self.messengers[-1])
        for p in self.parameters:
            self.handles.append(_after_accumulation(p, self._take))

    def reset(self) -> None:
        """Discards what came since the last step."""
        self.open, self.begins = None, True
        for messenger in self.messengers:
            messenger.reset()

    def begin(self, source: Source) -> None:
        """Before the first reduction of a step: what is in the gradients now must be nothing."""
        if self.begins:
            self.begins = False
            held = ((p, p.grad) for p in self.parameters)
            source._tallies |= {p: Tally(leftover=gradient_norm(local_part(g))) for p, g in held if g is not None}

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @torch.no_grad()
    def _take(self, p: Tensor) -> None:
        """Called by FSDP2 for each parameter of a module, in their order, right after the module's reduction."""
        source = self.source()
        if source is None or self.open is None or p.grad is None:
            return
        grad, last = local_part(p.grad), self.last.get(p)
        if last is not None and last() is not grad:
            source._tallies.pop(p, None)  # if anything is known, it is of a step that was skipped
        self.open.hand_out(p, source._tally_of(p))
        source._tallies[p].norm = gradient_norm(grad)
        self.last[p] = weakref.ref(grad)


class _SamplesToo:
    """A reduce-scatter for FSDP2 (its ``ReduceScatter`` interface), and an all-to-all that brings every rank's part."""

    def __init__(self, owner: ReduceScatters, module: Any, one: Any) -> None:
        self.owner, self.module = owner, weakref.ref(module)
        ranks, parts = one.device_mesh.size(), _shard_axis(one)[1]  # all of a module are cut alike
        self.ranks, self.alone, self.replicas = ranks, parts == 1, ranks // parts
        self.reset()

    def reset(self) -> None:
        self.flat: Samples | None = None
        self.given: Tensor | None = None
        self.taken = 0
        self.claimed = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the gradients, and then, when they have been written, for their reduction."""
        memory = torch.empty(*size, dtype=dtype, device=device)
        if self.alone:  # with one part FSDP2 has nothing to scatter, and does not call
            given, self.given = self.given, memory if self.given is None else None
            if given is not None and self._listens(given):
                self._keep(given.unsqueeze(0), self._divisor())
        return memory

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        work = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        if self._listens(input_tensor):
            samples = torch.empty_like(input_tensor)
            dist.all_to_all_single(samples, input_tensor, group=group)
            divisor = self._divisor()
            self._keep(samples.view(group.size(), -1), divisor / _divided_before(input_tensor.dtype, divisor))
        return work

    def hand_out(self, p: Any, tally: Tally) -> None:
        """The next parameter's part of the last reduction; parts are padded to equal lengths along an axis."""
        assert self.flat is not None
        shape = tuple(local_part(p).shape)
        begin, rows = self.taken, prod(shape[1:])
        axis, ranks = _shard_axis(p)
        self.taken += ceil(p.shape[0] / ranks) * rows if axis == 0 else prod(shape)
        self.claimed = True
        used_here(self.flat.spread, self.flat.total, tally.spread, tally.total)
        part = self.flat.part(slice(begin, begin + prod(shape)), shape)
        if tally.spread is not None and tally.total is not None:
            part = part.merged(Samples(tally.spread, tally.total, tally.samples // self.replicas))
        tally.spread, tally.total = part.spread, part.total
        tally.samples = tally.present = part.count * self.replicas

    def _listens(self, x: Tensor) -> bool:
        source = self.owner.source()
        if source is None or source._closed or x.is_complex():
            return False
        self.owner.begin(source)
        return True

    def _keep(self, samples: Tensor, divisor: float) -> None:
        group = Samples.of(samples, divisor, torch.float64)  # differences of totals are small
        if self.flat is not None and not self.claimed and self.flat.total.shape == group.total.shape:
            group = group.merged(self.flat)  # replicas have not been added up yet (set_requires_all_reduce)
        self.flat, self.taken, self.claimed, self.owner.open = group, 0, False, self

    def _divisor(self) -> float:
        """What FSDP2 divides a sum over all ranks by: their number, unless it was told otherwise."""
        module: Any = self.module()
        state = module._get_fsdp_state()
        return state._fsdp_param_group.gradient_divide_factor or float(self.ranks)


def _divided_before(dtype: torch.dtype, divisor: float) -> float:
    """Of the divisor, what FSDP2 divides by before the reduction, against overflow: about its root."""
    before = 1.0
    if dtype not in (torch.float32, torch.bfloat16):
        while divisor % before == 0 and divisor / before > before:
            before *= 2
    return before


def _after_accumulation(p: Tensor, hook: Any) -> Any:
    """A hook that is there also when a frozen parameter is set free: parts are counted off by these calls."""
    frozen = not p.requires_grad
    p.requires_grad_(True)
    handle = p.register_post_accumulate_grad_hook(hook)
    if frozen:
        p.requires_grad_(False)
    return handle


def _reduce_scatter(output: Tensor, given: Tensor, **options: Any) -> Any:
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return getattr(dist, name)(output, given, **options)


def _check_placements(p: Any) -> None:
    if sum(placement.is_shard() for placement in p.placements) != 1:
        raise GradientError(
            f"RankVariance supports FSDP2 with and without replicas, got the placements {p.placements}: use "
            "variance=None for models with tensor-parallel modules"
        )


def _shard_axis(p: Any) -> tuple[int, int]:
    """The axis a parameter is cut along, and into how many parts."""
    for mesh_axis, placement in enumerate(p.placements):
        if placement.is_shard():
            return placement.dim, p.device_mesh.size(mesh_axis)
    raise AssertionError("checked when the source was made")


def over_replicas(p: Any, tally: Tally, spread: Tensor, G: Tensor) -> Tensor:
    """With replicas (HSDP), the sum over them of what each has about its own mean, moved to the mean of all."""
    axes = [i for i, x in enumerate(p.placements) if x.is_replicate() and p.device_mesh.size(i) > 1]
    if not axes:
        return spread
    assert tally.total is not None
    count = tally.samples // prod(p.device_mesh.size(i) for i in axes)
    off = (tally.total.to(spread.device) / count - G.double() / tally.samples).to(spread.dtype)
    there = torch.addcmul(spread, off, off, value=count).to(p.device_mesh.device_type)
    for axis in axes:
        dist.all_reduce(there, group=p.device_mesh.get_group(axis))
    return there.to(spread.device)
