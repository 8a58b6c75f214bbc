"""The foreach backend: the rule on whole lists of tensors, a handful of launches per operation instead of one each."""

from collections import defaultdict
from collections.abc import Sequence
from math import isnan
from typing import Any

import torch
from torch import Tensor

from poprisk.optim._shards import coordinates
from poprisk.optim._updates import SCALE, GroupUpdate, ParamUpdate, number, real, rule_state, set_counts
from poprisk.optim.backends import _forloop as forloop
from poprisk.optim.rules._coefficients import Coefficients, Hyper, advance
from poprisk.optim.rules._population import math_dtype, usable_limit

Tensors = list[Tensor]
Scalars = Sequence[Any]


def can_serve(update: GroupUpdate, param: ParamUpdate) -> bool:
    """Gates per element on tensors of one dtype; pooled gates and low-precision states use the rule."""
    if update.hyper.granularity != "element" or update.found_inf is not None:
        return False
    dtype = real(param.local).dtype
    moments = [param.state[name] for name in ("exp_avg", "exp_avg_sq", "exp_var") if name in param.state]
    return dtype == math_dtype(dtype) and all(real(x).dtype == dtype for x in (*moments, param.grad))


def step(update: GroupUpdate) -> None:
    """One step for the group: lists of one device, dtype and step count at a time."""
    batches: dict[Any, list[ParamUpdate]] = defaultdict(list)
    means = Means()
    for param in update.params:
        if not can_serve(update, param):
            forloop.step_one(update, param)
            continue
        if not param.local.numel():
            _step_empty(update, param, means)
            continue
        counters = [number(param.state[name]) for name in ("step", "var_step") if name in param.state]
        on_device = any(isinstance(c, Tensor) for c in counters)
        kind = (param.local.device, real(param.local).dtype, param.variance is None)
        batches[(*kind, None if on_device else tuple(counters))].append(param)
    for batch in batches.values():
        _step_batch(update, batch, means)
    means.write()


def _step_empty(update: GroupUpdate, param: ParamUpdate, means: "Means") -> None:
    """A process that holds nothing of a parameter counts along, and takes part in the means over all processes."""
    state = rule_state(param, update.hyper)
    c = advance(update.hyper, state.step, state.var_step, state.gain, observed=param.variance is not None)
    set_counts(param.state, c.step, c.var_step, c.gain)
    if update.hyper.in_adamw_units:
        q = [real(param.local).reshape(-1)]
        means.to_adamw_units(q, [param])


def _step_batch(update: GroupUpdate, params: list[ParamUpdate], means: "Means") -> None:
    hyper = update.hyper
    states = [rule_state(w, hyper) for w in params]
    observed = params[0].variance is not None
    c = _Lists([advance(hyper, s.step, s.var_step, s.gain, observed=observed) for s in states])
    weights = [real(w.local) for w in params]
    m, v = [s.m for s in states], [s.v for s in states]
    s = [x for x in (state.s for state in states) if x is not None]
    g, keep = _gradients(update, params)
    if s:
        deviation = _squared_deviation(params, g, m, c, observed)
        if observed and keep is not None:  # what gave no gradient gives no variance either
            deviation = [torch.where(k > 0, d, 0.0) for k, d in zip(keep, deviation, strict=True)]
        _average_(s, deviation, c.s_new, keep)
    _average_(m, g, [1 - hyper.betas[0]] * len(m), keep)
    _average_(v, list(torch._foreach_mul(g, g)), [1 - hyper.betas[1]] * len(v), keep)
    q = _gates(m, v, s, g, c, hyper)
    if hyper.in_adamw_units:
        means.to_adamw_units(q, params)
    move = _move(weights, m, v, q, c, hyper)
    if keep is not None:
        torch._foreach_mul_(move, keep)
    torch._foreach_mul_(move, -hyper.lr)
    torch._foreach_add_(weights, move)
    c.write(params)


