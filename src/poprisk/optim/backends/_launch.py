"""Launches of the single-pass kernels: what they are given, what they can take, and what need not be checked again."""

from collections.abc import Container, Mapping
from itertools import chain, repeat
from math import isnan
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from poprisk.optim._shards import local_part
from poprisk.optim._updates import COUNTERS, SCALE, GroupUpdate, ParamUpdate, States, real
from poprisk.optim.rules._coefficients import Coefficients, Hyper
from poprisk.optim.rules._population import math_dtype

GATES = {None: 0, "soft": 1, "hard": 2, "snr": 3}


def columns(update: GroupUpdate, c: Coefficients, scale: Any) -> list[Any]:
    """What both kernels multiply with, in their order: numbers, or on a device vectors with an entry per tensor."""
    hyper, value = update.hyper, c.open_gate
    beta1, beta2 = hyper.betas
    if isinstance(value, Tensor):
        given, value = (~torch.isnan(value)).double(), torch.nan_to_num(value)
    else:
        given, value = (0.0, 0.0) if isnan(value) else (1.0, value)
    out = [scale, c.center, c.s_new, 1 - beta1, 1 - beta2, 1 / beta1 if beta1 else 0.0]
    out += [c.m_debias, c.v_debias, c.s_debias, c.alpha, hyper.strength, hyper.gate_eps, given, value]
    average = 0.0 if update.average is None else update.average.weight()
    return [*out, hyper.lr, hyper.eps, hyper.weight_decay, c.step, average]


def tensors(p: ParamUpdate, hyper: Hyper) -> tuple[Tensor | None, ...]:
    """w, m, v, s, the given variance, the mean of the weights, the scale of a normalized gate; None for what is not."""
    s = p.state["exp_var"] if hyper.tracks_variance else None
    scale = p.state[SCALE] if hyper.in_adamw_units else None
    return p.local, p.state["exp_avg"], p.state["exp_avg_sq"], s, p.variance, p.mean, scale


def address(x: Tensor | None) -> int:
    """Where a tensor lies in memory; 0 for none."""
    return 0 if x is None else x.data_ptr()


