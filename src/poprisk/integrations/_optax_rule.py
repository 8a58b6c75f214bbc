r"""The update rule of the optax integration: Algorithm 1 on arrays, leaf by leaf, with checks of options and inputs.

It corresponds to :mod:`poprisk.optim.rules._population` for torch; tests compare the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from poprisk.errors import GradientError, HyperparameterError

if TYPE_CHECKING:  # torch is imported where these live
    from poprisk.optim import Centering, GateName, Granularity, Signal

Number = float | jax.Array
Tree = Any


class PopulationRiskState(NamedTuple):
    """m, v, s of Algorithm 1, as trees with the structure of the parameters, and counters for bias corrections."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name for it
    """Number of steps, int32: the number of gradients in m and v."""
    mu: Tree
    nu: Tree
    """v; None if another transformation is gated, which has its own state."""
    s: Tree
    """Variance of the gradient around its running mean; None without a gate."""
    var_count: jax.Array
    """Number of gradients in s; zero, with s zero, if a run that began with Adam continues with a gate."""
    gain: jax.Array
    """The value of s for white noise of unit variance; ``alpha="calibrated"`` divides by it."""
    inner_state: Tree = ()
    gate_scale: Tree = None
    """Scale of a normalized gate for each leaf, [2] (see ``poprisk.optim.rules._relative``); None without one."""


@dataclass(frozen=True)
class Options:
    """The gate's options and their defaults; a test compares them with ``poprisk.optim.DEFAULTS``."""

    b1: Number = 0.9
    b2: Number = 0.999
    eps: Number = 1e-8
    gate: "GateName | None" = "snr"
    alpha: Number | Literal["calibrated"] = 1.0
    strength: Number = 100.0
    rho: Number = 0.99
    gate_eps: Number = 0.0
    centering: "Centering" = "paper"
    signal: "Signal" = "ema"
    warmup_steps: Number = 0
    normalize_gate: bool = True
    granularity: "Granularity" = "element"
    skip_nonfinite: bool = True
    mu_dtype: Any = None


DEFAULTS = Options()
NAMES = tuple(f.name for f in fields(Options))
_CHOICES: dict[str, tuple[Any, ...]] = {
    "gate": ("soft", "hard", "snr", None),
    "centering": ("paper", "corrected"),
    "signal": ("ema", "batch"),
    "granularity": ("element", "row", "tensor"),
    "normalize_gate": (True, False),
    "skip_nonfinite": (True, False),
}


class Moments(NamedTuple):
    """m, v, s and the gate's scale of one leaf; None if the state does not have it."""

    m: Any
    v: Any
    s: Any
    scale: Any = None


class Coefficients(NamedTuple):
    """The coefficients of one step: scalars that do not depend on the coordinate."""

    center: Any
    s_keep: Any
    s_new: Any
    m_new: Any
    v_keep: Any
    v_new: Any
    m_debias: Any
    v_debias: Any
    s_debias: Any
    alpha: Any
    strength: Any
    gate_eps: Any
    eps: Any
    opened: Any
    """Whether the gate is 1 because of the warm-up."""
    closed: Any
    """Whether the gate is otherwise 0, because s is still empty or by definition of a tie."""


def advance(o: Options, state: PopulationRiskState) -> tuple[Coefficients, dict[str, Any]]:
    """The coefficients of the next step and the counters after it; see ``poprisk.optim.rules._coefficients``."""
    count: Any = optax.safe_increment(state.count)
    t, var_count, gain = as_float(count), state.var_count, state.gain
    corrected = o.centering == "corrected"
    center, new = _inverse(_one_minus_power(o.b1, t - 1)) if corrected else 1.0, as_float(0.0)
    if o.gate is not None:  # without a gate, s and its counters do not change
        sampled = t > (1 if corrected else 0)  # the first deviation from a debiased mean exists at t = 2
        var_count = jnp.where(sampled, optax.safe_increment(var_count), var_count)
        new = jnp.where(sampled, as_float(1 - o.rho), 0.0)
        noise = _deviation_noise(o, jnp.maximum(t, 2) if corrected else t)
        updated = as_float(gain) + new * (noise - as_float(gain))
        gain = updated.astype(gain.dtype)  # keep the dtype, even if x64 was enabled later
    c = _current(o, count, var_count, gain)
    sampling = {"center": as_float(center), "s_keep": 1 - new, "s_new": new}
    return c._replace(**sampling), {"count": count, "var_count": var_count, "gain": gain}


