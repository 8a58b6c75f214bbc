"""Launches of the single-pass kernels: what they are given, what they can take, and what need not be checked again."""

from collections.abc import Container, Mapping
from math import isnan
from typing import Any

import torch
from torch import Tensor

from poprisk.optim._updates import COUNTERS, GroupUpdate, ParamUpdate, real
from poprisk.optim.rules._coefficients import Coefficients, Hyper
from poprisk.optim.rules._population import math_dtype

GATES = {None: 0, "soft": 1, "hard": 2, "snr": 3}


def columns(hyper: Hyper, c: Coefficients, scale: Any) -> list[Any]:
    """What both kernels multiply with, in their order: numbers, or on a device vectors with an entry per tensor."""
    value, beta1, beta2 = c.open_gate, *hyper.betas
    if isinstance(value, Tensor):
        given, value = (~torch.isnan(value)).double(), torch.nan_to_num(value)
    else:
        given, value = (0.0, 0.0) if isnan(value) else (1.0, value)
    out = [scale, c.center, c.s_new, 1 - beta1, 1 - beta2, 1 / beta1 if beta1 else 0.0]
    out += [c.m_debias, c.v_debias, c.s_debias, c.alpha, hyper.strength, hyper.gate_eps, given, value]
    return [*out, hyper.lr, hyper.eps, hyper.weight_decay, c.step]


def pointers(p: ParamUpdate, tracks_variance: bool) -> tuple[int, ...]:
    """Addresses of w, g, m, v, s and the given variance (0 where there is none), and the number of elements."""
    state = p.state
    return (
        p.local.data_ptr(),
        p.grad.data_ptr(),
        state["exp_avg"].data_ptr(),
        state["exp_avg_sq"].data_ptr(),
        state["exp_var"].data_ptr() if tracks_variance else 0,
        0 if p.variance is None else p.variance.data_ptr(),
        p.local.numel() * (2 if p.local.is_complex() else 1),
    )


class LaunchCache:
    """The tensors and options of a group whose last step took one launch, and what that launch needed to know.

    The counters of all parameters become views of one vector each, so that counting is one operation and not hundreds.
    """

    def __init__(self, update: GroupUpdate, params: list[ParamUpdate], payload: Any) -> None:
        self.payload = payload
        self.counters: dict[str, Tensor] = {}
        for name in COUNTERS:
            if name in params[0].state:
                vector = torch.stack([p.state[name] for p in params])
                self.counters[name] = vector
                for p, view in zip(params, vector.unbind(), strict=True):
                    p.state[name] = view
        self.options = _options(update)
        self.known = [(*_tensors(p), p.grad.dtype, p.grad.stride()) for p in params]

    @classmethod
    def of(cls, update: GroupUpdate) -> "LaunchCache | None":
        """What the last step kept, if the same tensors and options come again."""
        cache = update.memory.launch
        if cache is not None and not cache.fits(update):
            update.memory.launch = cache = None
        return cache

    @classmethod
    def keep(cls, update: GroupUpdate, params: list[ParamUpdate], payload: Any) -> None:
        """Keeps what this step found out, if one launch served the whole group and its counters are on the host."""
        if update.found_inf is not None or len(params) != len(update.params):
            return
        if any(p.variance is not None or p.state["step"].is_cuda for p in params):
            return
        if len({tuple(p.state[n].item() for n in COUNTERS if n in p.state) for p in params}) == 1:
            update.memory.launch = cls(update, params, payload)

    def fits(self, update: GroupUpdate) -> bool:
        """Whether parameters, states, layouts, options and step counts are still those of the last step."""
        params = update.params
        if len(params) != len(self.known) or _options(update) != self.options or update.found_inf is not None:
            return False
        for p, (local, m, v, s, step, dtype, stride) in zip(params, self.known, strict=True):
            state, grad = p.state, p.grad
            same = p.local is local and state["exp_avg"] is m and state["exp_avg_sq"] is v and state["step"] is step
            if not same or state.get("exp_var") is not s or p.variance is not None:
                return False
            if grad.dtype != dtype or grad.stride() != stride:
                return False
        return all(bool((x == x[0]).all()) for x in self.counters.values())

    def count(self, after: Mapping[str, Any]) -> None:
        """Sets all counters to their values after the step."""
        for name, vector in self.counters.items():
            vector.fill_(after[name])


def _tensors(p: ParamUpdate) -> tuple[Any, ...]:
    return p.local, p.state["exp_avg"], p.state["exp_avg_sq"], p.state.get("exp_var"), p.state["step"]


def _options(update: GroupUpdate) -> tuple[Any, ...]:
    h, group = update.hyper, update.group
    rule = (h.gate, h.alpha == "calibrated", h.shared_state, h.granularity, h.normalize_gate, h.signal, h.gated_decay)
    on_device = isinstance(h.lr, Tensor) and h.lr.is_cuda
    return (*rule, h.skip_nonfinite, group["capturable"], on_device)


def one_pass(update: GroupUpdate, p: ParamUpdate, weights: Container[torch.dtype]) -> bool:
    """Whether a single-pass kernel can take this parameter, given the dtypes of weights that the kernel knows.

    It takes gates per element, and dense tensors that are laid out alike.
    """
    if update.hyper.granularity != "element" or update.hyper.normalize_gate:
        return False
    w = real(p.local)
    if w.dtype not in weights or real(p.grad).dtype != w.dtype or not _is_dense(p.local):
        return False
    math = math_dtype(w.dtype)
    allowed = (math, torch.bfloat16) if math == torch.float32 else (math,)
    moments = [x for name, x in p.state.items() if name.startswith("exp_")]
    if real(p.state["exp_avg"]).dtype != math or any(real(x).dtype not in allowed for x in moments):
        return False
    given = [] if p.variance is None else [p.variance]
    if any(real(x).dtype != math for x in given):
        return False
    return all(x.stride() == p.local.stride() for x in (p.grad, *moments, *given))


def _is_dense(x: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of axes."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(x.stride(), x.shape, strict=True) if sz > 1):
        if stride != expected:
            return False
        expected *= size
    return True