class LaunchCache:
    """A group whose last step took one launch: its tensors and options, and what that launch needed to know.

    While they stay the same, a step checks them in a few calls for the whole group, and makes no object per parameter.
    The counters of all parameters become views of one vector each, so that counting is one operation and not hundreds.
    """

    def __init__(self, update: GroupUpdate, payload: Any) -> None:
        self.update, self.payload = update, payload
        params = update.params
        self.counters: dict[str, Tensor] = {}
        for name in COUNTERS:
            if name in params[0].state:
                vector = torch.stack([p.state[name] for p in params])
                self.counters[name] = vector
                for p, view in zip(params, vector.unbind(), strict=True):
                    p.state[name] = view
        self.options = _options(update)
        self.tensors = [x for x in chain.from_iterable(tensors(p, update.hyper) for p in params) if x is not None]
        self.addresses = list(map(Tensor.data_ptr, self.tensors))
        self.lengths, self.locals = list(map(Tensor.numel, self.tensors)), [p.local for p in params]
        self.layouts, self.grad_layouts = _layouts(self.locals), _layouts([p.grad for p in params])
        self.sharded = any(p.shard is not None for p in params)
        self.averaged = {id(p.local) for p in params if p.mean is not None}
        self.versions = self._versions()
        self.bound = False

    @classmethod
    def keep(cls, update: GroupUpdate, params: list[ParamUpdate], payload: Any) -> None:
        """Keeps what this step found out, if one launch served the whole group and its counters are on the host."""
        if update.found_inf is not None or update.grad_scale is not None or len(params) != len(update.params):
            return
        if any(p.variance is not None or p.state["step"].is_cuda or p.state["step"].is_inference() for p in params):
            return
        entries = {tuple(p.state) for p in params}
        if len(entries) == 1 and len({tuple(p.state[n].item() for n in COUNTERS if n in p.state) for p in params}) == 1:
            update.memory.launch = cls(update, payload)

    def end(self, update: GroupUpdate, states: States) -> None:
        """Notes where the optimizer keeps parameters and states, at the end of the step, and lets the gradients go."""
        params = self.update.params
        if not self.bound:
            self.group = list(update.group["params"])
            known = {id(p.parameter) for p in params}
            self.skipped = [id(p) not in known for p in self.group]
            place = {id(p): index for index, p in enumerate(states)}
            self.places = [place[id(p.parameter)] for p in params]
            self.states, self.entries = [states[p.parameter] for p in params], itemgetter(*params[0].state)
            self.values = list(chain.from_iterable(map(self.entries, self.states)))
            self.bound = True
        for p in params:
            p.grad = p.local

    def reuse(self, group: dict[str, Any], hyper: Hyper, states: States, key: int, average: Any) -> GroupUpdate | None:
        """The update of the last step with the gradients of this one, if all else is as it was."""
        update = self.update
        update.hyper = hyper
        grads = [p.grad for p in group["params"]]
        same = len(grads) == len(self.group) and all(map(is_, group["params"], self.group))
        same = same and list(map(is_, grads, repeat(None))) == self.skipped and self.first_key == key
        same = same and update.average is average and self.options == _options(update) and self._same_states(states)
        if not same or (self.sharded and not all(p.local is local_part(p.parameter) for p in update.params)):
            return None
        pairs = zip(update.params, (g for g in grads if g is not None), strict=True)
        present = [g if p.shard is None else p.shard.local(g) for p, g in pairs]
        if not self._same_layouts(present):
            return None
        for p, g in zip(update.params, present, strict=True):
            p.grad = g
        return update

    def count(self, after: Mapping[str, Any]) -> None:
        """Sets all counters to their values after the step."""
        for name, vector in self.counters.items():
            vector.fill_(after[name])
        self.versions = self._versions()

    @property
    def first_key(self) -> int:
        """Key of the group's first parameter in the last step, whether or not it had a gradient."""
        return self.update.params[0].key - self.skipped.index(False)

    def _same_states(self, states: States) -> bool:
        """Whether every state is the same dict with the same tensors at the same places, and nobody has counted."""
        held = list(states.values())
        try:
            if not all(map(is_, map(held.__getitem__, self.places), self.states)):
                return False
            if not all(map(is_, chain.from_iterable(map(self.entries, self.states)), self.values)):
                return False
        except (IndexError, KeyError):
            return False
        same = self.addresses == list(map(Tensor.data_ptr, self.tensors)) and self.versions == self._versions()
        # another shape may lie at the same address
        return same and self.lengths == list(map(Tensor.numel, self.tensors)) and self.layouts == _layouts(self.locals)

    def _same_layouts(self, grads: list[Tensor]) -> bool:
        """Whether the gradients lie in memory as those of the last step did."""
        if set(map(type, grads)) != {Tensor} or set(map(attrgetter("layout"), grads)) != {torch.strided}:
            return False
        if any(map(Tensor.is_neg, grads)) or any(map(Tensor.is_conj, grads)):
            return False
        return _layouts(grads) == self.grad_layouts

    def _versions(self) -> list[int]:
        return [vector._version for vector in self.counters.values()]


def _layouts(xs: list[Tensor]) -> tuple[list[Any], ...]:
    """Dtypes, shapes and strides."""
    return list(map(attrgetter("dtype"), xs)), list(map(Tensor.size, xs)), list(map(Tensor.stride, xs))


def _options(update: GroupUpdate) -> tuple[Any, ...]:
    h, group = update.hyper, update.group
    rule = (h.gate, h.alpha == "calibrated", h.shared_state, h.granularity, h.normalize_gate, h.signal, h.gated_decay)
    on_device = isinstance(h.lr, Tensor) and h.lr.is_cuda
    return (*rule, h.skip_nonfinite, group["capturable"], group["fused"], group["foreach"], on_device)


def one_pass(update: GroupUpdate, p: ParamUpdate, weights: Container[torch.dtype]) -> bool:
    """Whether a single-pass kernel can take this parameter, given the dtypes of weights that the kernel knows.

    It takes gates per element, and dense tensors that are laid out alike.
    """
    if update.hyper.granularity != "element" or (update.hyper.in_adamw_units and SCALE not in p.state):
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
    layout = p.local.shape, p.local.stride()
    return all((x.shape, x.stride()) == layout for x in (p.grad, *moments, *given))


def mean_fits(p: ParamUpdate) -> bool:
    """Whether a kernel can move this parameter's mean along: laid out like it, in the dtype of the arithmetic."""
    x = p.mean
    if x is None or p.variance is not None or x.is_complex() != p.local.is_complex():
        return False
    alike = x.stride() == p.local.stride() and x.shape == p.local.shape and x.device == p.local.device
    return alike and real(x).dtype == math_dtype(real(p.local).dtype)


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
