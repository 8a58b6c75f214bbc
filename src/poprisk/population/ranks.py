r"""The variance of a gradient that is averaged over processes: each process brings samples of its own.

Under DDP and FSDP2 the average over R ranks is one collective per bucket. A second one of the same size brings what the
ranks differ by; the gradient itself is reduced exactly as without a source.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil, prod
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from poprisk.errors import DataError, GradientError
from poprisk.population.scale import gradient_norm, gradient_ratio, rescale, work_dtype

NOT_CLEARED = (
    "gradients must be clear before the first micro-batch of a step, got some that were not: call "
    "optimizer.zero_grad() after every step, and make the source before the first backward"
)


class RankVariance:
    r"""The variance of the global mean gradient, each rank's gradient being a sample (of ranks and micro-batches).

    Let :math:`x_{rj}` be the gradient of micro-batch j on rank r. ``.grad`` ends as the mean over ranks of the sum over
    micro-batches, :math:`G = \sum_{rj} y_{rj}` with :math:`y_{rj} = x_{rj}/R`. For K = R k independent samples of one
    size its variance is estimated without bias, with K - 1 degrees of freedom, by

    .. math:: \frac{K}{K-1} \sum_{rj} (y_{rj} - \bar y)^2

    which is what :class:`poprisk.MicrobatchVariance` gives in one process over the same K micro-batches. No large
    squares are subtracted, so it is as exact where the noise is far below the signal: under DDP the squared deviations
    from the mean are added up once the mean is there; under FSDP2 every rank's part comes to the rank that owns it.

    It costs a second collective of the gradients' size, in float32 (FSDP2: in the dtype of the reduction), and one
    buffer of that size until the step, two with micro-batches or shards. A uniform rescaling of ``.grad`` afterwards
    (clipping, ``GradScaler.unscale_``) rescales the variance by the square of the factor. Every rank must see batches
    of one size; a parameter that had no part in a sample counts as zero there. Give every rank data of its own: the
    same batch on two ranks is not two samples.

    - **DDP**: micro-batches under ``no_sync()`` are R k samples (hooks note how they differ as they arrive); without
      ``no_sync()`` as well. It takes the model's communication hook, of which there is one.
    - **FSDP2** (``fully_shard``; also with replication, HSDP): every reduction brings R samples, so gradient
      accumulation gives R k of them, also with ``set_requires_all_reduce(False)``. With
      ``set_requires_gradient_sync(False)`` a rank's accumulated gradient is one sample: R of them, still without bias.
      After ``set_gradient_divide_factor``, y is x over that factor and not over R.

    After a step that was skipped, clear the gradients by ``zero_grad()`` as it is (or call :meth:`reset`): under FSDP2
    gradients filled with zeros (``set_to_none=False``) look as if they went on.

    With one rank and one micro-batch there is no variance: the optimizer uses the stream. The paper's
    :math:`\Sigma_B/(b-1)` is over the examples of one batch; this is the same variance, estimated from K group means,
    equal to it for groups of one example.

    Args:
        model: A ``DistributedDataParallel`` model, or the root module given to ``fully_shard``. Hooks stay until
            ``close()``, or the end of a ``with`` block.

    Raises:
        DataError: the model is neither, or another source or communication hook has it, or variances are asked of a
            model that is not this one.
        GradientError: gradients were not cleared before the first micro-batch of a step, or parameters are cut by
            tensor parallelism too.

    >>> from torch.distributed import HashStore
    >>> dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    >>> with RankVariance(model) as source:
    ...     for x in (1.0, 3.0):  # here one rank; with four, torchrun starts this script four times
    ...         (model(torch.full((1, 1), x)) / 2).sum().backward()
    ...     print(source.variances(list(model.parameters())))  # the mean of 1 and 3 has variance 1
    [tensor([[1.]])]
    >>> dist.destroy_process_group()
    """

    def __init__(self, model: nn.Module) -> None:
        self._tallies: dict[Tensor, _Tally] = {}
        self._closed = False
        model = getattr(model, "_orig_mod", model)  # what torch.compile was given
        sharded = [m for m in model.modules() if hasattr(m, "set_custom_reduce_scatter")]
        if not isinstance(model, DistributedDataParallel) and not sharded:
            raise DataError(
                f"RankVariance needs a DistributedDataParallel model or one that fully_shard was applied to, got "
                f"{type(model).__name__}: wrap it first (FSDP1 is not served), or use MicrobatchVariance in one process"
            )
        _refuse_a_second(model)
        if isinstance(model, DistributedDataParallel):
            self._transport: _Transport = _AllReduce(self, model)
        else:
            self._transport = _ReduceScatters(self, sharded)
        self._known = set(model.parameters())
        _SOURCES.update(dict.fromkeys([model, *sharded], weakref.ref(self)))

    def __reduce__(self) -> NoReturn:
        raise DataError(
            "RankVariance cannot be copied or pickled, because it is hooked to its model: copy or save the optimizer's "
            "state_dict() instead, and give the new optimizer a source of its own"
        )

    def variances(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The variance of each averaged gradient, once; None for what was not averaged, or from one sample only."""
        if parameters and self._known.isdisjoint(parameters):
            raise DataError(
                f"RankVariance was asked for {len(parameters)} parameters, none of which belongs to its model: give "
                "the optimizer the parameters of the model that the source was made of, after that model was wrapped"
            )
        tallies = {p: tally for p, tally in self._tallies.items() if p.grad is not None}
        leftovers = [tally.leftover for tally in tallies.values() if tally.leftover is not None]
        self.reset()
        if leftovers and any(norm > 0 for norm in leftovers):
            raise GradientError(NOT_CLEARED)
        samples = max((tally.samples for tally in tallies.values()), default=0)
        if samples < 2:
            return [None] * len(parameters)
        with torch.no_grad():
            return [_variance(p, tallies[p], samples) if p in tallies else None for p in parameters]

    def reset(self) -> None:
        """Forgets the samples seen so far."""
        self._tallies = {}
        self._transport.reset()

    def close(self) -> None:
        """Takes the hooks off the model; gradients are averaged as before."""
        self._closed = True
        self._transport.close()
        self.reset()

    def __enter__(self) -> "RankVariance":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _tally_of(self, p: Tensor) -> "_Tally":
        return self._tallies.setdefault(p, _Tally())


