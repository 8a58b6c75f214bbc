"""Samples of the ranks under DDP: squared deviations from the mean, sent once the mean is there."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from poprisk.errors import DataError
from poprisk.optim._estimators.samples import Source, Tally, add_to_spread, gradient_norm, used_here, work_dtype


class AllReduce:
    """DDP: a communication hook sends deviations after the gradients; hooks on the parameters note micro-batches."""

    def __init__(self, source: Source, model: DistributedDataParallel) -> None:
        self.source, self.model = weakref.ref(source), weakref.ref(model)
        self.post = _post_of(model)
        self.post.close()
        self.post.transport = self
        self.local: dict[Tensor, _Unsent] = {}
        self.arriving: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        self.arrived: set[Tensor] = set()
        self.reset()
        self.handles = []
        for p in model.parameters():
            if p.requires_grad and not p.is_complex():
                here: weakref.ref[Any] = weakref.ref(p)
                self.handles.append(p.register_hook(partial(self._arrive, here)))
                self.handles.append(p.register_post_accumulate_grad_hook(self._accumulated))

    def reset(self) -> None:
        """Discards what came since the last step."""
        self.local, self.arriving, self.arrived = {}, {}, set()
        self.quiet: dict[Tensor, int] = {}
        self.synced = False

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if self.post.transport is self:
            self.post.transport = None

    @torch.no_grad()
    def _arrive(self, here: weakref.ref[Any], x: Tensor) -> None:
        """Before accumulation: notices cleared gradients, and holds on to x where it will be lost in a sum.

        It is used only once it has been accumulated, so that ``torch.autograd.grad`` leaves no trace.
        """
        source, p = self.source(), here()
        if source is None or p is None:
            return
        sent = p in source._tallies and p not in self.local
        if p in self.arrived and (p.grad is None or (sent and not p.grad.any())):
            source.reset()  # gradients are cleared together, so what is known of the others is stale too
        if p.grad is None:
            return
        if p not in source._tallies and p not in self.local:
            source._tallies[p] = Tally(leftover=gradient_norm(p.grad))
        begins = p not in self.local and p in source._tallies and source._tallies[p].samples > 0
        self.arriving[p] = x.detach(), p.grad.detach().clone() if begins else None

    @torch.no_grad()
    def _accumulated(self, p: Tensor) -> None:
        if self.source() is None or p.grad is None or p.grad.layout != torch.strided:
            return
        self.arrived.add(p)
        if not getattr(self.model(), "require_forward_param_sync", True):  # DDP's note of a forward under no_sync()
            if self.synced:
                self.quiet, self.synced = {}, False
            self.quiet[p] = self.quiet.get(p, 0) + 1
        x, before = self.arriving.pop(p, (None, None))
        self.local.setdefault(p, _Unsent(before)).add(p.grad.detach(), x)

    def passes_since_last(self, bucket: dist.GradBucket) -> int:
        """How many micro-batches a message speaks of: the one now under way, and those under ``no_sync()`` before it.

        All buckets are sent, in their order, also those of parameters without a part in it.
        """
        if bucket.index() == 0:
            self.quiet = {} if self.synced else self.quiet
            self.synced = True
        return 1 + max(self.quiet.values(), default=0)


class _Post:
    """A DDP model takes one communication hook for life: this is it, and sources come and go behind it."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self.group = model.process_group
        self.ranks = dist.get_world_size(self.group)
        self.transport: AllReduce | None = None

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


_POSTS: "weakref.WeakKeyDictionary[DistributedDataParallel, _Post]" = weakref.WeakKeyDictionary()


def _post_of(model: DistributedDataParallel) -> _Post:
    if model in _POSTS:
        return _POSTS[model]
    post, taken = _Post(model), bool(getattr(model, "_comm_hooks", None))
    if not taken:
        try:
            model.register_comm_hook(None, lambda _, bucket: _average_and_squares(post, bucket))
        except RuntimeError:  # one of torch's own hooks
            taken = True
    if taken:
        raise DataError(
            "RankVariance needs the communication hook of the DDP model, and this model already has one: remove the "
            "other hook, or pass variance=None"
        )
    _POSTS[model] = post
    return post


@dataclass
class _Unsent:
    """A rank's own samples of a parameter since the last message: how many, and Σ (x - their mean)²."""

    before: Tensor | None = None
    """What was in the gradient already, an average that all ranks have alike; their sum is the rest of it."""
    count: int = 0
    spread: Tensor | None = None

    def add(self, grad: Tensor, x: Tensor | None) -> None:
        """One more, which has been accumulated into ``grad`` (None: it is the first, and the gradient)."""
        n, self.count = self.count, self.count + 1
        if x is None or n == 0:
            return
        total = grad if self.before is None else grad.to(work_dtype(grad.dtype)) - self.before
        self.spread = add_to_spread(self.spread, total, x, n)