def _current(o: Options, count: jax.Array, var_count: jax.Array, gain: jax.Array) -> Coefficients:
    """The coefficients of the last step, which do not change s; see ``coefficients.current``."""
    t, t_s, gain = as_float(count), as_float(var_count), as_float(gain)
    s_scale = _one_minus_power(o.rho, t_s)
    calibrated = isinstance(o.alpha, str)
    kappa = _mean_noise(o, jnp.maximum(t, 1)) if o.signal == "ema" else 1.0
    # At t = 1 the paper's m̂² equals ŝ: with α ≥ 1 the gate is closed by definition, and rounding must not open it.
    tie = (t <= 1) & (calibrated or as_float(o.alpha) >= 1) & (o.gate != "snr" and o.signal == "ema")
    numbers = {
        "center": 1.0,
        "s_keep": 1.0,
        "s_new": 0.0,
        "m_new": 1 - o.b1,
        "v_keep": o.b2,
        "v_new": 1 - o.b2,
        "m_debias": _inverse(_one_minus_power(o.b1, t)),
        "v_debias": _inverse(_one_minus_power(o.b2, t)),
        "s_debias": _inverse(s_scale),
        "alpha": kappa * s_scale * _inverse(gain) if calibrated else o.alpha,
        "strength": o.strength,
        "gate_eps": o.gate_eps,
        "eps": o.eps,
    }
    scalars = {name: as_float(x) for name, x in numbers.items()}
    warming_up = (t >= 1) & (t <= as_float(o.warmup_steps))
    return Coefficients(**scalars, opened=warming_up, closed=(t_s < 1) | tie)


def _mean_noise(o: Options, t: jax.Array) -> jax.Array:
    """Variance of m̂ under white noise of unit variance; see ``poprisk.optim.rules._threshold.mean_noise``."""
    rest = _one_minus_power(o.b1, t)
    return as_float((1 - o.b1) / (1 + o.b1)) * (2 - rest) / rest


def _deviation_noise(o: Options, t: jax.Array) -> jax.Array:
    """Variance of the deviation g - m under the same noise; see ``poprisk.optim.rules._threshold.deviation_noise``."""
    if o.centering == "corrected":
        return 1 + _mean_noise(o, t - 1)
    return 1 + as_float((1 - o.b1) / (1 + o.b1)) * _one_minus_power(o.b1, 2 * (t - 1))


def _one_minus_power(base: Number, exponent: jax.Array) -> jax.Array:
    """1 - base^exponent with the full relative accuracy of float32, even if base^exponent is close to 1."""
    log = jnp.log(base) if isinstance(base, jax.Array) else (math.log(base) if base > 0 else -math.inf)
    return jnp.where(exponent > 0, -jnp.expm1(jnp.maximum(exponent, 1) * log), 0.0)


def _inverse(x: jax.Array) -> jax.Array:
    """1/x, and 0 for x = 0: there has been no gradient yet, and the gate is closed."""
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1.0), 0.0)


def leaf_step(g: Any, direction: Any, stored: Moments, c: Coefficients, o: Options) -> tuple[jax.Array, Moments]:
    """Lines 4 to 9 for one leaf: the gated direction and the new moments, in the dtypes of the inputs."""
    dtype, work = jnp.result_type(g), _work_dtype(stored.s if stored.v is None else stored.v)
    c = jax.tree.map(lambda x: x if x.dtype == jnp.bool_ else x.astype(work), c)
    moments, scale = stored._replace(scale=None), stored.scale
    (g, direction), old = jax.tree.map(lambda x: _parts(x).astype(work), ((g, direction), moments))
    usable = _is_usable(g) if o.skip_nonfinite and o.gate is not None else None
    g = g if usable is None else jnp.where(usable, g, 0)
    new = Moments(
        m=old.m + c.m_new * (g - old.m),
        v=None if old.v is None else c.v_keep * old.v + c.v_new * (g * g),
        s=None if old.s is None else c.s_keep * old.s + c.s_new * jnp.square(g - c.center * old.m),
    )
    if usable is not None:  # before the gate, which may average over coordinates
        new = jax.tree.map(partial(jnp.where, usable), new, old)
    q = _gate(new.m, new.s, g, c, o)
    if scale is not None:
        q = jnp.broadcast_to(q, new.m.shape)
        mean = jnp.asarray(q.mean() if q.size else 0.0, scale.dtype)
        q, scale = _relative(q, scale[0]), jnp.stack([mean, scale[0]])
    if new.v is None:
        out = q * direction
    else:  # with eps = 0, a coordinate may never have had a gradient
        out = q * (new.m * c.m_debias) / jnp.maximum(jnp.sqrt(new.v * c.v_debias) + c.eps, jnp.finfo(work).tiny)
    out = out if usable is None else jnp.where(usable, out, 0)
    new = jax.tree.map(lambda x, y: _whole(x, y.dtype), new, moments)
    return _whole(out, dtype), new._replace(scale=scale)


