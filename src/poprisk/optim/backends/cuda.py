"""The fused CUDA backend: prepares the coefficients on the device and launches one Triton kernel per kind of tensor.

Step counts stay on the device, so nothing waits for it and a CUDA graph may capture the step.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from poprisk.optim.backends.cpu import GATES, is_dense
from poprisk.optim.work import Job, Work, real
from poprisk.rules.coefficients import Coefficients, Hyper, advance
from poprisk.rules.rounding import tensor_key

BLOCK = 4096
WARPS = 8
WEIGHTS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def can_serve(job: Job, work: Work) -> bool:
    """Element-wise gates, dense tensors laid out alike, counters on the device, and the dtypes the kernel knows."""
    if job.hyper.granularity != "element" or job.hyper.normalize_gate or not work.state["step"].is_cuda:
        return False
    w = real(work.param)
    if w.dtype not in WEIGHTS or real(work.grad).dtype != w.dtype or not is_dense(work.param):
        return False
    math = torch.float64 if w.dtype == torch.float64 else torch.float32
    allowed = (math, torch.bfloat16) if math == torch.float32 else (math,)
    moments = [x for name, x in work.state.items() if name.startswith("exp_")]
    if real(work.state["exp_avg"]).dtype != math or any(real(x).dtype not in allowed for x in moments):
        return False
    given = [] if work.variance is None else [work.variance]
    if any(real(x).dtype != math for x in given):
        return False
    return all(x.stride() == work.param.stride() for x in (work.grad, *moments, *given))


def step(job: Job, works: list[Work]) -> None:
    """One step for the given works, one launch per combination of dtypes."""
    batches: dict[Any, list[Work]] = defaultdict(list)
    for work in works:
        s = work.state.get("exp_var") if job.hyper.tracks_variance else None
        dtypes = (real(work.param).dtype, real(work.state["exp_avg_sq"]).dtype, None if s is None else real(s).dtype)
        batches[(*dtypes, work.variance is not None)].append(work)
    for (w, v, s, observed), batch in batches.items():
        _launch(job, batch, w, v, s, observed)


def _launch(job: Job, works: list[Work], w: torch.dtype, v: torch.dtype, s: torch.dtype | None, observed: bool) -> None:
    import triton.language as tl

    from poprisk.optim.backends.cuda_kernel import COLUMNS, POINTERS, fused_step_kernel

    hyper, device = job.hyper, works[0].param.device
    names = {
        torch.float32: tl.float32,
        torch.float64: tl.float64,
        torch.bfloat16: tl.bfloat16,
        torch.float16: tl.float16,
    }
    math = torch.float64 if w == torch.float64 else torch.float32
    block = BLOCK if math == torch.float32 else BLOCK // 2
    pointers = _pointers(works, s is not None)
    table = _device_table(pointers, device)
    blocks, starts = _block_map(tuple(real(x.param).numel() for x in works), block, device)
    if not blocks.numel():
        return
    coefficients = _coefficients(job, works, observed, math)
    aligned = all(p % 16 == 0 for i, p in enumerate(pointers) if i % POINTERS < 6)
    even = all(real(x.param).numel() % 16 == 0 for x in works)
    limits = torch.finfo(math)
    with torch.cuda.device(device):
        fused_step_kernel[(blocks.numel(),)](
            table, coefficients, blocks, starts, job.found_inf if job.found_inf is not None else coefficients, job.left_out,
            W=names[w], V=names[v], S=names[s or math], REAL=names[math], GATE=GATES[hyper.gate], HAS_S=s is not None,
            OBSERVED=observed and s is not None, BATCH_SIGNAL=hyper.signal == "batch", GATED_DECAY=hyper.gated_decay,
            SKIP=hyper.skip_nonfinite and hyper.gate is not None, ALIGNED=aligned, EVEN=even, SCALED=job.found_inf is not None,
            TINY=limits.tiny, LARGEST=limits.max, BLOCK=block, COLUMNS_=COLUMNS, POINTERS_=POINTERS, num_warps=WARPS,
        )  # fmt: skip


def _coefficients(job: Job, works: list[Work], observed: bool, dtype: torch.dtype) -> Tensor:
    """One row per tensor, computed where the counters are, and the counters moved on (not past an overflow)."""
    hyper = job.hyper
    step = torch.stack([w.state["step"] for w in works]).double()
    var_step = torch.stack([w.state["var_step"] for w in works]).double() if hyper.tracks_variance else step
    gain: Any = torch.stack([w.state["var_gain"] for w in works]).double() if hyper.alpha == "calibrated" else 0.0
    c = advance(hyper, step, var_step, gain, observed=observed)
    scale: Any = job.sign
    if job.grad_scale is not None:
        scale = job.sign / job.grad_scale.to(step.device, torch.float64).reshape(())
    rows = _fill(hyper, c, scale, step, dtype)
    skip = None if job.found_inf is None else job.found_inf.reshape(()) > 0
    for name, before, after in (("step", step, c.step), ("var_step", var_step, c.var_step), ("var_gain", gain, c.gain)):
        if name in works[0].state and isinstance(after, Tensor):
            moved = after if skip is None else torch.where(skip, before, after)
            torch._foreach_copy_([w.state[name] for w in works], list(moved.to(works[0].state[name].dtype).unbind()))
    return rows


def _fill(hyper: Hyper, c: Coefficients, scale: Any, step: Tensor, dtype: torch.dtype) -> Tensor:
    """The columns in the order the kernel reads them, computed in float64 and then rounded once."""
    given = (~torch.isnan(c.open_gate)).double() if isinstance(c.open_gate, Tensor) else float(c.open_gate == c.open_gate)
    value = torch.nan_to_num(c.open_gate) if isinstance(c.open_gate, Tensor) else (c.open_gate if given else 0.0)
    beta1, beta2 = hyper.betas
    columns = [scale, c.center, c.s_keep, c.s_new, 1 - beta1, beta2, 1 - beta2, 1 / beta1 if beta1 else 0.0]
    columns += [c.m_debias, c.v_debias, c.s_debias, c.alpha, hyper.strength, hyper.gate_eps, given, value]
    columns += [hyper.lr, hyper.eps, hyper.weight_decay, c.step]
    numbers = tuple(0.0 if isinstance(x, Tensor) else float(x) for x in columns)
    rows = _constant_row(numbers, dtype, step.device).repeat(len(step), 1)
    for index, x in enumerate(columns):
        if isinstance(x, Tensor):
            rows[:, index] = x if x.device == rows.device else x.to(rows.device)
    return rows


def _pointers(works: list[Work], has_variance: bool) -> tuple[int, ...]:
    flat: list[int] = []
    for work in works:
        state = work.state
        flat += (
            work.param.data_ptr(),
            work.grad.data_ptr(),
            state["exp_avg"].data_ptr(),
            state["exp_avg_sq"].data_ptr(),
            state["exp_var"].data_ptr() if has_variance else 0,
            0 if work.variance is None else work.variance.data_ptr(),
            real(work.param).numel(),
            tensor_key(work.key),
        )
    return tuple(flat)


class _DeviceCache:
    """The few newest small tensors sent to the device, by what they hold.

    A CUDA graph replays the copy it captured, so what is made during a capture, source and target, lives as long as the
    process and is never shared with steps outside the graph.
    """

    def __init__(self, limit: int = 16) -> None:
        self.limit = limit
        self.recent: OrderedDict[Any, tuple[Tensor, ...]] = OrderedDict()
        self.captured: list[Any] = []

    def get(self, key: Any, device: torch.device, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing and key in self.recent:
            return self.recent[key]
        pinned = [x.pin_memory() for x in make()]
        sent = tuple(x.to(device, non_blocking=True) for x in pinned)
        if capturing:
            self.captured.append((pinned, sent))
            return sent
        self.recent[key] = sent
        if len(self.recent) > self.limit:
            self.recent.popitem(last=False)
        return sent


_cache = _DeviceCache()


def _device_table(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return _cache.get(("table", pointers, device), device, lambda: (torch.tensor(pointers, dtype=torch.int64),))[0]


def _constant_row(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return _cache.get(("row", numbers, dtype, device), device, lambda: (torch.tensor([numbers], dtype=dtype),))[0]


def _block_map(sizes: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each block: the tensor it lies in and where it starts there."""

    def make() -> tuple[Tensor, Tensor]:
        counts = torch.tensor([-(-n // block) for n in sizes])
        tensor = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), counts)
        first = torch.cumsum(counts, 0) - counts
        return tensor, (torch.arange(len(tensor)) - first[tensor.long()]) * block

    tensor, start = _cache.get(("blocks", sizes, block, device), device, make)
    return tensor, start
