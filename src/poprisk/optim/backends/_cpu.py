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
from poprisk.optim.backends._launch import GATES, LaunchCache, columns, pointers
from poprisk.optim.rules._coefficients import Coefficients, Hyper, advance
from poprisk.optim.rules._rounding import rounding_seed

Variant = tuple[Any, ...]
WEIGHTS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


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


def repeat(update: GroupUpdate, last: LaunchCache) -> None:
    """Repeats the last step's call, for the same tensors."""
    c = advance(update.hyper, *counts(update.params[0].state, update.hyper))
    last.count({"step": c.step, "var_step": c.var_step, "var_gain": c.gain})
    _call(update, last.payload, update.params, [c], [0] * len(update.params))


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
    table = array("d", map(float, chain.from_iterable(columns(update.hyper, c, scale) for c in done)))
    flat: list[int] = []
    for param, place in zip(params, places, strict=True):
        seed = int(rounding_seed(int(done[place].step), param.key)) + param.offset
        flat += (*pointers(param, update.hyper.tracks_variance), place, seed)
    items = array("q", flat)
    args = (len(params), items.buffer_info()[0], table.buffer_info()[0], torch.get_num_threads())
    left_out = library.poprisk_step(*args)
    if left_out:
        update.left_out.add_(left_out)


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