_SOURCES: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[RankVariance]]" = weakref.WeakKeyDictionary()
"""The last source made of a model."""


def _refuse_a_second(model: nn.Module) -> None:
    """Two sources of one model would take each other's messages."""
    for module in model.modules():
        source = _SOURCES[module]() if module in _SOURCES else None
        if source is not None and not source._closed:
            raise DataError(
                f"this {type(module).__name__} has a RankVariance already, and there can be one at a time: share it, "
                "or close() it first (a with block does)"
            )


@dataclass
class _Tally:
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


class _Transport(Protocol):
    def reset(self) -> None: ...

    def close(self) -> None: ...


def _variance(p: Tensor, tally: _Tally, samples: int) -> Tensor | None:
    r"""K/(K-1) Σ (y - G/K)², where K also counts the samples a parameter had no part in.

    From the N parts about another center c = G/n it is Σ (y - c)² + G² (2/n - N/n² - 1/K), whose last term is 0 for
    N = n = K.
    """
    assert p.grad is not None
    if tally.spread is None or tally.norm is None:
        return None
    grad = _local(p.grad)
    _used_here(tally.spread, tally.total)  # made on the stream of the reduction
    spread = tally.spread.to(grad.device)  # FSDP2 may have moved the gradient to the host
    ratio = gradient_ratio(grad, tally.norm.to(grad.device))
    G = grad.to(spread.dtype)
    if tally.total is not None:
        spread = _over_replicas(p, tally, spread, G / ratio)
    n, present = tally.samples, tally.present
    zeros = 2 / n - present / n**2 - 1 / samples
    if isinstance(zeros, Tensor):
        zeros = zeros.to(grad.device, spread.dtype)
    variance = (rescale(spread, ratio) + zeros * G * G).mul_(samples / (samples - 1)).clamp_(min=0)
    return variance if p.grad is grad else _like(p, variance)