def _gradients(update: GroupUpdate, params: list[ParamUpdate]) -> tuple[Tensors, Tensors | None]:
    """The gradients to use and, where some entry is not finite or cannot be looked at without waiting, a 0/1 mask."""
    g = [real(w.grad) for w in params]
    scale = update.sign
    if update.grad_scale is not None:
        g = torch._foreach_div(g, update.grad_scale.to(g[0].device))
    if scale != 1:
        g = torch._foreach_mul(g, scale)
    if not update.hyper.skip_nonfinite or update.hyper.gate is None:
        return list(g), None
    limit = usable_limit(g[0].dtype)
    if g[0].device.type == "cpu" and all(n < limit for n in torch._foreach_norm(g, torch.inf)):
        return list(g), None
    # infinite from the limit on, exact below; 0·x + 1 is then 1 where g is usable and NaN elsewhere, for the whole list
    scale = 16 * limit
    g = torch._foreach_mul(g, scale)
    ones = torch._foreach_mul(g, 0.0)
    torch._foreach_add_(ones, 1.0)
    keep = [torch.nan_to_num(x, nan=0.0) for x in ones]
    for k in keep:
        update.left_out.add_((k.numel() - k.sum()).to(update.left_out))
    g = [torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in g]
    torch._foreach_mul_(g, 1 / scale)
    return g, keep


def _squared_deviation(params: list[ParamUpdate], g: Tensors, m: Tensors, c: "_Lists", observed: bool) -> Tensors:
    """(g - m_prev)² of Algorithm 1's line 5, or the variance given from outside."""
    if observed:
        return [real(w.variance).to(x.dtype).clone() for w, x in zip(params, g, strict=True) if w.variance is not None]
    d = torch._foreach_mul(m, c.center)
    torch._foreach_sub_(d, g)
    torch._foreach_mul_(d, d)
    return list(d)


def _average_(average: Tensors, sample: Tensors, weight: Scalars, keep: Tensors | None) -> None:
    """Average += weight · keep · (sample - average)."""
    change = torch._foreach_sub(sample, average)
    if keep is not None:
        torch._foreach_mul_(change, keep)
    torch._foreach_mul_(change, list(weight))
    torch._foreach_add_(average, change)


def _move(weights: Tensors, m: Tensors, v: Tensors, q: Tensors, c: "_Lists", hyper: Hyper) -> Tensors:
    """Q m̂ / (√v̂ + ϵ) + λ_wd w (lines 9 and 10 without the learning rate); no gates are open ones."""
    move = torch._foreach_mul(v, c.v_debias)
    torch._foreach_sqrt_(move)
    torch._foreach_add_(move, hyper.eps)
    torch._foreach_clamp_min_(move, torch.finfo(move[0].dtype).tiny)  # no 0/0 where eps is 0
    torch._foreach_reciprocal_(move)
    torch._foreach_mul_(move, torch._foreach_mul(m, c.m_debias))
    if q:
        torch._foreach_mul_(move, q)
    if hyper.weight_decay:
        decay = torch._foreach_mul(weights, hyper.weight_decay)
        if hyper.gated_decay and q:
            torch._foreach_mul_(decay, q)
        torch._foreach_add_(move, decay)
    return list(move)


def _variance(m: Tensors, v: Tensors, s: Tensors, c: "_Lists", hyper: Hyper) -> Tensors:
    """ŝ; with ρ = β1 = β2 from m and v."""
    if s:
        return list(torch._foreach_mul(s, c.s_debias))
    s_hat = torch._foreach_mul(m, m)
    torch._foreach_sub_(s_hat, v)
    torch._foreach_mul_(s_hat, -1 / hyper.betas[0])
    torch._foreach_clamp_min_(s_hat, 0.0)
    torch._foreach_mul_(s_hat, c.s_debias)
    return list(s_hat)


