"""The fused CUDA backend: one Triton launch per kind of tensor, one pass over memory.

Counters usually live on the host and their coefficients are kernel arguments. Where the host must not wait (CUDA
graphs, a gradient scaler, a learning rate on the device) the counters live on the device and the coefficients in a
small table.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from poprisk.optim._shards import coordinates
from poprisk.optim._updates import COUNTERS, SCALE, GroupUpdate, ParamUpdate, counts, real
from poprisk.optim.backends._launch import GATES, LaunchCache, address, columns, tensors
from poprisk.optim.rules._coefficients import Hyper, advance
from poprisk.optim.rules._population import usable_limit
from poprisk.optim.rules._rounding import tensor_key

BLOCK, WARPS = 1024, 8  # four elements per thread: more of them cost registers, and with those the loads in flight
BLOCKS = {"one": 1, "many": 1, "normalized": 4}
"""Blocks per program: for one tensor, for several, and with the sums of a normalized gate, which all programs of a
tensor add up in one place."""
WEIGHTS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@cache
def unavailable() -> str:
    """Why there is no kernel on this machine, or an empty string."""
    return "" if find_spec("triton") else "the fused CUDA kernel needs Triton, which is not installed"


def step(update: GroupUpdate, params: list[ParamUpdate]) -> None:
    """One step for the given params, one launch per combination of dtypes and step counts."""
    lr = update.hyper.lr
    to_device = update.group["capturable"] or update.found_inf is not None or (isinstance(lr, Tensor) and lr.is_cuda)
    tracked = update.hyper.tracks_variance
    batches: dict[Any, list[ParamUpdate]] = defaultdict(list)
    for param in params:
        state = param.state
        if to_device:
            _move_counters(param)
        counters = None
        if not state["step"].is_cuda:
            counters = tuple(state[name].item() for name in COUNTERS if name in state)
        s = state["exp_var"].dtype.to_real() if tracked else None
        dtypes = (param.local.dtype.to_real(), state["exp_avg_sq"].dtype.to_real(), s)
        if param.local.numel():
            batches[(dtypes, param.variance is not None, param.mean is not None, counters)].append(param)
        else:  # nothing to launch, but its step counts: as one of several parts of a tensor it must keep their time
            _step_empty(update, param)
    for (dtypes, observed, _, counters), batch in batches.items():
        _launch(update, batch, _grid(update, batch, dtypes, observed), on_host=counters is not None)
    if len(batches) == 1 and not to_device and all(p.local.numel() for p in params):
        LaunchCache.keep(update, params, (next(iter(batches))[0], None))


def repeat(update: GroupUpdate, last: LaunchCache) -> None:
    """Repeats the last step's launch, for the same tensors; where they lie is sent again only if a gradient moved."""
    dtypes, grid = last.payload
    if grid is None or grid.gradients != [p.grad.data_ptr() for p in update.params]:
        grid = _grid(update, update.params, dtypes, False)
        last.payload = (dtypes, grid)
    _launch(update, update.params, grid, on_host=True, last=last)


def _step_empty(update: GroupUpdate, param: ParamUpdate) -> None:
    """What a step does to the state of a parameter without elements."""
    hyper, state = update.hyper, param.state
    c = advance(hyper, *counts(state, hyper), observed=param.variance is not None)
    after: dict[str, Any] = dict(zip(COUNTERS, (c.step, c.var_step, c.gain), strict=True))
    if hyper.in_adamw_units:
        old = state[SCALE]
        after[SCALE] = torch.stack([torch.zeros_like(old[0]), old[0]])
    for name, value in after.items():
        if name in state:
            new = value if isinstance(value, Tensor) else torch.full_like(state[name], value)
            if update.found_inf is not None:
                new = torch.where(update.found_inf.to(new.device).reshape(()) > 0, state[name], new)
            state[name].copy_(new)


def _move_counters(param: ParamUpdate) -> None:
    for name in COUNTERS:
        if name in param.state and not param.state[name].is_cuda:
            param.state[name] = param.state[name].to(param.local.device, non_blocking=True)


@dataclass(slots=True)
class Grid:
    """What a launch must know about its tensors, and what the kernel is compiled for."""

    gradients: list[int]
    """Addresses of the gradients."""
    programs: int
    math: torch.dtype
    size: int
    """Length of the first tensor."""
    records: Tensor
    notes: Tensor
    sums: Tensor
    options: dict[str, Any]
    """Arguments that the kernel is compiled for."""


