"""What one step has to do to one parameter: tensors as the backends see them, real and flat in meaning."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk.optim._defaults import RULE_OPTIONS
from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import PopulationState, math_dtype

if TYPE_CHECKING:
    from poprisk.optim._shards import Shard

COUNTERS = ("step", "var_step", "var_gain")
MOMENTS = ("exp_avg", "exp_avg_sq", "exp_var")


@dataclass(slots=True)
class Work:
    """One parameter with its gradient, its state dict, and the variance of this batch if a source gave one.

    Of a parameter spread over processes, all of these are the local parts.
    """

    param: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    key: int
    variance: Tensor | None = None
    observed: bool = False
    """Whether the variance of the last step, or of the one now due, came from a source."""
    shard: "Shard | None" = None
    """Where in the whole it lies, where ``param`` is only this process's part of a parameter."""

    @property
    def parameter(self) -> Tensor:
        """The parameter as the user knows it."""
        return self.param if self.shard is None else self.shard.parameter

    @property
    def offset(self) -> int:
        """How many elements of the whole lie before this part."""
        return 0 if self.shard is None else self.shard.offset

    def global_view(self, x: Tensor) -> Tensor:
        """A result laid out like ``param`` as one laid out like the whole parameter."""
        return x if self.shard is None else self.shard.wrap(x)


@dataclass
class Job:
    """All the work of one parameter group in one step."""

    works: list[Work]
    hyper: Hyper
    group: dict[str, Any]
    memory: dict[str, Any] = field(default_factory=dict)
    """What a backend keeps from one step of this group to the next."""
    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None
    left_out: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int32))
    """How many gradient entries were left out as non-finite so far, on the parameters' device (the CUDA kernel only
    says that there were some)."""

    @property
    def sign(self) -> float:
        """-1 where the objective is maximized."""
        return -1.0 if self.group["maximize"] else 1.0


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
        state["exp_avg"] = _zeros(param, state_dtype_of(param, group, "m"))
        state["exp_avg_sq"] = _zeros(param, state_dtype_of(param, group, "v"))
    if hyper.gate is None:
        return
    if hyper.tracks_variance and "exp_var" not in state:
        state["exp_var"] = _zeros(param, state_dtype_of(param, group, "s"))
        state["var_step"] = _counter(param, group)
    if hyper.alpha == "calibrated" and "var_gain" not in state:
        state["var_gain"] = _counter(param, group, torch.float64)
        if not hyper.shared_state:  # the threshold needs the noise of every deviation, so s starts again with it
            state["exp_var"].zero_()
            state["var_step"].zero_()


def state_dtype_of(param: Tensor, group: dict[str, Any], letter: str) -> torch.dtype:
    """float32 for states of low-precision weights, the weights' own dtype otherwise, unless ``state_dtype`` says so."""
    wanted = group["state_dtype"]
    if wanted is not None and letter in wanted:
        return wanted[letter]
    if group["gate"] is None and wanted is None:
        return param.dtype  # as torch.optim.AdamW keeps it
    if param.is_complex():
        return param.dtype
    return math_dtype(param.dtype)


def was_stepped(work: Work, hyper: Hyper) -> bool:
    """Whether there is a step of this rule to speak of: after a checkpoint of AdamW, s has not begun yet."""
    return "step" in work.state and (not hyper.tracks_variance or "exp_var" in work.state)


def rule_state(work: Work, hyper: Hyper) -> PopulationState:
    """The state as the pure rule wants it; counters on the CPU become plain numbers."""
    state = work.state
    step, var_step, gain = counts(state, hyper)
    return PopulationState(
        m=real(state["exp_avg"]),
        v=real(state["exp_avg_sq"]),
        s=real(state["exp_var"]) if hyper.tracks_variance else None,
        step=step,
        var_step=var_step,
        gain=gain,
        key=work.key,
        observed=work.observed,
        whole=work.shard,
    )


def counts(state: dict[str, Tensor], hyper: Hyper) -> tuple[Scalar, Scalar, Scalar]:
    """Steps taken, gradients in s, and s under unit noise; a shared s is as old as m and v."""
    step = number(state["step"])
    own = "var_step" in state and not hyper.shared_state
    return step, number(state["var_step"]) if own else step, number(state["var_gain"]) if "var_gain" in state else 0.0


def set_counts(state: dict[str, Tensor], step: Scalar, var_step: Scalar, gain: Scalar) -> None:
    """Writes the counters a state has, wherever they live."""
    for name, value in zip(COUNTERS, (step, var_step, gain), strict=True):
        if name in state:
            state[name].copy_(value) if isinstance(value, Tensor) else state[name].fill_(value)


def number(counter: Tensor) -> Scalar:
    """A counter on the CPU as a number; one on a device stays there, so that nothing waits for it."""
    return counter.item() if counter.device.type == "cpu" else counter


def real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, as torch's optimizers treat it: each part has a gate of its own."""
    return torch.view_as_real(x) if x.is_complex() else x


def counts_on_device(group: dict[str, Any]) -> bool:
    """Where counters begin: on the host, unless a graph or torch's own fused AdamW needs them beside the parameters."""
    return bool(group["capturable"] or (group["fused"] and group["gate"] is None))


def _counter(param: Tensor, group: dict[str, Any], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros((), dtype=dtype, device=param.device if counts_on_device(group) else "cpu")


def _zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