class _AllReduce:
    """DDP: a communication hook sends deviations after the gradients; hooks on the parameters note micro-batches."""

    def __init__(self, source: RankVariance, model: DistributedDataParallel) -> None:
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
        self.local, self.arriving, self.arrived = {}, {}, set()
        self.quiet: dict[Tensor, int] = {}
        self.synced = False

    def close(self) -> None:
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
            source._tallies[p] = _Tally(leftover=gradient_norm(p.grad))
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
        self.transport: _AllReduce | None = None

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
            "RankVariance takes the communication hook of a DDP model, of which there is one, and this model has one "
            "already: leave it without another hook, or without a RankVariance"
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
        work = work_dtype(grad.dtype)
        x, total = x.to(work), grad.to(work) if self.before is None else grad.to(work) - self.before
        deviation = x - (total - x) / n  # Welford's update
        if self.spread is None:
            self.spread = torch.zeros_like(deviation)
        self.spread.addcmul_(deviation, deviation, value=n / (n + 1))


def _average_and_squares(post: _Post, bucket: dist.GradBucket) -> Any:
    """DDP's own average of a bucket and then, beside the backward pass, the squared deviations; a future of it."""
    transport, flat, ranks = post.transport, bucket.buffer(), post.ranks
    source = None if transport is None else transport.source()
    if transport is None or source is None or source._closed or flat.layout != torch.strided or flat.is_complex():
        averaged = _future(dist.all_reduce(flat.div_(ranks), group=post.group, async_op=True))
        return averaged.then(lambda done: done.value()[0])
    message = _Message(transport, bucket)
    work: Any = dist.all_reduce(flat.div_(ranks), group=post.group, async_op=True)
    averaged = _future(work)
    with _aside(flat):
        work.wait()
        deviations = message.deviations(flat, ranks)
        added = _future(dist.all_reduce(deviations, group=post.group, async_op=True))
        _used_here(flat, *message.tensors())

    def keep(_: Any) -> Tensor:
        averaged.wait()
        with torch.no_grad():
            message.deliver(source, deviations)
        return flat

    return added.then(keep)


class _Message:
    """What is said of one bucket: how far this rank's own samples are from the mean of all."""

    @torch.no_grad()
    def __init__(self, transport: _AllReduce, bucket: dist.GradBucket) -> None:
        self.params, self.gradients = bucket.parameters(), bucket.gradients()
        self.samples = transport.post.ranks * transport.passes_since_last(bucket)
        self.unsent = [transport.local.pop(p, None) for p in self.params]
        flat = bucket.buffer()
        self.own = flat.to(work_dtype(flat.dtype), copy=True)  # this rank's sums
        self.views = _views(self.own, bucket)
        self.shared: dict[Tensor, Tensor] = {}  # what was averaged before in this step, in the gradient still
        for p, y, unsent in zip(self.params, self.views, self.unsent, strict=True):
            if unsent is None or unsent.before is not None:
                self.shared[p] = y.clone() if unsent is None or unsent.before is None else unsent.before.to(y.dtype)
                y.sub_(self.shared[p])
        self.places = [(y.storage_offset(), y.shape, y.stride()) for y in self.views]

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

    def deliver(self, source: RankVariance, spread: Tensor) -> None:
        """To each parameter's tally, after the sum over ranks."""
        present = spread[self.own.numel() :].double().unbind()
        for p, g, part, n in zip(self.params, self.gradients, self._parts(spread), present, strict=True):
            tally = source._tally_of(p)
            if tally.spread is None:
                tally.spread = part
            else:
                tally.spread = self._between(p, g, tally, n).add_(tally.spread).add_(part)
            tally.samples, tally.present, tally.norm = tally.samples + self.samples, tally.present + n, gradient_norm(g)

    def _between(self, p: Tensor, g: Tensor, tally: _Tally, present: Tensor) -> Tensor:
        """What two messages' sums of squares lack about their common center: both about their own, until now."""
        G = g.to(work_dtype(g.dtype))
        before = self.shared.get(p, torch.zeros_like(G))
        center, lacking = G / (tally.samples + self.samples), torch.zeros_like(G)
        for total, samples, n in ((before, tally.samples, tally.present), (G - before, self.samples, present)):
            off, share = total / samples - center, (n / samples).to(G.dtype)
            lacking += 2 * off * total * (1 - share) + samples * share * off * off
        return lacking

    def _parts(self, x: Tensor) -> list[Tensor]:
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


