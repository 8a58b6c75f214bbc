r"""The scalars of one optimizer step: all that depends on step counts and hyper-parameters and not on the coordinate.

Every backend (the pure rule, foreach, C, Triton) evaluates the same few lines per coordinate with these numbers, so
they are computed in one place. Steps may be Python numbers or device scalars; the result is of the same kind.
"""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk.optim.rules._gates import GateName
from poprisk.optim.rules._threshold import Centering, deviation_noise, mean_noise

Granularity = Literal["element", "row", "tensor"]
Signal = Literal["ema", "batch"]


@dataclass(frozen=True)
class Hyper:
    """Algorithm 1's *Require* line, and the options beside it. Plain numbers; validated by whoever takes user input."""

    lr: Scalar = 1e-2  # ten times AdamW's, as suits the literal gate of Algorithm 1
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    gate: GateName | None = "soft"
    alpha: float | Literal["calibrated"] = 1.0
    strength: float = 1.0
    rho: float = 0.99
    gate_eps: float = 0.0
    centering: Centering = "paper"
    warmup_steps: int = 0
    normalize_gate: bool = False
    gated_decay: bool = False
    granularity: Granularity = "element"
    signal: Signal = "ema"
    shared_state: bool = False
    skip_nonfinite: bool = True

    @property
    def in_adamw_units(self) -> bool:
        """Whether there is a gate and it is normalized, so that the learning rate is AdamW's."""
        return self.gate is not None and self.normalize_gate

    @property
    def tracks_variance(self) -> bool:
        """Whether s is a state of its own (not without a gate, nor when it follows from m and v)."""
        return self.gate is not None and not self.shared_state


@dataclass(frozen=True)
class Coefficients:
    """The scalar factors of one step. ``open_gate`` is 1 or 0 where the gate is decided in advance, else NaN."""

    step: Scalar
    var_step: Scalar
    gain: Scalar
    center: Scalar
    s_keep: Scalar
    s_new: Scalar
    m_debias: Scalar
    v_debias: Scalar
    s_debias: Scalar
    alpha: Scalar
    open_gate: Scalar


Numbers = TypeVar("Numbers", Hyper, Coefficients)


def advance(hyper: Hyper, step: Scalar, var_step: Scalar, gain: Scalar, *, observed: bool = False) -> Coefficients:
    r"""The coefficients of the step after ``step``, and the counters to keep.

    s has seen fewer gradients than ``step`` after a checkpoint without s; ``observed`` says whether the variance of
    this batch is given from outside instead of taken from the stream.
    """
    step, var_step, gain = (x.double() if isinstance(x, Tensor) else x for x in (step, var_step, gain))
    beta1 = hyper.betas[0]
    t = step + 1
    corrected = hyper.centering == "corrected" and not hyper.shared_state
    waits = corrected and not observed  # the first deviation from a debiased mean exists at t = 2
    sampled = _where(t > 1, 1.0, 0.0) if waits else 1.0
    center = _inverse(1 - beta1 ** (t - 1)) if corrected else 1.0
    if hyper.gate is None:  # s and its counters do not change
        sampled = 0.0
    t_s = var_step + sampled
    rho = hyper.rho
    noise = 1.0 if observed else deviation_noise(beta1, _where(waits, at_least(t, 2.0), t), hyper.centering)
    gain = gain + sampled * (1 - rho) * (noise - gain)
    sample = sampled * (1 - rho)
    return replace(current(hyper, t, t_s, gain, observed=observed), center=center, s_keep=1 - sample, s_new=sample)


def current(hyper: Hyper, step: Scalar, var_step: Scalar, gain: Scalar, *, observed: bool = False) -> Coefficients:
    """The coefficients of the step already taken: what the gate and the debiased moments of a stored state need.

    s is taken as it is: a stored state has nothing left to sample.
    """
    step, var_step, gain = (x.double() if isinstance(x, Tensor) else x for x in (step, var_step, gain))
    beta1, beta2 = hyper.betas
    s_scale = 1 - hyper.rho**var_step
    kappa = mean_noise(beta1, at_least(step, 1.0), hyper.signal)
    return Coefficients(
        step=step,
        var_step=var_step,
        gain=gain,
        center=1.0,
        s_keep=1.0,
        s_new=0.0,
        m_debias=_inverse(1 - beta1**step),
        v_debias=_inverse(1 - beta2**step),
        s_debias=_inverse(s_scale),
        alpha=kappa * s_scale * _inverse(gain) if isinstance(hyper.alpha, str) else hyper.alpha,
        open_gate=_decided(hyper, step, var_step, observed),
    )


def per_member(numbers: Numbers, dtype: torch.dtype) -> Numbers:
    """The same with every number that differs from row to row in the dtype of the arithmetic.

    One-element device scalars take no part in type promotion and stay as they are; a column [members, 1] in float64
    would turn every array it touches into float64.
    """

    def cast(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(cast(part) for part in value)
        return value.to(dtype) if isinstance(value, Tensor) and value.dim() > 0 else value

    changed = {f.name: cast(getattr(numbers, f.name)) for f in fields(numbers)}
    return replace(numbers, **changed)


def _decided(hyper: Hyper, t: Scalar, t_s: Scalar, observed: bool) -> Scalar:
    """1 during an ungated warm-up or without a gate, 0 where there is nothing to decide on, NaN where the gate decides.

    At t = 1 the paper's m̂² equals ŝ: with α ≥ 1 the gate is closed by definition, and rounding must not open it.
    """
    if hyper.gate is None:
        return 1.0
    undecided = float("nan")
    no_variance = t_s < 1
    at_start = t <= 1
    may_tie = hyper.gate != "snr" and not observed and hyper.signal == "ema"
    alpha_closes = True if isinstance(hyper.alpha, str) else hyper.alpha >= 1
    tie = at_start & alpha_closes if may_tie else False
    closed = _where(no_variance | tie, 0.0, undecided)
    if not isinstance(hyper.warmup_steps, Tensor) and not hyper.warmup_steps:
        return closed
    return _where(t <= hyper.warmup_steps, 1.0, closed)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if not isinstance(condition, Tensor):
        return yes if condition else no
    pair = (x if isinstance(x, Tensor) else torch.full_like(condition, x, dtype=torch.float64) for x in (yes, no))
    return torch.where(condition, *pair)


def at_least(x: Scalar, low: float) -> Scalar:
    """The larger of the two, on the device for a scalar that lies there."""
    return x.clamp(min=low) if isinstance(x, Tensor) else max(x, low)


def _inverse(x: Scalar) -> Scalar:
    """1/x, and 0 for 0: what it would multiply has seen no gradient yet, and the gate is closed there."""
    if isinstance(x, Tensor):
        return torch.where(x > 0, 1 / x, torch.zeros_like(x))
    return 1 / x if x > 0 else 0.0
