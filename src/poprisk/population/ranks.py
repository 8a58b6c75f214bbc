r"""The variance of a gradient that is averaged over processes: each process brings samples of its own.

Under DDP and FSDP2 the average over R ranks is one collective per bucket. The squares of what is averaged travel in a
second one of the same kind beside it; the gradient itself is reduced exactly as without a source.
"""

import weakref
from collections.abc import Sequence
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

    .. math:: \frac{K \sum_{rj} y_{rj}^2 - G^2}{K-1} = \frac{K}{K-1} \sum_{rj} (y_{rj} - \bar y)^2

    which is what :class:`poprisk.MicrobatchVariance` gives in one process over the same K micro-batches. The left-hand
    form is what is computed, because it needs one message and not two, one after the other. Its rounding error is some
    1e-7 of :math:`G^2`: it matters only where the noise is far below the signal, and there the gate is open anyway.

    It costs a second collective of the gradients' size, in float32, and one buffer of that size until the step. A
    uniform rescaling of ``.grad`` afterwards (clipping, ``GradScaler.unscale_``) rescales the variance by the square of
    the factor. Every rank must see batches of one size; a parameter that had no part in a sample counts as zero there.
    Give every rank data of its own: the same batch on two ranks is not two samples.

    - **DDP**: micro-batches under ``no_sync()`` are R k samples (hooks note their squares as they arrive); without
      ``no_sync()`` as well. It takes the model's communication hook, of which there is one.
    - **FSDP2** (``fully_shard``; also with replication, HSDP): every reduce-scatter brings R samples, so gradient
      accumulation with the default synchronization gives R k of them. With ``set_requires_gradient_sync(False)`` a
      rank's accumulated gradient is one sample: R of them, still without bias. Reductions in float32 or bfloat16, by
      averaging (the default).

    After a step that was skipped, clear the gradients by ``zero_grad()`` as it is (or call :meth:`reset`): under FSDP2
    gradients filled with zeros (``set_to_none=False``) look as if they went on.

    With one rank and one micro-batch there is no variance: the optimizer uses the stream. The paper's
    :math:`\Sigma_B/(b-1)` is over the examples of one batch; this is the same variance, estimated from K group means,
    equal to it for groups of one example.

    Args:
        model: A ``DistributedDataParallel`` model, or the root module given to ``fully_shard``. Hooks stay until
            ``close()``, or the end of a ``with`` block.

    Raises:
        DataError: the model is neither.
        GradientError: gradients were not cleared before the first micro-batch of a step, or FSDP2 was told to reduce
            in a way that is no average.

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
        if isinstance(model, DistributedDataParallel):
            self._transport: _Transport = _AllReduce(self, model)
        elif sharded := [m for m in model.modules() if hasattr(m, "set_custom_reduce_scatter")]:
            self._transport = _ReduceScatters(self, sharded)
        else:
            raise DataError(
                f"RankVariance needs a DistributedDataParallel model or one that fully_shard was applied to, got "
                f"{type(model).__name__}: wrap it first, or use MicrobatchVariance in one process"
            )

    def __reduce__(self) -> NoReturn:
        raise DataError(
            "RankVariance cannot be copied or pickled, because it is hooked to its model: copy or save the optimizer's "
            "state_dict() instead, and give the new optimizer a source of its own"
        )

    def variances(self, parameters: Sequence[Tensor]) -> list[Tensor | None]:
        """The variance of each averaged gradient, once; None for what was not averaged, or from one sample only."""
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

    def _add(self, p: Tensor, squares: Tensor, samples: int, norm: Tensor) -> None:
        """More samples of a parameter: the sum of their squares, and the norm its gradient has with them."""
        tally = self._tallies.setdefault(p, _Tally())
        tally.squares = squares if tally.squares is None else tally.squares.add_(squares)
        tally.samples += samples
        tally.norm = norm


@dataclass
class _Tally:
    """What is known of one parameter's samples beyond their sum, which ``.grad`` holds: Σ y² and how many there are."""

    squares: Tensor | None = None
    samples: int = 0
    norm: Tensor | None = None
    leftover: Tensor | None = None


class _Transport(Protocol):
    def reset(self) -> None: ...

    def close(self) -> None: ...