def _grid(update: GroupUpdate, params: list[ParamUpdate], dtypes: tuple[Any, ...], observed: bool) -> Grid:
    import triton.language as tl

    from poprisk.optim.backends._cuda_kernel import COLUMNS, NOTES, RECORD

    names = {dtype: getattr(tl, str(dtype).removeprefix("torch.")) for dtype in WEIGHTS}
    w, v, s = dtypes
    hyper, device = update.hyper, params[0].local.device
    math = torch.float64 if w == torch.float64 else torch.float32
    table = tuple(chain.from_iterable(_place(p, hyper) for p in params))
    sizes = table[6::RECORD]
    single = len(params) == 1 and not params[0].offset
    blocks = BLOCKS["normalized" if hyper.in_adamw_units else "one" if single else "many"]
    span = BLOCK * blocks
    records = notes = sums = update.left_out
    if not single:
        widths = tuple(x.itemsize for x in (w, w, math, v, s or math, math))
        records = _records(table, widths, span, device)
    if hyper.in_adamw_units:
        notes = _notes(tuple(p.state[SCALE].data_ptr() for p in params), sizes, span, device)
        sums = update.memory.scratch(len(params) * NOTES, device)
    limits = torch.finfo(math)
    options = {
        "W": names[w], "V": names[v], "S": names[s or math], "REAL": names[math], "GATE": GATES[hyper.gate],
        "HAS_S": s is not None, "OBSERVED": observed and s is not None, "BATCH_SIGNAL": hyper.signal == "batch",
        "GATED_DECAY": hyper.gated_decay and hyper.gate is not None,
        "SKIP": hyper.skip_nonfinite and hyper.gate is not None, "SINGLE": single,
        "ALIGNED": all(p % 16 == 0 for i, p in enumerate(table) if i % RECORD < 6),
        "EVEN": all(n % 16 == 0 for n in sizes), "NORMALIZED": hyper.in_adamw_units,
        "AVERAGED": params[0].mean is not None, "TINY": limits.tiny, "LARGEST": usable_limit(math), "BLOCK": BLOCK,
        "BLOCKS": blocks, "COLUMNS_": COLUMNS, "RECORD_": RECORD, "NOTES_": NOTES, "num_warps": WARPS, "num_stages": 1,
    }  # fmt: skip
    programs = sum(-(-n // span) for n in sizes)
    return Grid(list(table[1::RECORD]), programs, math, sizes[0], records, notes, sums, options)


def _launch(
    update: GroupUpdate, params: list[ParamUpdate], grid: Grid, on_host: bool, last: LaunchCache | None = None
) -> None:
    from poprisk.optim.backends._cuda_kernel import fused_step_kernel

    hyper, first, empty = update.hyper, params[0], update.left_out
    rows_needed = not on_host or grid.math == torch.float64  # kernel arguments are rounded to float32
    numbers, rows = _coefficients(update, params, first.variance is not None, on_host, rows_needed, grid.math, last)
    plain = hyper.centering == "paper" and update.grad_scale is None and not update.group["maximize"]
    s = first.state["exp_var"] if grid.options["HAS_S"] else first.grad
    x = next((x for x in (first.variance, first.mean) if x is not None), first.grad)
    moments = (first.state["exp_avg"], first.state["exp_avg_sq"], s)
    kernel: Any = fused_step_kernel  # what Triton makes of it has another signature
    with torch.cuda.device(first.local.device):
        kernel[(grid.programs,)](
            *(real(each) for each in (first.local, first.grad, *moments, x)),
            grid.size, tensor_key(first.key), grid.records, empty if rows is None else rows, grid.notes, grid.sums,
            empty if update.found_inf is None else update.found_inf, empty, *numbers, **grid.options, PLAIN=plain,
            MAY_BE_GIVEN=rows is not None or numbers[12] != 0.0, ROWS=rows is not None,
            SCALED=update.found_inf is not None,
        )  # fmt: skip
    if first.mean is not None and update.average is not None:
        update.average.mark(id(p.local) for p in params)


def _place(p: ParamUpdate, hyper: Hyper) -> tuple[int, ...]:
    """Addresses of w, g, m, v, s and of the given variance or the weights' mean, then length and rounding seed."""
    w, m, v, s, variance, mean, _ = map(address, tensors(p, hyper))
    return w, p.grad.data_ptr(), m, v, s, variance or mean, coordinates(p.local), _rounding_place(p)


def _coefficients(
    update: GroupUpdate,
    params: list[ParamUpdate],
    observed: bool,
    on_host: bool,
    rows_needed: bool,
    dtype: torch.dtype,
    last: LaunchCache | None = None,
) -> tuple[list[float], Tensor | None]:
    """The kernel's numbers, and the table of rows where they are on the device or too fine for arguments; counts on."""
    hyper, state = update.hyper, params[0].state
    if not on_host:
        state = {n: torch.stack([w.state[n] for w in params]).double() for n in COUNTERS if n in state}
    c = advance(hyper, *counts(state, hyper), observed=observed)
    scale: Any = update.sign
    if update.grad_scale is not None:
        scale = update.sign / update.grad_scale.double().reshape(())
    values = columns(update, c, scale)
    numbers = [0.0 if isinstance(x, Tensor) and x.is_cuda else float(x) for x in values]
    rows = None
    if rows_needed:
        device = params[0].local.device
        rows = _constant_row(tuple(numbers), dtype, device).repeat(len(params), 1)
        for index, x in enumerate(values):
            if isinstance(x, Tensor) and x.is_cuda:
                rows[:, index] = x
    after = {"step": c.step, "var_step": c.var_step, "var_gain": c.gain}
    if last is not None:
        last.count(after)
    else:
        _count(update, params, state, {n: x for n, x in after.items() if n in state})
    return numbers, rows


def _count(update: GroupUpdate, params: list[ParamUpdate], before: dict[str, Any], after: dict[str, Any]) -> None:
    """Moves the counters on, but not past an overflow."""
    for name, value in after.items():
        counters = [w.state[name] for w in params]
        if isinstance(value, Tensor):
            moved = value
            if update.found_inf is not None:
                moved = torch.where(update.found_inf.reshape(()) > 0, before[name], value)
            torch._foreach_copy_(counters, list(moved.to(counters[0].dtype).unbind()))
        else:
            torch._foreach_zero_(counters)
            torch._foreach_add_(counters, value)


def _rounding_place(param: ParamUpdate) -> int:
    """Seed of the tensor in the low half, place of this part of it in the high half, as a signed 64-bit number."""
    offset = param.offset & 0xFFFFFFFF
    place = tensor_key(param.key) | (offset << 32)
    return place - (1 << 64) if offset >> 31 else place


_CAPTURED: list[Any] = []
"""What was made while a CUDA graph was captured. The graph replays the copy from the host, so both ends of it live as
long as the process, and are never shared with steps outside the graph."""


def _kept(most: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Keeps the newest results of a function, and those made during a capture for good."""

    def wrap(make: Callable[..., Any]) -> Callable[..., Any]:
        recent = lru_cache(most)(make)

        def get(*key: Any) -> Any:
            if not torch.cuda.is_current_stream_capturing():
                return recent(*key)
            _CAPTURED.append(make(*key))
            return _CAPTURED[-1]

        return get

    return wrap


def _sent(device: torch.device, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies on the device, which nothing waits for."""
    pinned = [x.pin_memory() for x in tensors]
    if torch.cuda.is_current_stream_capturing():
        _CAPTURED.append(pinned)
    return tuple(x.to(device, non_blocking=True) for x in pinned)


@_kept(16)
def _constant_row(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _sent(device, torch.tensor([numbers], dtype=dtype))[0]


@_kept(16)
def _blocks(sizes: tuple[int, ...], span: int, device: torch.device) -> tuple[Tensor, ...]:
    """For each program: which tensor it belongs to, and where it begins there."""
    counts = torch.tensor([-(-n // span) for n in sizes])
    tensor = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    return _sent(device, tensor, (torch.arange(len(tensor)) - (torch.cumsum(counts, 0) - counts)[tensor]) * span)


@_kept(16)
def _notes(scales: tuple[int, ...], sizes: tuple[int, ...], span: int, device: torch.device) -> Tensor:
    """For each tensor with a normalized gate: where its scale lies, its length, the fixed point of its sums, programs.

    The fixed point leaves room for a sum of as many ones as there are elements, and is no finer than a float64.
    """
    rows = [(at, n, min(52, 62 - n.bit_length()), -(-n // span)) for at, n in zip(scales, sizes, strict=True)]
    return _sent(device, torch.tensor(rows, dtype=torch.int64))[0]


@_kept(16)
def _table(places: tuple[int, ...], widths: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    return _sent(device, torch.tensor(places, dtype=torch.int64).view(-1, 8), torch.tensor([*widths, 0, 0]))


@_kept(2)  # a record is a thousandth of the tensors it describes
def _records(places: tuple[int, ...], widths: tuple[int, ...], span: int, device: torch.device) -> Tensor:
    """For each program, 64 bytes: where its parts lie, how many elements it has, and its rounding seed.

    Computed on the device from one small table, and again only when a pointer changes.
    """
    tensor, start = _blocks(places[6::8], span, device)
    table, width = _table(places, widths, device)
    records = table[tensor].addcmul_(start[:, None], width)
    records[:, 6] = (tensor << 32) | (records[:, 6] - start).clamp_(max=span)
    seed, offset = records[:, 7] & 0xFFFFFFFF, records[:, 7] >> 32
    records[:, 7] = (seed << 32) | ((start + offset) & 0xFFFFFFFF)
    return records
