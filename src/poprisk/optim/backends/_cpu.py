"""The fused CPU backend: one pass over memory for a whole list of tensors, in C."""

from array import array
from collections import defaultdict
from ctypes import CDLL
from functools import cache
from itertools import chain
from typing import Any

import torch

from poprisk.optim._updates import GroupUpdate, ParamUpdate, counts, set_counts
from poprisk.optim.backends import _compiler as compiler
from poprisk.optim.backends._launch import LaunchCache, one_pass
from poprisk.optim.rules._coefficients import Coefficients, Hyper, advance
from poprisk.optim.rules._rounding import rounding_seed

Variant = tuple[Any, ...]
GATES = {None: 0, "soft": 1, "hard": 2, "snr": 3}
WEIGHTS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


def can_serve(update: GroupUpdate, param: ParamUpdate) -> bool:
    """Element-wise gates, dense tensors laid out alike, and the dtypes the kernel knows."""
    return one_pass(update, param, WEIGHTS)


def step(update: GroupUpdate, params: list[ParamUpdate]) -> None:
    """One step for the given params, one call into C per combination of dtypes.

    Raises:
        BuildError: a kernel cannot be built; nothing was touched.
    """
    if update.found_inf is not None and update.found_inf.item():
        return
    batches: dict[Variant, list[ParamUpdate]] = defaultdict(list)
    for param in params:
        batches[_variant(update.hyper, param)].append(param)
    libraries = [compiler.load(_defines(variant)) for variant in batches]
    for library, batch in zip(libraries, batches.values(), strict=True):
        _step_batch(update, library, batch)
    if len(batches) == 1:
        LaunchCache.keep(update, params, libraries[0])


def repeat(update: GroupUpdate) -> bool:
    """Repeats the last step's call, if the same tensors come again; False if it has to be looked at anew."""
    last = LaunchCache.of(update)
    if last is not None:
        c = advance(update.hyper, *counts(update.params[0].state, update.hyper))
        last.count({"step": c.step, "var_step": c.var_step, "var_gain": c.gain})
        _call(update, last.payload, update.params, [c], [0] * len(update.params))
    return last is not None


def _step_batch(update: GroupUpdate, library: CDLL, params: list[ParamUpdate]) -> None:
    """One call for all params; those with the same counters share their coefficients."""
    rows: dict[tuple[Any, ...], int] = {}
    done: list[Coefficients] = []
    places = []
    for param in params:
        now = counts(param.state, update.hyper)
        if now not in rows:
            rows[now] = len(done)
            done.append(advance(update.hyper, *now, observed=param.variance is not None))
        places.append(rows[now])
        c = done[places[-1]]
        set_counts(param.state, c.step, c.var_step, c.gain)
    _call(update, library, params, done, places)


def _call(
    update: GroupUpdate, library: CDLL, params: list[ParamUpdate], done: list[Coefficients], places: list[int]
) -> None:
    """Into C, with the structs ``item`` and ``coefficients`` of the C file, field by field."""
    scale = update.sign / (1.0 if update.grad_scale is None else update.grad_scale.item())
    table = array("d", chain.from_iterable(_row(update.hyper, c, scale) for c in done))
    own = update.hyper.tracks_variance
    flat: list[int] = []
    for param, place in zip(params, places, strict=True):
        local, state = param.local, param.state
        flat += (
            local.data_ptr(),
            param.grad.data_ptr(),
            state["exp_avg"].data_ptr(),
            state["exp_avg_sq"].data_ptr(),
            state["exp_var"].data_ptr() if own else 0,
            0 if param.variance is None else param.variance.data_ptr(),
            local.numel() * (2 if local.is_complex() else 1),
            place,
            int(rounding_seed(int(done[place].step), param.key)) + param.offset,
        )
    items = array("q", flat)
    args = (len(params), items.buffer_info()[0], table.buffer_info()[0], torch.get_num_threads())
    left_out = library.poprisk_step(*args)
    if left_out:
        update.left_out.add_(left_out)


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


def _variant(hyper: Hyper, param: ParamUpdate) -> Variant:
    """What decides which kernel a parameter needs: dtypes, and the options that are compiled in."""
    s = param.state["exp_var"].dtype if hyper.tracks_variance else None
    dtypes = (param.local.dtype, param.state["exp_avg_sq"].dtype, s)
    return (*dtypes, param.variance is not None, hyper.gate, hyper.signal, hyper.gated_decay, hyper.skip_nonfinite)


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
