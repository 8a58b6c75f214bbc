"""The fused CPU backend: one pass over memory for a whole list of tensors, in C."""

from array import array
from collections import defaultdict
from ctypes import CDLL
from functools import cache
from itertools import chain
from typing import Any

import torch

from poprisk.optim._work import Job, Work, counts, set_counts
from poprisk.optim.backends import _compiler as compiler
from poprisk.optim.backends import _plan as plan
from poprisk.optim.backends._layout import one_pass
from poprisk.optim.rules._coefficients import Coefficients, Hyper, advance
from poprisk.optim.rules._rounding import rounding_seed

Variant = tuple[Any, ...]
GATES = {None: 0, "soft": 1, "hard": 2, "snr": 3}
WEIGHTS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


def can_serve(job: Job, work: Work) -> bool:
    """Element-wise gates, dense tensors laid out alike, and the dtypes the kernel knows."""
    return one_pass(job, work, WEIGHTS)


def step(job: Job, works: list[Work]) -> None:
    """One step for the given works, one call into C per combination of dtypes.

    Raises:
        BuildError: a kernel cannot be built; nothing was touched.
    """
    if job.found_inf is not None and job.found_inf.item():
        return
    batches: dict[Variant, list[Work]] = defaultdict(list)
    for work in works:
        batches[_variant(job.hyper, work)].append(work)
    libraries = [compiler.load(_defines(variant)) for variant in batches]
    for library, batch in zip(libraries, batches.values(), strict=True):
        _step_batch(job, library, batch)
    if len(batches) == 1:
        plan.remember(job, works, libraries[0])


def repeat(job: Job) -> bool:
    """Repeats the last step's call, if the same tensors come again; False if it has to be looked at anew."""
    last = plan.remembered(job)
    if last is not None:
        c = advance(job.hyper, *counts(job.works[0].state, job.hyper))
        last.count({"step": c.step, "var_step": c.var_step, "var_gain": c.gain})
        _call(job, last.payload, job.works, [c], [0] * len(job.works))
    return last is not None


def _step_batch(job: Job, library: CDLL, works: list[Work]) -> None:
    """One call for all works; those with the same counters share their coefficients."""
    rows: dict[tuple[Any, ...], int] = {}
    done: list[Coefficients] = []
    places = []
    for work in works:
        now = counts(work.state, job.hyper)
        if now not in rows:
            rows[now] = len(done)
            done.append(advance(job.hyper, *now, observed=work.variance is not None))
        places.append(rows[now])
        c = done[places[-1]]
        set_counts(work.state, c.step, c.var_step, c.gain)
    _call(job, library, works, done, places)


def _call(job: Job, library: CDLL, works: list[Work], done: list[Coefficients], places: list[int]) -> None:
    """Into C, with the structs ``item`` and ``coefficients`` of the C file, field by field."""
    scale = job.sign / (1.0 if job.grad_scale is None else job.grad_scale.item())
    table = array("d", chain.from_iterable(_row(job.hyper, c, scale) for c in done))
    own = job.hyper.tracks_variance
    flat: list[int] = []
    for work, place in zip(works, places, strict=True):
        param, state = work.param, work.state
        flat += (
            param.data_ptr(),
            work.grad.data_ptr(),
            state["exp_avg"].data_ptr(),
            state["exp_avg_sq"].data_ptr(),
            state["exp_var"].data_ptr() if own else 0,
            0 if work.variance is None else work.variance.data_ptr(),
            param.numel() * (2 if param.is_complex() else 1),
            place,
            int(rounding_seed(int(done[place].step), work.key)) + (0 if work.shard is None else work.shard.offset),
        )
    items = array("q", flat)
    args = (len(works), items.buffer_info()[0], table.buffer_info()[0], torch.get_num_threads())
    left_out = library.poprisk_step(*args)
    if left_out:
        job.left_out.add_(left_out)


def _row(hyper: Hyper, c: Coefficients, scale: float) -> tuple[float, ...]:
    """The struct ``coefficients`` of the C file, field by field."""
    given = c.open_gate == c.open_gate
    values = (
        scale,
        c.center,
        c.s_keep,
        c.s_new,
        *hyper.betas,
        c.m_debias,
        c.v_debias,
        c.s_debias,
        c.alpha,
        hyper.strength,
        hyper.gate_eps,
        1.0 if given else 0.0,
        c.open_gate if given else 0.0,
        hyper.lr,
        hyper.eps,
        hyper.weight_decay,
    )
    return tuple(float(x) for x in values)


def _variant(hyper: Hyper, work: Work) -> Variant:
    """What decides which kernel a parameter needs: dtypes, and the options that are compiled in."""
    s = work.state["exp_var"].dtype if hyper.tracks_variance else None
    dtypes = (work.param.dtype, work.state["exp_avg_sq"].dtype, s)
    return (*dtypes, work.variance is not None, hyper.gate, hyper.signal, hyper.gated_decay, hyper.skip_nonfinite)


@cache
def _defines(variant: Variant) -> tuple[str, ...]:
    w, v, s, observed, gate, signal, gated_decay, skip_nonfinite = variant
    values = {
        "W_TYPE": WEIGHTS[w.to_real()],
        "V_BF16": v == torch.bfloat16,
        "S_KIND": 0 if s is None else 1 + (s == torch.bfloat16),
        "GATE": GATES[gate],
        "OBSERVED": observed and s is not None,
        "BATCH_SIGNAL": signal == "batch",
        "GATED_DECAY": gated_decay,
        "SKIP_NONFINITE": skip_nonfinite and gate is not None,
    }
    return tuple(f"-D{name}={int(value)}" for name, value in values.items())