def _average_and_squares(post: _Post, bucket: dist.GradBucket) -> Any:
    """DDP's own average of a bucket and then, beside the backward pass, the squared deviations; a future of it."""
    transport, flat, ranks = post.transport, bucket.buffer(), post.ranks
    source = None if transport is None else transport.source()
    if transport is None or source is None or source._closed or flat.layout != torch.strided or flat.is_complex():
        return _all_reduce(flat.div_(ranks), post).get_future().then(lambda done: done.value()[0])
    message = _Message(transport, bucket)
    work = _all_reduce(flat.div_(ranks), post)
    averaged = work.get_future()
    with _aside(flat):
        work.wait()
        deviations = message.deviations(flat, ranks)
        added = _all_reduce(deviations, post).get_future()
        used_here(flat, *message.tensors())

    def keep(_: Any) -> Tensor:
        averaged.wait()
        with torch.no_grad():
            message.deliver(source, deviations)
        return flat

    return added.then(keep)


class _Message:
    """What is said of one bucket: how far this rank's own samples are from the mean of all."""

    @torch.no_grad()
    def __init__(self, transport: AllReduce, bucket: dist.GradBucket) -> None:
        self.params, self.gradients = bucket.parameters(), bucket.gradients()
        self.samples = transport.post.ranks * transport.passes_since_last(bucket)
        self.unsent = [transport.local.pop(p, None) for p in self.params]
        flat = bucket.buffer()
        self.own = flat.to(work_dtype(flat.dtype), copy=True)  # this rank's sums
        begin = flat.storage_offset()
        self.places = [(g.storage_offset() - begin, g.shape, g.stride()) for g in self.gradients]
        self.views = self._parts(self.own)
        self.shared: dict[Tensor, Tensor] = {}  # what was averaged before in this step, in the gradient still
        for p, y, unsent in zip(self.params, self.views, self.unsent, strict=True):
            if unsent is None or unsent.before is not None:
                self.shared[p] = y.clone() if unsent is None or unsent.before is None else unsent.before.to(y.dtype)
                y.sub_(self.shared[p])

    def tensors(self) -> list[Tensor | None]:
        return [self.own, *self.shared.values(), *(u.spread for u in self.unsent if u is not None)]

    @torch.no_grad()
    def deviations(self, flat: Tensor, ranks: int) -> Tensor:
        """Σ (y - mean)² over this rank's samples, laid out like the bucket, and behind it how many there are."""
        mean = flat.to(self.own.dtype, copy=True)
        for p, center in zip(self.params, self._parts(mean), strict=True):
            if p in self.shared:
                center.sub_(self.shared[p])
        size, n = self.own.numel(), max((u.count for u in self.unsent if u is not None), default=1)
        out = self.own.new_full((size + len(self.params),), n)
        torch.sub(self.own.div_(ranks * n), mean.div_(self.samples), out=out[:size]).square_().mul_(n)
        for i, (part, y, center) in enumerate(zip(self._parts(out), self.views, self._parts(mean), strict=True)):
            unsent = self.unsent[i] or _Unsent()
            if unsent.count != n:
                out[size + i].fill_(unsent.count)
                part.copy_((y * (n / max(1, unsent.count)) - center).square_() * unsent.count)
            if unsent.spread is not None:
                part.add_(unsent.spread, alpha=1 / ranks**2)
        return out

    def deliver(self, source: Source, spread: Tensor) -> None:
        """To each parameter's tally, after the sum over ranks."""
        present = spread[self.own.numel() :].double().unbind()
        for p, g, part, n in zip(self.params, self.gradients, self._parts(spread), present, strict=True):
            tally = source._tally_of(p)
            if tally.spread is None:
                tally.spread = part
            else:
                tally.spread = self._between(p, g, tally, n).add_(tally.spread).add_(part)
            tally.samples, tally.present, tally.norm = tally.samples + self.samples, tally.present + n, gradient_norm(g)

    def _between(self, p: Tensor, g: Tensor, tally: Tally, present: Tensor) -> Tensor:
        """What two messages' sums of squares lack about their common center: both about their own, until now."""
        G = g.to(work_dtype(g.dtype))
        before = self.shared.get(p, torch.zeros_like(G))
        center, lacking = G / (tally.samples + self.samples), torch.zeros_like(G)
        for total, samples, n in ((before, tally.samples, tally.present), (G - before, self.samples, present)):
            off, share = total / samples - center, (n / samples).to(G.dtype)
            lacking += 2 * off * total * (1 - share) + samples * share * off * off
        return lacking

    def _parts(self, x: Tensor) -> list[Tensor]:
        """The bucket's parameters in a flat tensor laid out like its buffer, each with the strides of its gradient."""
        return [x.as_strided(shape, stride, x.storage_offset() + begin) for begin, shape, stride in self.places]


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def _aside(x: Tensor) -> Iterator[None]:
    """On a device: beside the backward pass, which must not wait for the average."""
    if not x.is_cuda:
        yield
        return
    if x.device not in _STREAMS:
        _STREAMS[x.device] = torch.cuda.Stream(x.device)
    stream = _STREAMS[x.device]
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        yield


def _all_reduce(x: Tensor, post: _Post) -> Any:
    return dist.all_reduce(x, group=post.group, async_op=True)