def _variance(p: Tensor, tally: _Tally, samples: int) -> Tensor | None:
    """(K Σ y² - G²) / (K - 1), where K also counts the samples a parameter had no part in."""
    assert p.grad is not None
    if tally.squares is None or tally.norm is None:
        return None
    grad = _local(p.grad)
    if tally.squares.is_cuda:  # made on the stream of the reduction
        tally.squares.record_stream(torch.cuda.current_stream(tally.squares.device))
    squares = tally.squares.to(grad.device)  # FSDP2 may have moved the gradient to the host
    squares = rescale(_over_replicas(p, squares), gradient_ratio(grad, tally.norm.to(grad.device)))
    G = grad.to(squares.dtype)
    variance = torch.addcmul(squares * samples, G, G, value=-1).div_(samples - 1).clamp_(min=0)
    return variance if p.grad is grad else _like(p, variance)


class _AllReduce:
    """DDP: a communication hook sends the squares beside the gradients; hooks on the parameters note micro-batches."""

    def __init__(self, source: RankVariance, model: DistributedDataParallel) -> None:
        self.source, self.group = weakref.ref(source), model.process_group
        self.ranks = dist.get_world_size(self.group)
        self.local: dict[Tensor, _Unsent] = {}
        self.arriving: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        self.arrived: set[Tensor] = set()
        self.handles = []
        for p in model.parameters():
            if p.requires_grad and not p.is_complex():
                here: weakref.ref[Any] = weakref.ref(p)
                self.handles.append(p.register_hook(partial(self._arrive, here)))
                self.handles.append(p.register_post_accumulate_grad_hook(self._accumulated))
        model.register_comm_hook(None, lambda _, bucket: _average_and_squares(self, bucket))

    def reset(self) -> None:
        self.local, self.arriving, self.arrived = {}, {}, set()

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

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
        unsent = self.local.get(p)
        first = unsent is not None and unsent.count == 1 and unsent.squares is None
        self.arriving[p] = x.detach(), _squared(p.grad) if first else None

    @torch.no_grad()
    def _accumulated(self, p: Tensor) -> None:
        if self.source() is None:
            return
        self.arrived.add(p)
        unsent = self.local.setdefault(p, _Unsent())
        x, before = self.arriving.pop(p, (None, None))
        if x is not None:
            unsent.squares = _squared(x).add_(0.0 if unsent.squares is None else unsent.squares)
            if before is not None:
                unsent.squares += before
        unsent.count += 1


@dataclass
class _Unsent:
    """A rank's own samples since the last message. A first one on a cleared gradient *is* the gradient."""

    count: int = 0
    squares: Tensor | None = None


def _average_and_squares(transport: _AllReduce, bucket: dist.GradBucket) -> Any:
    """DDP's own average of a bucket and, beside it, the sum over ranks and micro-batches of y²; a future of it."""
    source, flat, ranks = transport.source(), bucket.buffer(), transport.ranks
    listens = source is not None and not source._closed and flat.layout == torch.strided and not flat.is_complex()
    params = bucket.parameters() if listens else []
    squares = _bucket_squares(transport, bucket, params) if listens else None
    samples = ranks * max((transport.local[p].count for p in params if p in transport.local), default=1)
    for p in params:
        transport.local.pop(p, None)
    gradients, parts = bucket.gradients(), [] if squares is None else _views(squares, bucket)
    averaged = _future(dist.all_reduce(flat.div_(ranks), group=transport.group, async_op=True))
    if squares is None:
        return averaged.then(lambda done: done.value()[0])
    added = _future(dist.all_reduce(squares, group=transport.group, async_op=True))

    def keep(_: Any) -> Tensor:
        averaged.wait()
        with torch.no_grad():
            squares.div_(ranks * ranks)
            for p, g, y in zip(params, gradients, parts, strict=True):
                if source is not None:
                    source._add(p, y, samples, gradient_norm(g))
        return flat

    return added.then(keep)


def _bucket_squares(transport: _AllReduce, bucket: dist.GradBucket, params: list[Tensor]) -> Tensor:
    """Σ x² over this rank's samples since the last message, laid out like the bucket."""
    with torch.no_grad():
        squares = _squared(bucket.buffer())
        for p, y in zip(params, _views(squares, bucket), strict=True):
            unsent = transport.local.get(p)
            if unsent is None:
                y.zero_()  # no part in it
            elif unsent.squares is not None:
                y.copy_(unsent.squares)
    return squares