def first_scale(_: Any) -> jax.Array:
    """The scale of a leaf before its first step; see ``poprisk.optim.rules._relative``."""
    return jnp.zeros(2, dtype=jnp.result_type(float))


def _relative(q: jax.Array, reference: jax.Array) -> jax.Array:
    """(1 + min(1, q/reference))/2; for a reference of 0, the ratio is whether q > 0."""
    reference = reference.astype(q.dtype)
    shares = jnp.minimum(q / jnp.where(reference > 0, reference, 1), 1)
    return 0.5 + 0.5 * jnp.where(reference > 0, shares, (q > 0).astype(q.dtype))


def _gate(m: jax.Array, s: jax.Array | None, g: jax.Array | None, c: Coefficients, o: Options) -> Any:
    """Lines 8 and 9: debias, average at the given granularity, compare; then apply warm-up and ties.

    The result broadcasts against m. Without a gradient, the signal is the averaged gradient.
    """
    if s is None:
        return 1.0
    signal, s_hat = m * c.m_debias if o.signal == "ema" or g is None else g, s * c.s_debias
    axes = {"element": (), "row": tuple(range(1, m.ndim)), "tensor": tuple(range(m.ndim))}[o.granularity]
    if axes:
        signal = jnp.sqrt(jnp.square(signal).mean(axes, keepdims=True))
        s_hat = s_hat.mean(axes, keepdims=True)
    q = _evaluate_gate(signal * signal, s_hat, c, o)
    return jnp.where(c.opened, 1.0, jnp.where(c.closed, 0.0, q))


def _evaluate_gate(power: jax.Array, s_hat: jax.Array, c: Coefficients, o: Options) -> jax.Array:
    """Eq. ``soft_filter``; the gate is 0 for a coordinate that never had a gradient (0/0)."""
    if o.gate == "hard":
        return (power > c.alpha * s_hat).astype(power.dtype)
    part = power if o.gate == "snr" else jnp.maximum(power - c.alpha * s_hat, 0)
    rest = c.strength * s_hat + c.gate_eps
    return part / jnp.maximum(part + rest, jnp.finfo(part.dtype).tiny)


def leaf_sums(state: PopulationRiskState, o: Options) -> tuple[jax.Array, int]:
    """Sums over all leaves of open gates, gates, noise power and signal power, and the number of coordinates."""
    c, settled = _current(o, state.count, state.var_count, state.gain), jnp.maximum(as_float(state.count), 2)
    total, coordinates = jnp.zeros(4, c.eps.dtype), 0
    means, structure = jax.tree.flatten(state.mu)
    scales = column(state.gate_scale, structure)
    for mean, variance, scale in zip(means, column(state.s, structure), scales, strict=True):
        m, s = jax.tree.map(lambda x: _parts(x).astype(c.eps.dtype), (mean, variance))
        q = jnp.broadcast_to(_gate(m, s, None, c, o), m.shape)
        active, q = (
            as_float((q > 0).sum()),
            q if scale is None else jnp.where(state.count > 0, _relative(q, scale[1]), 0),
        )
        noise = signal = as_float(0.0)
        if s is not None:
            noise = (s * c.s_debias).sum() / _deviation_noise(o, settled)
            signal = jnp.square(m * c.m_debias).sum() - _mean_noise(o, settled) * noise
        total, coordinates = total + jnp.stack([active, q.sum(), noise, signal]), coordinates + m.size
    return total, coordinates


def where_usable(x: Any, g: Any, like: Any) -> jax.Array:
    """``x`` for coordinates whose gradient is usable in the precision of ``like``, otherwise 0."""
    usable = _is_usable(_parts(g).astype(_work_dtype(like)))
    return _whole(jnp.where(usable, _parts(x), 0), jnp.result_type(x))


def _is_usable(g: jax.Array) -> jax.Array:
    """Whether a gradient is finite, and small enough that its square does not overflow."""
    return jnp.abs(g) < (2.0**510 if g.dtype == jnp.float64 else 2.0**62)


