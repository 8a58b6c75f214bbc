"""The fused CPU backend: one pass over memory for a whole list of tensors, in C."""

from array import array
from collections import defaultdict
from ctypes import CDLL
from functools import cache
from itertools import chain
from typing import Any

import torch

from poprisk.optim._shards import coordinates
from poprisk.optim._updates import GroupUpdate, ParamUpdate, counts, set_counts
from poprisk.optim.backends import _compiler as compiler
from poprisk.optim.backends._launch import GATES, LaunchCache, address, columns, tensors
from poprisk.optim.rules._coefficients import Coefficients, Hyper, advance
from poprisk.optim.rules._rounding import tensor_key

Variant = tuple[Any, ...]
WEIGHTS = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2}


def unavailable() -> str:
    """Why there is no kernel on this machine; empty as long as none has failed to build."""
    return f"the fused CPU kernel cannot be built ({compiler.failure()})" if compiler.failure() else ""


def step(update: GroupUpdate, params: list[ParamUpdate]) -> None:
    """One step for the given params, one call into C per combination of dtypes.

    Raises:
        BuildError: a kernel cannot be built; nothing was touched.
    """
    batches: dict[Variant, list[ParamUpdate]] = defaultdict(list)
    for param in params:
        batches[_variant(update.hyper, param)].append(param)
    libraries = [compiler.load(_defines(variant)) for variant in batches]
    if update.found_inf is not None and update.found_inf.item():
        return
    items: array[int] = array("q")
    for library, batch in zip(libraries, batches.values(), strict=True):
        items = _step_batch(update, library, batch)
    if len(batches) == 1:
        LaunchCache.keep(update, params, (libraries[0], items))


def repeat(update: GroupUpdate, last: LaunchCache) -> None:
    """Repeats the last step's call, for the same tensors."""
    library, items = last.payload
    c = advance(update.hyper, *counts(update.params[0].state, update.hyper))
    last.count({"step": c.step, "var_step": c.var_step, "var_gain": c.gain})
    _call(update, library, items, update.params, [c])
    if update.average is not None:
        update.average.mark(last.averaged)


def _step_batch(update: GroupUpdate, library: CDLL, params: list[ParamUpdate]) -> "array[int]":
    """One call for all params; those with the same counters share their coefficients.

    Returns:
        The struct ``item`` of the C file for each parameter, field by field.
    """
    rows: dict[tuple[Any, ...], int] = {}
    done: list[Coefficients] = []
    items: array[int] = array("q")
    for param in params:
        now = counts(param.state, update.hyper)
        if now not in rows:
            rows[now] = len(done)
            done.append(advance(update.hyper, *now, observed=param.variance is not None))
        c = done[rows[now]]
        set_counts(param.state, c.step, c.var_step, c.gain)
        items.extend(map(address, tensors(param, update.hyper)))
        items.extend((coordinates(param.local), rows[now], tensor_key(param.key), param.offset))
    _call(update, library, items, params, done)
    if update.average is not None:
        update.average.mark(id(p.local) for p in params if p.mean is not None)
    return items


def _call(
    update: GroupUpdate, library: CDLL, items: "array[int]", params: list[ParamUpdate], done: list[Coefficients]
) -> None:
    """Into C; the table has the struct ``coefficients`` of the C file, field by field."""
    scale = update.sign / (1.0 if update.grad_scale is None else update.grad_scale.item())
    table = array("d", map(float, chain.from_iterable(columns(update, c, scale) for c in done)))
    gradients = array("q", [p.grad.data_ptr() for p in params])
    addresses = (x.buffer_info()[0] for x in (items, gradients, table))
    left_out = library.poprisk_step(len(params), *addresses, torch.get_num_threads())
    if left_out < 0:
        raise MemoryError("the fused step needs memory for the sums of its gates, and there is none")
    if left_out:
        update.left_out.add_(left_out)


def _variant(hyper: Hyper, param: ParamUpdate) -> Variant:
    """What decides which kernel a parameter needs: dtypes, and the options that are compiled in."""
    s = param.state["exp_var"].dtype if hyper.tracks_variance else None
    dtypes = (param.local.dtype, param.state["exp_avg_sq"].dtype, s)
    given = (param.variance is not None, param.mean is not None)
    return (*dtypes, *given, hyper.gate, hyper.normalize_gate, hyper.signal, hyper.gated_decay, hyper.skip_nonfinite)


@cache
def _defines(variant: Variant) -> tuple[str, ...]:
    w, v, s, observed, averaged, gate, normalized, signal, gated_decay, skip_nonfinite = variant
    values = {
        "W_TYPE": WEIGHTS[w.to_real()],
        "V_BF16": v == torch.bfloat16,
        "S_KIND": 0 if s is None else 1 + (s == torch.bfloat16),
        "GATE": GATES[gate],
        "OBSERVED": observed and s is not None,
        "BATCH_SIGNAL": signal == "batch" and gate is not None,
        "GATED_DECAY": gated_decay and gate is not None,
        "SKIP_NONFINITE": skip_nonfinite and gate is not None,
        "NORMALIZED": normalized and gate is not None,
        "AVERAGED": averaged,
    }
    return tuple(f"-D{name}={int(value)}" for name, value in values.items())
