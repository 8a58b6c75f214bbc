"""What one step does to each parameter group and each parameter: built once per step, handed to one backend."""

import weakref
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from poprisk._core.types import Scalar, VarianceSource
from poprisk.errors import GradientError, HyperparameterError, StateDictError
from poprisk.optim._defaults import DEFAULTS, RULE_OPTIONS
from poprisk.optim._shards import Shard, as_part_of, is_sharded, local_part
from poprisk.optim._step_average import StepAverage
from poprisk.optim._validation import check_group
from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import PopulationState, math_dtype
from poprisk.optim.rules._relative import first_scale

COUNTERS = ("step", "var_step", "var_gain")
SCALE = "gate_scale"
"""What a normalized gate remembers of its tensor's last step; see :mod:`poprisk.optim.rules._relative`."""
MOMENTS = {"exp_avg": "m", "exp_avg_sq": "v", "exp_var": "s"}
"""The moments in a state, and their letters in the formulas and in ``state_dtype``."""
_CHECKED = tuple(name for name in DEFAULTS.as_dict() if name != "lr")
States = MutableMapping[Tensor, dict[str, Tensor]]


@dataclass(slots=True)
class ParamUpdate:
    """One parameter in one step: its tensors as a backend sees them."""

    parameter: Tensor
    """The parameter as the user knows it."""
    local: Tensor
    """The part of it in this process, which the step changes; all of it unless the parameter is sharded."""
    grad: Tensor
    """Gradient of the local part."""
    key: int
    """Position in the optimizer, counted over all groups; seeds stochastic rounding."""
    shard: Shard | None = None
    """Where the local part lies in the parameter, if that is sharded."""
    observed: bool = False
    """Whether the variance of the last step, or of the current one, came from a source."""
    variance: Tensor | None = None
    """Variance of this batch's gradient, if a source gave one."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Moments of the local part, and counters."""
    mean: Tensor | None = None
    """Mean of the local part over the steps, for a kernel to move along."""

    @property
    def offset(self) -> int:
        """Number of elements of the parameter that lie before the local part."""
        return 0 if self.shard is None else self.shard.offset

    def global_view(self, x: Tensor) -> Tensor:
        """A result with the layout of the local part as one with the layout of the parameter."""
        return x if self.shard is None else as_part_of(self.parameter, x)


@dataclass(slots=True)
class GroupMemory:
    """What a parameter group keeps from one step to the next."""

    options: list[Any] | None = None
    """The options that were checked last."""
    hyper: Hyper | None = None
    lr: Any = None
    launch: Any = None
    """The fused backend's :class:`~poprisk.optim.backends._launch.LaunchCache`."""
    last: Hyper | None = None
    """Hyper-parameters of the last step."""
    used: tuple[weakref.ref[Tensor], int] | None = None
    """First gradient of the last step, and its version."""
    observed: frozenset[Tensor] = frozenset()
    """Parameters whose variance came from a source in the last step."""
    shards: dict[Tensor, Shard] = field(default_factory=dict)
    sums: dict[tuple[torch.device, int], Tensor] = field(default_factory=dict)

    def scratch(self, count: int, device: torch.device) -> Tensor:
        """Whole numbers on the device for sums; zero before and after every kernel that uses them."""
        if (device, count) not in self.sums:
            self.sums[(device, count)] = torch.zeros(count, dtype=torch.int64, device=device)
        return self.sums[(device, count)]

    def hyper_of(self, group: dict[str, Any]) -> Hyper:
        """The group's hyper-parameters; options changed since the last step are checked like the constructor's."""
        options, lr = [group[name] for name in _CHECKED], group["lr"]
        changed = options != self.options
        if changed:
            check_group(group)
            self.options, lr = [group[name] for name in _CHECKED], group["lr"]
        if self.hyper is None or changed or lr is not self.lr or isinstance(lr, Tensor):
            self.hyper, self.lr = hyper_of(group), lr
        return self.hyper

    def param_update(self, p: Tensor, key: int) -> ParamUpdate:
        """The update of one parameter, without its state; of a parameter without a gradient only the rest is used."""
        grad, observed = p if p.grad is None else _usable(p, p.grad), p in self.observed if self.observed else False
        if not is_sharded(p):
            return ParamUpdate(p, p, grad, key, None, observed)
        if p not in self.shards:
            self.shards[p] = Shard(p)
        shard = self.shards[p]
        return ParamUpdate(p, local_part(p), shard.local(grad), key, shard, observed)


