r"""Algorithm 1 of the paper, line by line, as a pure function: state and gradient in, state and weights out.

This is the one definition. The optimizer's for-loop backend *is* this function; every faster backend is tested
against it, and replay, influence and ensembles call it. In float64 it is accurate to rounding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from poprisk._core.types import Linearization, Scalar
from poprisk.errors import HyperparameterError
from poprisk.optim.rules._coefficients import Coefficients, Hyper, advance, current, per_member
from poprisk.optim.rules._gates import evaluate_gate
from poprisk.optim.rules._relative import first_scale, in_adamw_units, to_adamw_units
from poprisk.optim.rules._rounding import round_stochastically, rounding_bits, rounding_seed


class Whole(Protocol):
    """The larger tensor of which a state holds one part, where the parts lie in several processes."""

    offset: int
    """Where this part begins in the whole, so that stochastic rounding draws the numbers it would draw there."""

    def means(self, parts: Sequence[Tensor], dims: tuple[int, ...]) -> list[Tensor]:
        """For each of several tensors its mean over the given axes of the whole, which are kept with length 1."""
        ...


@dataclass(frozen=True)
class PopulationState:
    """m, v, s of Algorithm 1 and the counters of their bias corrections, for one tensor of weights.

    ``s`` is None without a gate and when it follows from m and v (``shared_state``). ``gain`` is what s would be under
    white noise of unit variance; the calibrated threshold divides by it. ``key`` seeds stochastic rounding.
    ``observed`` says whether the last variance was given from outside. ``whole`` is set if the tensor is one
    process's part of a larger one; pooled and normalized gates then pool over all parts. ``scale`` is what a normalized
    gate remembers, [2], or [members, 2] if the first axis holds several trainings: the mean of the gate in the last
    step, and the reference used in it (:mod:`poprisk.optim.rules._relative`); None without ``normalize_gate``.
    """

    m: Float[Tensor, "*shape"]
    v: Float[Tensor, "*shape"]
    s: Float[Tensor, "*shape"] | None
    step: Scalar = 0.0
    var_step: Scalar = 0.0
    gain: Scalar = 0.0
    key: int = 0
    observed: bool = False
    whole: Whole | None = None
    scale: Float[Tensor, "*members 2"] | None = None


def initial_state(w: Float[Tensor, "*shape"], hyper: Hyper) -> PopulationState:
    """Line 1: m, v, s ← 0, in float32 or better."""
    zeros = torch.zeros_like(w, dtype=math_dtype(w.dtype))
    scale = first_scale(zeros) if hyper.in_adamw_units else None
    return PopulationState(zeros, zeros.clone(), zeros.clone() if hyper.tracks_variance else None, scale=scale)


def population_step(
    w: Float[Tensor, "*shape"],
    g: Float[Tensor, "*shape"],
    state: PopulationState,
    hyper: Hyper,
    variance: Float[Tensor, "*shape"] | None = None,
) -> tuple[Float[Tensor, "*shape"], PopulationState]:
    r"""One step of Algorithm 1 (``alg:pop_risk``), lines 4 to 10.

    Symbol map: ``alpha`` is α, ``strength`` λ_pop (and λ of the SNR gate), ``rho`` ρ, ``gate_eps`` the ε of line 9,
    ``eps`` the ϵ of line 10.

    Differs from the paper only where an option says so, and in three corners the paper leaves open: ε defaults to 0
    with 0/0 guarded; s keeps its own step count; coordinates whose gradient is not usable are not
    updated in that step (``skip_nonfinite``).

    Args:
        w: Weights before the step.
        g: Mean gradient of the batch.
        state: m, v, s and counters before the step.
        hyper: Hyper-parameters; ``Hyper()`` is Algorithm 1.
        variance: Variance of the batch mean, :math:`(\Sigma_B)_{kk}/(b-1)`, if it is known and need not be estimated
            from the stream.

    Returns:
        The new weights and the new state, in the dtypes that came in.

    >>> w, hyper = torch.tensor([1.0], dtype=torch.float64), Hyper(lr=0.1, weight_decay=0.0)
    >>> state = initial_state(w, hyper)
    >>> for g in (2.0, 2.0):
    ...     w, state = population_step(w, torch.tensor([g], dtype=torch.float64), state, hyper)
    >>> round(w.item(), 6)  # closed at t = 1; then m̂ = 2, ŝ = 3.6181 and q = 0.0955
    0.990452
    """
    moved = population_direction(g, state, hyper, variance, work=math_dtype(w.dtype))
    h = per_member(hyper, math_dtype(w.dtype))
    decay = h.weight_decay * (moved.gate if hyper.gated_decay else 1.0)
    w_work = w.to(math_dtype(w.dtype))
    w_new = (w_work - h.lr * (moved.update + decay * w_work)).to(w.dtype)  # line 10
    return w_new if moved.usable is None else torch.where(moved.usable, w_new, w), moved.state


@dataclass(frozen=True)
class Direction:
    r"""What one gradient does to the state, before learning rate and decay are applied.

    ``update`` is :math:`q \odot \hat m/(\sqrt{\hat v}+\epsilon)`, ``gate`` q (if normalized, in AdamW's units),
    ``usable`` marks the coordinates that move (None: all of them).
    """

    update: Float[Tensor, "*shape"]
    gate: Float[Tensor, "*shape"]
    usable: Bool[Tensor, "*shape"] | None
    state: PopulationState


def population_direction(
    g: Float[Tensor, "*shape"],
    state: PopulationState,
    hyper: Hyper,
    variance: Float[Tensor, "*shape"] | None = None,
    work: torch.dtype = torch.float32,
) -> Direction:
    """Lines 4 to 9 and the direction of line 10; see :func:`population_step`.

    Hyper-parameters may be tensors that broadcast against g, one row for each of many trainings.

    >>> g = torch.tensor([2.0])
    >>> moved = population_direction(g, initial_state(g, Hyper(gate=None)), Hyper(gate=None, eps=0.0))
    >>> moved.update, moved.gate
    (tensor([1.]), tensor([1.]))
    """
    c = per_member(advance(hyper, state.step, state.var_step, state.gain, observed=variance is not None), work)
    h = per_member(hyper, work)
    beta1, beta2 = h.betas
    g_t, m_prev, v_prev = g.to(work), state.m.to(work), state.v.to(work)
    usable = is_usable(g_t) if hyper.skip_nonfinite and hyper.gate is not None else None
    g_t = g_t if usable is None else torch.where(usable, g_t, 0.0)
    s = None
    if state.s is not None:  # lines 4 and 5
        squared = (g_t - c.center * m_prev).square() if variance is None else variance.to(work)
        s = c.s_keep * state.s.to(work) + c.s_new * squared
    m = m_prev + (1 - beta1) * (g_t - m_prev)  # line 6
    v = beta2 * v_prev + (1 - beta2) * g_t.square()  # line 7
    if usable is not None:  # before the gate, which may pool coordinates
        m, v = torch.where(usable, m, m_prev), torch.where(usable, v, v_prev)
        s = s if s is None or state.s is None else torch.where(usable, s, state.s.to(work))
    q, scale = _gate(m, v, s, g_t, c, h, state.whole), None  # lines 8 and 9
    if hyper.in_adamw_units:
        q, scale = to_adamw_units(q, first_scale(m) if state.scale is None else state.scale, state.whole)
    update = q * (m * c.m_debias) / _denominator(v * c.v_debias, h)
    v_out, s_out = _round(v, s, state, c)
    moments = (m.to(state.m.dtype), v_out, s_out)
    counters = (c.step, c.var_step, c.gain)
    new_state = PopulationState(*moments, *counters, state.key, variance is not None, state.whole, scale)
    return Direction(update, q, usable, new_state)


def linearize(state: PopulationState, hyper: Hyper) -> Linearization:
    r"""The step just taken, :math:`\Delta w = -M m - \mathrm{decay}\, w`, read off the state it left behind.

    .. math:: M = \eta\, q / \big((1-\beta_1^t)(\sqrt{\hat v} + \epsilon)\big)
    """
    if hyper.signal == "batch":
        raise HyperparameterError(
            'linearize needs signal="ema", got "batch": that gate was decided on a gradient that is gone after the step'
        )
    m, v, s, c = _stored(state, hyper)
    q = _last_gate(state, m, v, s, c, hyper)
    M = hyper.lr * q * c.m_debias / _denominator(v * c.v_debias, hyper)
    decay = hyper.lr * hyper.weight_decay
    return Linearization(M, hyper.betas[0], decay * q if hyper.gated_decay else decay, 0.0)


def current_gate(state: PopulationState, hyper: Hyper) -> Float[Tensor, "*shape"]:
    """What multiplied AdamW's step in the step just taken (with ``signal="batch"``: for the averaged signal).

    This is the gate q, with ``normalize_gate`` in AdamW's units.
    """
    m, v, s, c = _stored(state, hyper)
    return _last_gate(state, m, v, s, c, replace(hyper, signal="ema"))


def debiased_variance(state: PopulationState, hyper: Hyper) -> Float[Tensor, "*shape"]:
    """ŝ of a stored state, also where s is only implied by m and v."""
    m, v, s, c = _stored(state, hyper)
    return _variance(m, v, s, hyper) * c.s_debias


def _stored(state: PopulationState, hyper: Hyper) -> tuple[Tensor, Tensor, Tensor | None, Coefficients]:
    """The moments of a stored state in the dtype of the arithmetic, and the coefficients of its last step."""
    work = math_dtype(state.m.dtype)
    c = current(hyper, state.step, state.var_step, state.gain, observed=state.observed)
    return state.m.to(work), state.v.to(work), None if state.s is None else state.s.to(work), c


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """Arithmetic is done in float32, or in float64 for float64 weights."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_usable(g: Tensor) -> Tensor:
    """Where a gradient is finite, and small enough that no square in the rule overflows."""
    return g.abs() < usable_limit(math_dtype(g.dtype))


def usable_limit(dtype: torch.dtype) -> float:
    """A quarter of the root of the largest number, 2^62 in float32; a power of two, so that scaling by it is exact."""
    return 2.0**510 if dtype == torch.float64 else 2.0**62


def _denominator(v_hat: Tensor, hyper: Hyper) -> Tensor:
    """√v̂ + ϵ, kept off zero where ϵ = 0 meets a coordinate that never had a gradient."""
    return (v_hat.sqrt() + hyper.eps).clamp(min=torch.finfo(v_hat.dtype).tiny)


def _variance(m: Tensor, v: Tensor, s: Tensor | None, hyper: Hyper) -> Tensor:
    """Raw s; with ρ = β1 = β2 = β it equals (v - m²)/β exactly and needs no memory."""
    return s if s is not None else ((v - m * m) / hyper.betas[0]).clamp(min=0)


def _gate(
    m: Tensor, v: Tensor, s: Tensor | None, g: Tensor | None, c: Coefficients, hyper: Hyper, whole: Whole | None
) -> Tensor:
    """Lines 8 and 9: debias, pool to the requested granularity, compare; then what is decided in advance."""
    if hyper.gate is None:
        return torch.ones_like(m)
    s_hat = _variance(m, v, s, hyper) * c.s_debias
    signal = m * c.m_debias if hyper.signal == "ema" or g is None else g
    if hyper.granularity != "element" and m.dim() > 0:
        dims = tuple(range(0 if hyper.granularity == "tensor" else 1, m.dim()))
        if dims:
            power, s_hat = _means((signal.square(), s_hat), dims, whole)
            signal = power.sqrt()
    q = evaluate_gate(hyper.gate, signal, s_hat, c.alpha, hyper.strength, hyper.gate_eps).expand_as(m)
    if isinstance(c.open_gate, Tensor):
        q = torch.where(c.open_gate.isnan(), q, c.open_gate.to(q.dtype))
    elif c.open_gate == c.open_gate:
        q = torch.full_like(m, c.open_gate)
    return q


def _last_gate(state: PopulationState, m: Tensor, v: Tensor, s: Tensor | None, c: Coefficients, hyper: Hyper) -> Tensor:
    """The gate of a stored state's last step, in AdamW's units if it is normalized."""
    q = _gate(m, v, s, None, c, hyper, state.whole)
    if not hyper.in_adamw_units:
        return q
    return in_adamw_units(q, first_scale(m) if state.scale is None else state.scale)


def _means(xs: Sequence[Tensor], dims: tuple[int, ...], whole: Whole | None) -> list[Tensor]:
    return [x.mean(dims, keepdim=True) for x in xs] if whole is None else whole.means(xs, dims)


def _round(v: Tensor, s: Tensor | None, old: PopulationState, c: Coefficients) -> tuple[Tensor, Tensor | None]:
    """Low 16 random bits for v, high 16 for s; wider dtypes are stored as they are."""
    if torch.bfloat16 not in (old.v.dtype, None if old.s is None else old.s.dtype):
        return v.to(old.v.dtype), None if s is None or old.s is None else s.to(old.s.dtype)
    step = c.step.long() if isinstance(c.step, Tensor) else int(c.step)
    offset = 0 if old.whole is None else old.whole.offset
    bits = rounding_bits(rounding_seed(step, old.key) + offset, old.v)

    def store(x: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
        return round_stochastically(x, noise) if dtype == torch.bfloat16 else x.to(dtype)

    v_out = store(v, old.v.dtype, bits & 0xFFFF)
    return v_out, None if s is None or old.s is None else store(s, old.s.dtype, bits >> 16)