def _views(squares: Tensor, bucket: dist.GradBucket) -> list[Tensor]:
    """The bucket's parameters in a flat tensor laid out like its buffer, each with the strides of its gradient."""
    begin = bucket.buffer().storage_offset()
    return [squares.as_strided(g.shape, g.stride(), g.storage_offset() - begin) for g in bucket.gradients()]


def _future(work: Any) -> Any:
    return work.get_future()


class _ReduceScatters:
    """FSDP2: each module's reduce-scatter is followed by one of the squares; each parameter then takes its part."""

    def __init__(self, source: RankVariance, modules: Sequence[nn.Module]) -> None:
        self.source = weakref.ref(source)
        self.open: _SquaresToo | None = None
        self.begins = True
        self.last: dict[Tensor, weakref.ref[Tensor]] = {}
        self.handles = []
        self.messengers = [_SquaresToo(self) for _ in modules]
        for module, messenger in zip(modules, self.messengers, strict=True):
            _set_reduce_scatter(module, messenger)
        everything = dict.fromkeys(p for module in modules for p in module.parameters())
        self.parameters = [p for p in everything if p.requires_grad and not p.is_complex() and _is_sharded(p)]
        for p in self.parameters:
            _check_placements(p)
            self.handles.append(p.register_post_accumulate_grad_hook(self._take))

    def reset(self) -> None:
        self.open, self.begins = None, True
        for messenger in self.messengers:
            messenger.flat = None

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
        source._add(p, self.open.next_part(p), _mesh_of(p).size(), gradient_norm(grad))
        self.last[p] = weakref.ref(grad)


class _SquaresToo:
    """A reduce-scatter for FSDP2 (its ``ReduceScatter`` interface): its own, and one of the squares."""

    def __init__(self, owner: _ReduceScatters) -> None:
        self.owner = owner
        self.flat: Tensor | None = None
        self.taken = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        work = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        source = self.owner.source()
        if source is None or source._closed:
            return work
        if op != dist.ReduceOp.AVG:
            raise GradientError(
                f"RankVariance needs FSDP2 to average float32 or bfloat16 gradients, got the operation {op} on "
                f"{input_tensor.dtype}: set reduce_dtype=torch.float32 in the MixedPrecisionPolicy, and leave "
                "set_gradient_divide_factor and set_force_sum_reduction_for_comms alone"
            )
        self.owner.begin(source)
        squares = output_tensor.new_empty(output_tensor.shape, dtype=work_dtype(output_tensor.dtype))
        _reduce_scatter(squares, _squared(input_tensor), op=op, group=group)
        squares.div_(group.size())  # the mean of x² over R ranks is R times the sum of (x / R)²
        if self.flat is not None and self.taken == 0 and self.flat.shape == squares.shape:
            squares += self.flat  # replicas have not been added up yet (set_requires_all_reduce), so no one took it
        self.flat, self.taken, self.owner.open = squares, 0, self
        return work

    def next_part(self, p: Any) -> Tensor:
        """The next parameter's part: parts are padded to equal lengths along the first axis."""
        assert self.flat is not None
        shape = tuple(_local(p).shape)
        begin, rows = self.taken, prod(shape[1:])
        axis, ranks = _shard_axis(p)
        self.taken += ceil(p.shape[0] / ranks) * rows if axis == 0 else prod(shape)
        return self.flat[begin : begin + prod(shape)].view(shape)


def _set_reduce_scatter(module: Any, reduce_scatter: _SquaresToo) -> None:
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


def _over_replicas(p: Any, squares: Tensor) -> Tensor:
    """With replicas (HSDP) the parts' sums of squares are added up over them: y is x over all ranks."""
    if not _is_sharded(p):
        return squares
    for mesh_axis, placement in enumerate(p.placements):
        replicas = p.device_mesh.size(mesh_axis)
        if placement.is_replicate() and replicas > 1:
            there = squares.to(p.device_mesh.device_type, copy=True)
            dist.all_reduce(there, group=p.device_mesh.get_group(mesh_axis))
            squares = there.div_(replicas * replicas).to(squares.device)
    return squares


def _local(x: Any) -> Tensor:
    return x._local_tensor if _is_sharded(x) else x


def _mesh_of(p: Any) -> Any:
    return p.device_mesh


def _is_sharded(x: Any) -> bool:
    return hasattr(x, "device_mesh")


def _like(p: Any, local: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def _squared(x: Tensor) -> Tensor:
    return x.detach().to(work_dtype(x.dtype), copy=True).square_()