@dataclass(slots=True)
class GroupUpdate:
    """All updates of one parameter group in one step."""

    params: list[ParamUpdate]
    hyper: Hyper
    group: dict[str, Any]
    memory: GroupMemory = field(default_factory=GroupMemory)
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    left_out: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int32))
    """Number of gradient entries left out as non-finite so far, on the parameters' device (the CUDA kernel only notes
    that there were some)."""
    average: StepAverage | None = None
    """Means of the weights that a kernel may move along."""

    @property
    def sign(self) -> float:
        """-1 if the objective is maximized."""
        return -1.0 if self.group["maximize"] else 1.0

    def attach_states(self, states: States, *, create: bool) -> None:
        """Gives each parameter its state; in a step, what is missing is created."""
        for p in self.params:
            state = states[p.parameter] if create else states.get(p.parameter, {})
            if create:
                ensure_state(state, p.parameter, self.group, self.hyper)
            p.state = state if p.shard is None else {name: local_part(value) for name, value in state.items()}
            if create:
                _check_shapes(p)
            if self.average is not None and create:
                p.mean = self.average.mean_of(p.local)

    def finish(self, states: States) -> None:
        """Remembers what later calls ask about this step."""
        memory, lr = self.memory, self.hyper.lr
        memory.last = replace(self.hyper, lr=lr.clone()) if isinstance(lr, Tensor) else self.hyper
        memory.used = _mark(self.params[0].parameter.grad) if self.params else None
        memory.observed = frozenset(p.parameter for p in self.params if p.variance is not None)
        if memory.shards:  # moments are written in place, but a counter may have become another tensor
            for p in self.params:
                if p.shard is not None:
                    states[p.parameter].update({name: p.state[name] for name in COUNTERS if name in p.state})
        if memory.launch is not None:
            memory.launch.end(self, states)

    def has_fresh_gradients(self) -> bool:
        """Whether there are gradients that no step has used yet."""
        first = next((p.parameter.grad for p in self.params if p.parameter.grad is not None), None)
        if first is None or self.memory.used is None:
            return first is not None
        ref, version = self.memory.used
        first = local_part(first)
        return ref() is not first or version != first._version


def attach_variances(source: VarianceSource, updates: list[GroupUpdate]) -> None:
    """Asks the source for the variance of every gradient of this step."""
    params = list(chain.from_iterable(update.params for update in updates))
    given = source.variances([p.parameter for p in params])
    if len(given) != len(params):
        raise HyperparameterError(
            f"the variance source gave {len(given)} entries for {len(params)} parameters: return one per parameter"
        )
    for p, variance in zip(params, given, strict=True):
        if variance is not None and variance.shape != p.parameter.shape:
            raise HyperparameterError(
                f"the variance source gave shape {tuple(variance.shape)} for a parameter of shape "
                f"{tuple(p.parameter.shape)}: return the parameter's shape, or None"
            )
        p.observed = variance is not None
        p.variance = variance if variance is None or p.shard is None else p.shard.local(variance)


def hyper_of(group: dict[str, Any]) -> Hyper:
    """The rule's hyper-parameters of a parameter group."""
    options = {name: group[name] for name in RULE_OPTIONS}
    if isinstance(options["lr"], Tensor):
        options["lr"] = options["lr"].reshape(())  # a view: one element in any shape
    return Hyper(shared_state=group["state"] == "shared", **options)


def ensure_state(state: dict[str, Tensor], param: Tensor, group: dict[str, Any], hyper: Hyper) -> None:
    """Creates what is missing: everything on a first gradient, s alone after a checkpoint of AdamW or a new gate."""
    if "step" not in state:
        state["step"] = _counter(param, group)
        state["exp_avg"] = _zeros(param, group, "exp_avg")
        state["exp_avg_sq"] = _zeros(param, group, "exp_avg_sq")
    if hyper.gate is None:
        return
    if hyper.normalize_gate and SCALE not in state:
        state[SCALE] = first_scale(param)
    if hyper.tracks_variance and "exp_var" not in state:
        state["exp_var"] = _zeros(param, group, "exp_var")
        state["var_step"] = _counter(param, group)
    if hyper.alpha == "calibrated" and "var_gain" not in state:
        state["var_gain"] = _counter(param, group, torch.float64)
        if not hyper.shared_state:  # the threshold needs the noise of every deviation, so s starts again with it
            state["exp_var"].zero_()
            state["var_step"].zero_()