def _used_here(*tensors: Tensor | None) -> None:
    """Their memory is not given away before the current stream is done with them, whichever stream they come from."""
    for x in tensors:
        if x is not None and x.is_cuda:
            x.record_stream(torch.cuda.current_stream(x.device))


def _views(like: Tensor, bucket: dist.GradBucket) -> list[Tensor]:
    """The bucket's parameters in a flat tensor laid out like its buffer, each with the strides of its gradient."""
    begin = bucket.buffer().storage_offset()
    return [like.as_strided(g.shape, g.stride(), g.storage_offset() - begin) for g in bucket.gradients()]


def _future(work: Any) -> Any:
    return work.get_future()


class _ReduceScatters:
    """FSDP2: each module's reduce-scatter is followed by an all-to-all; each parameter then takes its part."""

    def __init__(self, source: RankVariance, modules: Sequence[nn.Module]) -> None:
        self.source = weakref.ref(source)
        self.open: _SamplesToo | None = None
        self.begins = True
        self.last: dict[Tensor, weakref.ref[Tensor]] = {}
        self.handles = []
        for module in modules:
            _reshard(module)  # a forward without backward leaves the root's parameters whole
        everything = dict.fromkeys(p for module in modules for p in module.parameters())
        self.parameters = [p for p in everything if not p.is_complex() and _is_sharded(p)]
        for p in self.parameters:
            _check_placements(p)
        self.messengers: list[_SamplesToo] = []
        left = set(self.parameters)
        for module in reversed(modules):  # the inner ones come first, and take their own
            own = left.intersection(module.parameters())
            left -= own
            if own:
                self.messengers.append(_SamplesToo(self, module, next(iter(own))))
                _set_reduce_scatter(module, self.messengers[-1])
        for p in self.parameters:
            self.handles.append(_after_accumulation(p, self._take))

    def reset(self) -> None:
        self.open, self.begins = None, True
        for messenger in self.messengers:
            messenger.reset()

    def begin(self, source: RankVariance) -> None:
        """Before the first reduction of a step: what is in the gradients now must be nothing."""
        if self.begins:
            self.begins = False
            held = ((p, p.grad) for p in self.parameters)
            source._tallies |= {p: _Tally(leftover=gradient_norm(_local(g))) for p, g in held if g is not None}

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    @torch.no_grad()
    def _take(self, p: Tensor) -> None:
        """Called by FSDP2 for each parameter of a module, in their order, right after the module's reduction."""
        source = self.source()
        if source is None or self.open is None or p.grad is None:
            return
        grad, last = _local(p.grad), self.last.get(p)
        if last is not None and last() is not grad:
            source._tallies.pop(p, None)  # if anything is known, it is of a step that was skipped
        self.open.hand_out(p, source._tally_of(p))
        source._tallies[p].norm = gradient_norm(grad)
        self.last[p] = weakref.ref(grad)