def _parts(x: Any) -> jax.Array:
    """A complex array as pairs of real numbers, each with its own gate, as in the torch class."""
    x = jnp.asarray(x)
    return jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def _whole(x: jax.Array, dtype: Any) -> jax.Array:
    """Convert pairs of real numbers back to a complex array, if ``dtype`` is complex."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return x.astype(dtype)
    return jax.lax.complex(x[..., 0], x[..., 1]).astype(dtype)


def as_float(x: Any) -> jax.Array:
    """A scalar in the widest available dtype: float64 if x64 is enabled, otherwise float32."""
    return jnp.asarray(x, dtype=jnp.result_type(float))


def _work_dtype(x: Any) -> Any:
    """The dtype of computations: float32, or float64 for float64 and complex128."""
    return jnp.float64 if jnp.result_type(x) in (jnp.float64, jnp.complex128) else jnp.float32


def zeros_like_tree(params: Tree, dtype: Any = None) -> Tree:
    """Zero moments for these parameters; a complex parameter has complex moments, which hold two real ones."""

    def zeros(p: Any) -> jax.Array:
        own = jnp.result_type(p)
        is_complex = jnp.issubdtype(own, jnp.complexfloating)
        return jnp.zeros_like(p, dtype=own if is_complex else dtype or _work_dtype(p))

    return jax.tree.map(zeros, params)


def column(tree: Tree, structure: Any) -> list[Any]:
    """The leaves of a tree with this structure; a list of None if there is no tree."""
    return [None] * structure.num_leaves if tree is None else structure.flatten_up_to(tree)


def checked_options(given: dict[str, Any]) -> Options:
    """The checked options; see also ``poprisk.optim._validation``."""
    o = Options(**_unpack_gate(given))
    numbers = {
        **{name: ("a number in [0, 1)", lambda x: 0 <= x < 1) for name in ("b1", "b2", "rho")},
        **{name: ("a finite number ≥ 0", lambda x: x >= 0) for name in ("eps", "strength", "gate_eps")},
        "alpha": ("a finite number ≥ 0, or 'calibrated'", lambda x: x >= 0),
        "warmup_steps": ("a whole number ≥ 0", lambda x: x >= 0 and x.is_integer()),
    }
    if isinstance(o.alpha, str) and o.alpha == "calibrated":
        del numbers["alpha"]
    for name, allowed in _CHOICES.items():
        if getattr(o, name) not in allowed:
            raise HyperparameterError(f"{name} must be one of {allowed}, got {getattr(o, name)!r}")
    if o.mu_dtype is not None and not _is_real_dtype(o.mu_dtype):
        raise HyperparameterError(f"mu_dtype must be None or a real floating-point dtype, got {o.mu_dtype!r}")
    return replace(o, **{name: checked_number(name, getattr(o, name), *rule) for name, rule in numbers.items()})


def _unpack_gate(given: dict[str, Any]) -> dict[str, Any]:
    """The options with a ``poprisk.Gate`` replaced by its fields; found by its method, as its module needs torch."""
    gate: Any = given.get("gate")
    if not hasattr(gate, "options"):
        return given
    gate_fields = gate.options()
    if gate_fields.pop("gated_decay"):
        raise HyperparameterError(
            "Gate.gated_decay is not an option here: pass population_risk_gate(inner=optax.chain("
            "optax.scale_by_adam(), optax.add_decayed_weights(...)))"
        )
    for name in gate_fields.keys() - {"gate"}:
        beside, default = given.get(name, getattr(DEFAULTS, name)), getattr(DEFAULTS, name)
        if isinstance(beside, jax.Array):  # inject_hyperparams passes defaults as arrays, and hides them in a trace
            same = isinstance(beside, Tracer) or math.isclose(float(beside), default, rel_tol=1e-6)
        else:
            same = beside == default
        if not same:
            raise HyperparameterError(f"{name}={beside!r} was given beside gate={gate!r}: pass it to Gate")
    return {**given, **gate_fields}


def checked_number(name: str, value: Any, expected: str, ok: Callable[[float], bool]) -> Any:
    """The number as a float or array; its range is checked unless the value is traced."""
    if isinstance(value, Tracer):
        return as_float(value)
    plain = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(plain, bool) or not isinstance(plain, Real) or not math.isfinite(plain) or not ok(float(plain)):
        raise HyperparameterError(f"{name} must be {expected}, got {value!r}")
    return as_float(value) if isinstance(value, jax.Array) else float(plain)


def _is_real_dtype(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def check_dtype(leaf: Any) -> None:
    """Raise a GradientError if a parameter, an integer or boolean array, cannot have a gradient."""
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise GradientError(
            f"the gate needs floating-point or complex parameters, got dtype {dtype} for one of shape "
            f"{jnp.shape(leaf)}: leave it out with optax.masked, or give it its own label in optax.multi_transform"
        )


def check_structure(updates: Tree, state: PopulationRiskState) -> None:
    """Raise a GradientError if the gradients do not have the structure of the state."""
    got, expected = jax.tree.structure(updates), jax.tree.structure(state.mu)
    if got != expected:
        raise GradientError(
            f"gradients must have the tree structure of the parameters given to init, {expected}, got {got}: leave "
            "parameters without gradients out with optax.masked, or put None in their place in both trees"
        )