def state_dtype_of(param: Tensor, group: dict[str, Any], moment: str) -> torch.dtype:
    """float32 for states of low-precision weights, otherwise the weights' dtype, unless ``state_dtype`` is given."""
    wanted, letter = group["state_dtype"], MOMENTS[moment]
    if wanted is not None and letter in wanted:
        return wanted[letter]
    if param.is_complex() or (group["gate"] is None and wanted is None):  # the latter as torch.optim.AdamW keeps it
        return param.dtype
    return math_dtype(param.dtype)


def was_stepped(param: ParamUpdate, hyper: Hyper) -> bool:
    """Whether this rule has taken a step: after loading a checkpoint of AdamW, s has not begun yet."""
    return "step" in param.state and (not hyper.tracks_variance or "exp_var" in param.state)


def rule_state(param: ParamUpdate, hyper: Hyper) -> PopulationState:
    """The state in the form of the pure rule; counters on the CPU become plain numbers."""
    state = param.state
    m, v, s = real(state["exp_avg"]), real(state["exp_avg_sq"]), None
    if hyper.tracks_variance:
        s = real(state["exp_var"])
    scale = state.get(SCALE) if hyper.in_adamw_units else None
    return PopulationState(m, v, s, *counts(state, hyper), param.key, param.observed, param.shard, scale)


def counts(state: dict[str, Tensor], hyper: Hyper) -> tuple[Scalar, Scalar, Scalar]:
    """Steps taken, gradients in s, and s under unit noise; a shared s is as old as m and v."""
    step = number(state["step"])
    own = "var_step" in state and not hyper.shared_state
    return step, number(state["var_step"]) if own else step, number(state["var_gain"]) if "var_gain" in state else 0.0


def set_counts(state: dict[str, Tensor], step: Scalar, var_step: Scalar, gain: Scalar) -> None:
    """Writes the counters that a state has, wherever they are stored."""
    for name, value in zip(COUNTERS, (step, var_step, gain), strict=True):
        if name in state:
            state[name].copy_(value) if isinstance(value, Tensor) else state[name].fill_(value)


def number(counter: Tensor) -> Scalar:
    """A counter on the CPU as a number; one on a device stays there, so that nothing waits for it."""
    return counter.item() if counter.device.type == "cpu" else counter


def real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, as in torch's optimizers: each part has its own gate."""
    return torch.view_as_real(x) if x.is_complex() else x


def counts_on_device(group: dict[str, Any]) -> bool:
    """Whether counters start on the device: a graph or torch's fused AdamW needs them there; otherwise on the host."""
    return bool(group["capturable"] or (group["fused"] and group["gate"] is None))


def _usable(param: Tensor, grad: Tensor) -> Tensor:
    """The gradient as it lies in memory; refuses one that no backend can use, before anything is touched."""
    if grad.layout != torch.strided:
        raise GradientError(
            f"PopRiskAdamW needs dense gradients, got layout {grad.layout} for a parameter of shape "
            f"{tuple(param.shape)}: create the embedding with sparse=False, or give it an optimizer of its own "
            "(torch.optim.SparseAdam)"
        )
    lazy = grad.is_neg() or grad.is_conj()  # a sign that torch has noted and not yet written to memory
    return grad.resolve_conj().resolve_neg() if lazy else grad


def _check_shapes(p: ParamUpdate) -> None:
    """Refuses what no longer fits a parameter whose data was replaced: a kernel goes by addresses and one length."""
    shape = p.local.shape
    if p.grad.shape != shape:
        raise GradientError(
            f"a parameter of shape {tuple(shape)} has a gradient of shape {tuple(p.grad.shape)}: call zero_grad() and "
            "backward() again after replacing its data"
        )
    for name in MOMENTS:
        if name in p.state and p.state[name].shape != shape:
            raise StateDictError(
                f"a parameter of shape {tuple(shape)} has a state {name!r} of shape {tuple(p.state[name].shape)}: "
                "after replacing its data, delete its state (del optimizer.state[parameter]) or build a new optimizer"
            )


def _mark(grad: Tensor | None) -> tuple[weakref.ref[Tensor], int] | None:
    """Identifies a gradient, so that no meter scores it again."""
    if grad is None:
        return None
    grad = local_part(grad)
    return weakref.ref(grad), grad._version


def _counter(param: Tensor, group: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros((), dtype=dtype, device=param.device if counts_on_device(group) else "cpu")


def _zeros(param: Tensor, group: dict[str, Any], moment: str) -> Tensor:
    dtype = state_dtype_of(param, group, moment)
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