class _SamplesToo:
    """A reduce-scatter for FSDP2 (its ``ReduceScatter`` interface), and an all-to-all that brings every rank's part."""

    def __init__(self, owner: _ReduceScatters, module: nn.Module, one: Tensor) -> None:
        self.owner, self.module = owner, weakref.ref(module)
        parts = _shard_axis(one)[1]  # all of a module are cut alike
        self.ranks, self.alone, self.replicas = _mesh_of(one).size(), parts == 1, _mesh_of(one).size() // parts
        self.reset()

    def reset(self) -> None:
        self.flat: _Group | None = None
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

    def hand_out(self, p: Any, tally: _Tally) -> None:
        """The next parameter's part of the last reduction; parts are padded to equal lengths along an axis."""
        assert self.flat is not None
        shape = tuple(_local(p).shape)
        begin, rows = self.taken, prod(shape[1:])
        axis, ranks = _shard_axis(p)
        self.taken += ceil(p.shape[0] / ranks) * rows if axis == 0 else prod(shape)
        self.claimed = True
        _used_here(self.flat.spread, self.flat.total, tally.spread, tally.total)
        part = self.flat.part(slice(begin, begin + prod(shape)), shape)
        if tally.spread is not None and tally.total is not None:
            part = part.merged(_Group(tally.spread, tally.total, tally.samples // self.replicas))
        tally.spread, tally.total = part.spread, part.total
        tally.samples = tally.present = part.count * self.replicas

    def _listens(self, x: Tensor) -> bool:
        source = self.owner.source()
        if source is None or source._closed or x.is_complex():
            return False
        self.owner.begin(source)
        return True

    def _keep(self, samples: Tensor, divisor: float) -> None:
        group = _Group.of(samples, divisor)
        if self.flat is not None and not self.claimed and self.flat.total.shape == group.total.shape:
            group = group.merged(self.flat)  # replicas have not been added up yet (set_requires_all_reduce)
        self.flat, self.taken, self.claimed, self.owner.open = group, 0, False, self

    def _divisor(self) -> float:
        """What FSDP2 divides a sum over all ranks by: their number, unless it was told otherwise."""
        module: Any = self.module()
        state = module._get_fsdp_state()
        return state._fsdp_param_group.gradient_divide_factor or float(self.ranks)


@dataclass
class _Group:
    """Samples of some ranks: Σ (y - their mean)², Σ y in float64 (differences of it are small), and their number."""

    spread: Tensor
    total: Tensor
    count: int

    @classmethod
    def of(cls, x: Tensor, divisor: float) -> "_Group":
        """From the rows of x, each a sample times the divisor."""
        y = x.to(work_dtype(x.dtype), copy=True).div_(divisor)
        total = y.sum(0, dtype=torch.float64)
        return cls(y.sub_((total / len(y)).to(y.dtype)).square_().sum(0), total, len(y))

    def part(self, where: slice, shape: tuple[int, ...]) -> "_Group":
        return _Group(self.spread[where].view(shape), self.total[where].view(shape), self.count)

    def merged(self, other: "_Group") -> "_Group":
        """Both together."""
        apart = (self.total / self.count - other.total / other.count).to(self.spread.dtype)
        weight = self.count * other.count / (self.count + other.count)
        spread = (self.spread + other.spread).addcmul_(apart, apart, value=weight)
        return _Group(spread, self.total + other.total, self.count + other.count)


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


def _reshard(module: Any) -> None:
    module.reshard()


def _set_reduce_scatter(module: Any, reduce_scatter: _SamplesToo) -> None:
    module.set_custom_reduce_scatter(reduce_scatter)


def _reduce_scatter(output: Tensor, given: Tensor, **options: Any) -> Any:
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    return getattr(dist, name)(output, given, **options)


def _check_placements(p: Any) -> None:
    if sum(placement.is_shard() for placement in p.placements) != 1:
        raise GradientError(
            f"RankVariance serves FSDP2 with and without replicas, got the placements {p.placements}: leave tensor-"
            "parallel modules to the stream (variance=None)"
        )


def _shard_axis(p: Any) -> tuple[int, int]:
    """The axis a parameter is cut along, and into how many parts."""
    for mesh_axis, placement in enumerate(p.placements):
        if placement.is_shard():
            return placement.dim, p.device_mesh.size(mesh_axis)
    raise AssertionError("checked when the source was made")


def _over_replicas(p: Any, tally: _Tally, spread: Tensor, G: Tensor) -> Tensor:
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


def _local(x: Any) -> Tensor:
    return x._local_tensor if _is_sharded(x) else x


def _mesh_of(p: Any) -> Any:
    return p.device_mesh


def _is_sharded(x: Any) -> bool:
    return hasattr(x, "device_mesh")


def _like(p: Any, local: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