def _gates(m: Tensors, v: Tensors, s: Tensors, g: Tensors, c: "_Lists", hyper: Hyper) -> Tensors:
    """Line 9 on lists; none without a gate."""
    if hyper.gate is None:
        return []
    signal = g if hyper.signal == "batch" else torch._foreach_mul(m, c.m_debias)
    s_hat = _variance(m, v, s, c, hyper)
    q = torch._foreach_mul(signal, signal)
    if hyper.gate in ("hard", "soft"):
        torch._foreach_sub_(q, torch._foreach_mul(s_hat, c.alpha))
        torch._foreach_clamp_min_(q, 0.0)
    if hyper.gate == "hard":
        torch._foreach_sign_(q)
    else:
        torch._foreach_mul_(s_hat, hyper.strength)
        torch._foreach_add_(s_hat, hyper.gate_eps)
        torch._foreach_add_(s_hat, q)
        torch._foreach_clamp_min_(s_hat, torch.finfo(q[0].dtype).tiny)
        torch._foreach_div_(q, s_hat)
    return c.decide(list(q))


class Means:
    """Gates in AdamW's units on lists, and the means that the next step needs, over the processes that share a tensor.

    Parameters that are sharded alike add up their sums at once; see :mod:`poprisk.optim.rules._relative`.
    """

    def __init__(self) -> None:
        self.waiting: list[tuple[ParamUpdate, Tensor]] = []

    def to_adamw_units(self, q: Tensors, params: list[ParamUpdate]) -> None:
        """Turns the gates into what multiplies AdamW's step, in place."""
        scales = torch.stack([p.state[SCALE] for p in params])
        sums = torch.stack(list(torch._foreach_norm(q, 1, scales.dtype)))  # gates are not negative
        tiny = torch.finfo(q[0].dtype).tiny  # any open gate is above it
        reference = torch.where(scales[:, 0] > tiny, scales[:, 0], tiny)  # also for NaN, as in the rule
        torch._foreach_div_(q, _numbers(reference, q[0].dtype))
        torch._foreach_clamp_max_(q, 1.0)
        torch._foreach_add_(q, 1.0)
        torch._foreach_mul_(q, 0.5)
        self.waiting += zip(params, torch.stack([sums, scales[:, 0]], -1).unbind(), strict=True)

    def write(self) -> None:
        """Adds up over the processes and keeps the means."""
        shared: dict[Any, list[tuple[ParamUpdate, Tensor]]] = defaultdict(list)
        for param, after in self.waiting:
            if param.shard is not None:
                shared[(param.shard.mesh, param.shard.mesh_axes, after.device)].append((param, after))
        for entries in shared.values():
            shard: Any = entries[0][0].shard
            total = torch.stack([after[:1] for _, after in entries])
            shard.add_up(total, shard.mesh_axes)
            for (_, after), sums in zip(entries, total.unbind(), strict=True):
                after[:1] = sums
        for param, after in self.waiting:
            after[:1] /= max(1, coordinates(param.parameter))
        if self.waiting:
            torch._foreach_copy_([p.state[SCALE] for p, _ in self.waiting], [after for _, after in self.waiting])


def _numbers(x: Tensor, dtype: torch.dtype) -> list[Any]:
    """The entries of a vector: numbers if it is on the host, otherwise 0-dim tensors, so that nothing waits."""
    return x.tolist() if x.device.type == "cpu" else list(x.to(dtype).unbind())


class _Lists:
    """The coefficients of a list of parameters, column by column: numbers, or 0-dim tensors that stay on the device."""

    def __init__(self, rows: list[Coefficients]) -> None:
        self.rows = rows

    def __getattr__(self, name: str) -> list[Any]:
        values = [getattr(row, name) for row in self.rows]
        like = next((x for x in values if isinstance(x, Tensor)), None)
        # Numbers beside tensors are filled in and not copied from the host: a copy would make it wait.
        return values if like is None else [x if isinstance(x, Tensor) else torch.full_like(like, x) for x in values]

    def decide(self, q: Tensors) -> Tensors:
        """Overwrites the gates that are decided in advance."""
        for row, gate in zip(self.rows, q, strict=True):
            decided = row.open_gate
            if isinstance(decided, Tensor):
                gate.copy_(torch.where(decided.isnan(), gate, decided.to(gate.dtype)))
            elif not isnan(decided):
                gate.fill_(decided)
        return q

    def write(self, params: list[ParamUpdate]) -> None:
        """The counters after the step."""
        for row, param in zip(self.rows, params, strict=True):
            set_counts(param.state, row.step, row.var_step, row.gain)
