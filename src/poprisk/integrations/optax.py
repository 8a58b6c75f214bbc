r"""Algorithm 1 for JAX: a gradient transformation that gates Adam's direction, and the AdamW made with it.

Written for optax's conventions and free of torch, so that a JAX program does not load a second framework; the tests
hold it to :class:`poprisk.PopRiskAdamW` step by step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from poprisk.errors import GradientError, HyperparameterError, MissingExtraError, StateDictError

try:
    import jax
    import jax.numpy as jnp
    import optax
    from jax.core import Tracer
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("jax", "jaxlib", "optax"):
        raise  # a part of an installed jax or optax is broken: its own message says more
    raise MissingExtraError("optax", "jax", "the optax integration") from None

if TYPE_CHECKING:  # torch is imported where these live
    from poprisk.rules.coefficients import Granularity, Signal
    from poprisk.rules.gates import GateName
    from poprisk.rules.threshold import Centering

Number = float | jax.Array
Tree = Any


class PopulationRiskState(NamedTuple):
    """m, v, s of Algorithm 1 as trees like the parameters, and the counters of their bias corrections."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name for it
    """Steps taken, int32: as many gradients as m and v have seen."""
    mu: Tree
    nu: Tree
    """v; None where another transformation is gated, which has its own."""
    s: Tree
    """Variance of the gradient around its running mean; None without a gate."""
    var_count: jax.Array
    """Gradients s has seen; zero, beside a zero s, where the gate joins a run that began with Adam."""
    gain: jax.Array
    """What s would be under white noise of unit variance; ``alpha="calibrated"`` divides by it."""
    inner_state: Tree = ()


class GateDiagnostics(NamedTuple):
    """Meters of the last step, as scalars on the device; defined as :meth:`poprisk.PopRiskAdamW.diagnostics` does."""

    active_fraction: jax.Array
    """Share of coordinates whose gate was not closed."""
    mean_gate: jax.Array
    """Mean of q."""
    noise_scale: jax.Array
    """Gradient noise scale in batches, tr Cov(g_B) / |E g|², both debiased; infinite where no signal stands out."""


@dataclass(frozen=True)
class _Options:
    """The gate's options and their defaults, which the tests hold to ``poprisk.optim.DEFAULTS``."""

    b1: Number = 0.9
    b2: Number = 0.999
    eps: Number = 1e-8
    gate: "GateName | None" = "soft"
    alpha: Number | Literal["calibrated"] = 1.0
    strength: Number = 1.0
    rho: Number = 0.99
    gate_eps: Number = 0.0
    centering: "Centering" = "paper"
    signal: "Signal" = "ema"
    warmup_steps: Number = 0
    normalize_gate: bool = False
    granularity: "Granularity" = "element"
    skip_nonfinite: bool = True
    mu_dtype: Any = None


_DEFAULTS = _Options()
_NAMES = tuple(f.name for f in fields(_Options))
_CHOICES: dict[str, tuple[Any, ...]] = {
    "gate": ("soft", "hard", "snr", None),
    "centering": ("paper", "corrected"),
    "signal": ("ema", "batch"),
    "granularity": ("element", "row", "tensor"),
    "normalize_gate": (True, False),
    "skip_nonfinite": (True, False),
}


def population_risk_gate(
    b1: Number = _DEFAULTS.b1,
    b2: Number = _DEFAULTS.b2,
    eps: Number = _DEFAULTS.eps,
    *,
    gate: "GateName | None" = _DEFAULTS.gate,
    alpha: Number | Literal["calibrated"] = _DEFAULTS.alpha,
    strength: Number = _DEFAULTS.strength,
    rho: Number = _DEFAULTS.rho,
    gate_eps: Number = _DEFAULTS.gate_eps,
    centering: "Centering" = _DEFAULTS.centering,
    signal: "Signal" = _DEFAULTS.signal,
    warmup_steps: Number = _DEFAULTS.warmup_steps,
    normalize_gate: bool = _DEFAULTS.normalize_gate,
    granularity: "Granularity" = _DEFAULTS.granularity,
    skip_nonfinite: bool = _DEFAULTS.skip_nonfinite,
    mu_dtype: Any = _DEFAULTS.mu_dtype,
    inner: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Gradients in, gated direction out: lines 4 to 9 of Algorithm 1 (``alg:pop_risk``).

    .. math:: u = q \odot \frac{\hat m}{\sqrt{\hat v} + \epsilon}, \qquad
              q = \frac{\delta}{\delta + \lambda_{pop} \hat s + \varepsilon}, \quad
              \delta = (\hat m^2 - \alpha \hat s)_+

    In a chain it stands where ``optax.scale_by_adam`` would, and before anything that averages or normalizes: the
    noise it measures must be the gradients' own. For the same reason a gate for another optimizer goes *around* that
    optimizer: with ``inner`` the updates are :math:`u = q \odot \mathrm{inner}(g)`, with the q of the gradients that
    come in. ``inner=optax.identity()`` is gated gradient descent, ``inner=optax.scale_by_adam()`` is Algorithm 1 again
    (with one more state vector), and a chain that ends in ``add_decayed_weights`` has its decay gated too.

    Symbol map: ``b1``, ``b2`` β1, β2, ``eps`` ϵ, ``alpha`` α, ``strength`` λ_pop (λ of the SNR gate), ``rho`` ρ,
    ``gate_eps`` ε.

    Args:
        b1: Decay of the average of the gradient.
        b2: Decay of the average of its square; without effect where ``inner`` is given, like ``eps``.
        eps: Added to Adam's denominator.
        gate: ``"soft"`` (Algorithm 1), ``"hard"`` (the binary mask), ``"snr"`` (positive under the cutoff) or None:
            Adam, or ``inner`` as it is.
        alpha: Leave-one-out coefficient in the paper's units, or ``"calibrated"``: where pure noise breaks even.
        strength: How much noise a coordinate above the cutoff still pays for.
        rho: Decay of s.
        gate_eps: The paper's +ε in the gate; breaks scale invariance if it matters.
        centering: ``"paper"`` centres s on the raw previous mean, ``"corrected"`` on the debiased one.
        signal: What is compared with the noise: the average (``"ema"``) or this batch's gradient (``"batch"``).
        warmup_steps: So many first steps are not gated.
        normalize_gate: Divide the gate by its mean over each leaf.
        granularity: One gate per ``"element"``, per ``"row"`` (first axis) or per ``"tensor"`` (leaf).
        skip_nonfinite: Leave a coordinate's m, v, s alone, and emit 0 for it, in a step where its gradient is NaN,
            infinite, or too large to square.
        mu_dtype: dtype of m. Default: as v and s, float32, or float64 for float64 parameters; complex parameters have
            complex moments in any case.
        inner: The transformation to gate instead of Adam's direction.

    Returns:
        The transformation; its state is a :class:`PopulationRiskState`. Numbers may be traced, as under
        ``optax.inject_hyperparams``; extra arguments of ``update`` are handed to ``inner`` and otherwise ignored.

    Raises:
        HyperparameterError: an option is out of range.

    Example:
        >>> optimizer = optax.chain(
        ...     optax.clip_by_global_norm(1.0), population_risk_gate(gate="hard"), optax.scale_by_learning_rate(0.1)
        ... )
        >>> state, update = optimizer.init({"w": jnp.zeros(3)}), jax.jit(optimizer.update)
        >>> for t in range(80):  # the third gradient is all noise
        ...     updates, state = update({"w": jnp.array([1.0, -1.0, (-1.0) ** t])}, state)
        >>> (updates["w"] != 0).tolist()
        [True, True, False]
    """
    given = locals()
    o = _checked({name: given[name] for name in _NAMES})
    if inner is not None and not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise HyperparameterError(f"inner must be an optax.GradientTransformation or None, got {inner!r}")
    wrapped = None if inner is None else optax.with_extra_args_support(inner)
    if wrapped is not None and o.gate is None:
        return wrapped

    def init(params: Tree) -> PopulationRiskState:
        for leaf in jax.tree.leaves(params):
            _check_dtype(leaf)
        return PopulationRiskState(
            count=jnp.zeros((), jnp.int32),
            mu=_zeros(params, o.mu_dtype),
            nu=_zeros(params) if wrapped is None else None,
            s=_zeros(params) if o.gate is not None else None,
            var_count=jnp.zeros((), jnp.int32),
            gain=_float(0.0),
            inner_state=() if wrapped is None else wrapped.init(params),
        )

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, PopulationRiskState]:
        _check_structure(updates, state)
        c, counters = _advance(o, state)
        directions, inner_state = None, state.inner_state
        if wrapped is not None:
            usable = jax.tree.map(_where_usable, updates, updates, state.s) if o.skip_nonfinite else updates
            directions, inner_state = wrapped.update(usable, state.inner_state, params, **extra)
        gradients, structure = jax.tree.flatten(updates)
        columns = [_column(x, structure) for x in (directions, state.mu, state.nu, state.s)]
        steps = [_leaf_step(g, u, _Moments(*x), c, o) for g, u, *x in zip(gradients, *columns, strict=True)]
        out = structure.unflatten([direction for direction, _ in steps])
        mu, nu, s = (
            None if old is None else structure.unflatten([moments[i] for _, moments in steps])
            for i, old in enumerate((state.mu, state.nu, state.s))
        )
        return out, PopulationRiskState(mu=mu, nu=nu, s=s, inner_state=inner_state, **counters)

    return optax.GradientTransformationExtraArgs(init, update)


def poprisk_adamw(
    learning_rate: optax.ScalarOrSchedule = 1e-2,
    b1: Number = _DEFAULTS.b1,
    b2: Number = _DEFAULTS.b2,
    eps: Number = _DEFAULTS.eps,
    weight_decay: Number = 1e-2,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    mu_dtype: Any = _DEFAULTS.mu_dtype,
    *,
    gate: "GateName | None" = _DEFAULTS.gate,
    alpha: Number | Literal["calibrated"] = _DEFAULTS.alpha,
    strength: Number = _DEFAULTS.strength,
    rho: Number = _DEFAULTS.rho,
    gate_eps: Number = _DEFAULTS.gate_eps,
    centering: "Centering" = _DEFAULTS.centering,
    signal: "Signal" = _DEFAULTS.signal,
    warmup_steps: Number = _DEFAULTS.warmup_steps,
    normalize_gate: bool = _DEFAULTS.normalize_gate,
    granularity: "Granularity" = _DEFAULTS.granularity,
    skip_nonfinite: bool = _DEFAULTS.skip_nonfinite,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW with the gate of Algorithm 1: :class:`poprisk.PopRiskAdamW` for JAX, in the place of ``optax.adamw``.

    .. math:: w_t = w_{t-1} - \eta\, q_t \odot \frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon} - \eta \lambda_{wd} w_{t-1}

    A chain of :func:`population_risk_gate`, ``optax.add_decayed_weights`` and ``optax.scale_by_learning_rate``. The
    decay is not gated: a closed gate still decays. A coordinate whose gradient is not finite sits the whole step out.

    The gate shrinks most steps, so start with **ten times the learning rate of AdamW**; the default is 1e-2.

    Args:
        learning_rate: η, a number or an optax schedule.
        b1: Decay of the average of the gradient.
        b2: Decay of the average of its square.
        eps: Added to Adam's denominator.
        weight_decay: Decoupled weight decay λ_wd, by default that of :class:`poprisk.PopRiskAdamW`, not of optax.
        mask: Which leaves decay, as in ``optax.adamw``.
        mu_dtype: As in :func:`population_risk_gate`, like everything below.
        gate: ``"soft"``, ``"hard"``, ``"snr"``, or None for AdamW.
        alpha: Leave-one-out coefficient, or ``"calibrated"``.
        strength: λ_pop, or λ of the SNR gate.
        rho: Decay of s.
        gate_eps: The paper's +ε in the gate.
        centering: ``"paper"`` or ``"corrected"``.
        signal: ``"ema"`` or ``"batch"``.
        warmup_steps: So many first steps are not gated.
        normalize_gate: Divide the gate by its mean over each leaf.
        granularity: ``"element"``, ``"row"`` or ``"tensor"``.
        skip_nonfinite: Leave a coordinate alone, decay included, where its gradient is not finite.

    Returns:
        The optimizer. Its ``update`` needs ``params``, for the decay.

    Raises:
        HyperparameterError: an option is out of range.

    Example:
        >>> optimizer = poprisk_adamw(0.1, weight_decay=0.0)
        >>> w = jnp.array([1.0])
        >>> state, update = optimizer.init(w), jax.jit(optimizer.update)
        >>> for g in (2.0, 2.0):
        ...     updates, state = update(jnp.array([g]), state, w)
        ...     w = optax.apply_updates(w, updates)
        >>> round(w.item(), 6)  # closed at t = 1; then m̂ = 2, ŝ = 3.6181 and q = 0.0955
        0.990452
    """
    given = locals()
    if not callable(learning_rate):
        _number("learning_rate", learning_rate, "a finite number ≥ 0, or a schedule", lambda x: x >= 0)
    if not callable(weight_decay):  # optax takes a schedule here too
        _number("weight_decay", weight_decay, "a finite number ≥ 0", lambda x: x >= 0)
    adamw = optax.chain(
        population_risk_gate(**{name: given[name] for name in _NAMES}),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return adamw if gate is None or not skip_nonfinite else _sitting_out(adamw)


def gate_diagnostics(state: Tree, **options: Any) -> GateDiagnostics:
    r"""What the gate did in the last step, computed now from the state of an optimizer; may be jitted.

    The state holds no hyper-parameters: **pass those the gate was made with**, if they are not the defaults. Of a state
    with several gates, as that of ``optax.multi_transform``, the meters are over all of them; where their options
    differ, pass one inner state at a time. A ``mu_dtype`` below float32 leaves a rounded m to compute from.

    Args:
        state: The state of :func:`poprisk_adamw`, or of any optimizer with a :func:`population_risk_gate` in it.
        **options: The gate's options, by the names of :func:`population_risk_gate`. With ``signal="batch"`` the gate is
            that of the averaged signal: the batch's own is gone after the step.

    Raises:
        StateDictError: there is no gate in this state.

    Example:
        >>> options = {"gate": "snr", "centering": "corrected"}
        >>> optimizer = poprisk_adamw(**options)
        >>> w = jnp.zeros(4)
        >>> state, update = optimizer.init(w), jax.jit(optimizer.update)
        >>> for _ in range(2):  # no noise, so that the gate is open wherever there is a gradient
        ...     _, state = update(jnp.array([1.0, 2.0, 3.0, 0.0]), state, w)
        >>> gate_diagnostics(state, **options).mean_gate.item()
        0.75
    """
    o = _checked(options)
    states = [x for x in jax.tree.leaves(state, is_leaf=_is_ours) if _is_ours(x)]
    if not states:
        raise StateDictError(
            f"gate_diagnostics needs a state with a PopulationRiskState in it, got {type(state).__name__} without one: "
            "pass what init or update of poprisk_adamw or population_risk_gate returned"
        )
    total, coordinates = jnp.zeros(4, jnp.result_type(float)), 0
    for x in states:
        sums, size = _sums(x, o)
        total, coordinates = total + sums, coordinates + size
    active, gate, noise, signal = total
    n = max(1, coordinates)
    return GateDiagnostics(active / n, gate / n, noise / jnp.maximum(signal, 0))


class _Moments(NamedTuple):
    """m, v, s of one leaf; None for those the state does not have."""

    m: Any
    v: Any
    s: Any


class _Coefficients(NamedTuple):
    """What one step multiplies with: scalars that do not depend on the coordinate."""

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
    """Whether the gate is 1 in advance (warm-up) ..."""
    closed: Any
    """... or else 0: nothing to decide on yet, or a tie by definition."""


def _advance(o: _Options, state: PopulationRiskState) -> tuple[_Coefficients, dict[str, Any]]:
    """The coefficients of the next step and the counters after it; as ``poprisk.rules.coefficients.advance``."""
    count: Any = optax.safe_increment(state.count)
    t, var_count, gain = _float(count), state.var_count, state.gain
    corrected = o.centering == "corrected"
    center, new = _inverse(_one_minus_power(o.b1, t - 1)) if corrected else 1.0, _float(0.0)
    if o.gate is not None:  # without one s stands still, and so do its counters
        sampled = t > (1 if corrected else 0)  # the first deviation from a debiased mean exists at t = 2
        var_count = jnp.where(sampled, optax.safe_increment(var_count), var_count)
        new = jnp.where(sampled, _float(1 - o.rho), 0.0)
        noise = _deviation_noise(o, jnp.maximum(t, 2) if corrected else t)
        gain = (_float(gain) + new * (noise - _float(gain))).astype(gain.dtype)  # as it came, also if x64 came later
    c = _current(o, count, var_count, gain)
    sampling = {"center": _float(center), "s_keep": 1 - new, "s_new": new}
    return c._replace(**sampling), {"count": count, "var_count": var_count, "gain": gain}


def _current(o: _Options, count: jax.Array, var_count: jax.Array, gain: jax.Array) -> _Coefficients:
    """The coefficients of the step already taken, after which s is as it is; as ``coefficients.current``."""
    t, t_s, gain = _float(count), _float(var_count), _float(gain)
    s_scale = _one_minus_power(o.rho, t_s)
    calibrated = isinstance(o.alpha, str)
    kappa = _mean_noise(o, jnp.maximum(t, 1)) if o.signal == "ema" else 1.0
    # At t = 1 the paper's m̂² equals ŝ: with α ≥ 1 the gate is closed by definition, and rounding must not open it.
    tie = (t <= 1) & (calibrated or _float(o.alpha) >= 1) & (o.gate != "snr" and o.signal == "ema")
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
    scalars = {name: _float(x) for name, x in numbers.items()}
    warming_up = (t >= 1) & (t <= _float(o.warmup_steps))
    return _Coefficients(**scalars, opened=warming_up, closed=(t_s < 1) | tie)


def _mean_noise(o: _Options, t: jax.Array) -> jax.Array:
    """Variance of m̂ under white noise of unit variance; as ``poprisk.rules.threshold.mean_noise``."""
    rest = _one_minus_power(o.b1, t)
    return _float((1 - o.b1) / (1 + o.b1)) * (2 - rest) / rest


def _deviation_noise(o: _Options, t: jax.Array) -> jax.Array:
    """Variance of the deviation g - m under the same noise; as ``poprisk.rules.threshold.deviation_noise``."""
    if o.centering == "corrected":
        return 1 + _mean_noise(o, t - 1)
    return 1 + _float((1 - o.b1) / (1 + o.b1)) * _one_minus_power(o.b1, 2 * (t - 1))


def _one_minus_power(base: Number, exponent: jax.Array) -> jax.Array:
    """1 - base^exponent to float32's full relative accuracy, also where base^exponent is close to 1."""
    log = jnp.log(base) if isinstance(base, jax.Array) else (math.log(base) if base > 0 else -math.inf)
    return jnp.where(exponent > 0, -jnp.expm1(jnp.maximum(exponent, 1) * log), 0.0)


def _inverse(x: jax.Array) -> jax.Array:
    """1/x, and 0 for 0: what it would multiply has seen no gradient yet, and the gate is closed there."""
    return jnp.where(x > 0, 1 / jnp.where(x > 0, x, 1.0), 0.0)


def _leaf_step(g: Any, direction: Any, stored: _Moments, c: _Coefficients, o: _Options) -> tuple[jax.Array, _Moments]:
    """Lines 4 to 9 for one leaf: the gated direction and the new moments, in the dtypes that came in."""
    dtype, work = jnp.result_type(g), _work_dtype(stored.s if stored.v is None else stored.v)
    c = jax.tree.map(lambda x: x if x.dtype == jnp.bool_ else x.astype(work), c)
    (g, direction), old = jax.tree.map(lambda x: _parts(x).astype(work), ((g, direction), stored))
    usable = _is_usable(g) if o.skip_nonfinite and o.gate is not None else None
    g = g if usable is None else jnp.where(usable, g, 0)
    new = _Moments(
        m=old.m + c.m_new * (g - old.m),
        v=None if old.v is None else c.v_keep * old.v + c.v_new * (g * g),
        s=None if old.s is None else c.s_keep * old.s + c.s_new * jnp.square(g - c.center * old.m),
    )
    if usable is not None:  # before the gate, which may pool coordinates
        new = jax.tree.map(partial(jnp.where, usable), new, old)
    q = _gate(new.m, new.s, g, c, o)
    if new.v is None:
        out = q * direction
    else:  # eps = 0 may meet a coordinate that never had a gradient
        out = q * (new.m * c.m_debias) / jnp.maximum(jnp.sqrt(new.v * c.v_debias) + c.eps, jnp.finfo(work).tiny)
    out = out if usable is None else jnp.where(usable, out, 0)
    return _whole(out, dtype), jax.tree.map(lambda x, y: _whole(x, y.dtype), new, stored)


def _gate(m: jax.Array, s: jax.Array | None, g: jax.Array | None, c: _Coefficients, o: _Options) -> Any:
    """Lines 8 and 9: debias, pool to the asked granularity, compare; then what is decided in advance.

    What comes out broadcasts against m. Without a gradient the signal is the average.
    """
    if s is None:
        return 1.0
    signal, s_hat = m * c.m_debias if o.signal == "ema" or g is None else g, s * c.s_debias
    axes = {"element": (), "row": tuple(range(1, m.ndim)), "tensor": tuple(range(m.ndim))}[o.granularity]
    if axes:
        signal = jnp.sqrt(jnp.square(signal).mean(axes, keepdims=True))
        s_hat = s_hat.mean(axes, keepdims=True)
    q = _evaluate_gate(signal * signal, s_hat, c, o)
    q = jnp.where(c.opened, 1.0, jnp.where(c.closed, 0.0, q))
    return q / jnp.maximum(q.mean(), jnp.finfo(q.dtype).tiny) if o.normalize_gate else q


def _evaluate_gate(power: jax.Array, s_hat: jax.Array, c: _Coefficients, o: _Options) -> jax.Array:
    """Eq. ``soft_filter``, the three lines; 0/0, a coordinate that never had a gradient, is closed."""
    if o.gate == "hard":
        return (power > c.alpha * s_hat).astype(power.dtype)
    part = power if o.gate == "snr" else jnp.maximum(power - c.alpha * s_hat, 0)
    rest = c.strength * s_hat + c.gate_eps
    return part / jnp.maximum(part + rest, jnp.finfo(part.dtype).tiny)


def _sums(state: PopulationRiskState, o: _Options) -> tuple[jax.Array, int]:
    """Open gates, gates, noise power and signal power, summed over all leaves, and the number of coordinates."""
    c, settled = _current(o, state.count, state.var_count, state.gain), jnp.maximum(_float(state.count), 2)
    total, coordinates = jnp.zeros(4, c.eps.dtype), 0
    means, structure = jax.tree.flatten(state.mu)
    for mean, variance in zip(means, _column(state.s, structure), strict=True):
        m, s = jax.tree.map(lambda x: _parts(x).astype(c.eps.dtype), (mean, variance))
        q = jnp.broadcast_to(_gate(m, s, None, c, o), m.shape)
        noise = signal = _float(0.0)
        if s is not None:
            noise = (s * c.s_debias).sum() / _deviation_noise(o, settled)
            signal = jnp.square(m * c.m_debias).sum() - _mean_noise(o, settled) * noise
        total, coordinates = total + jnp.stack([_float((q > 0).sum()), q.sum(), noise, signal]), coordinates + m.size
    return total, coordinates


def _sitting_out(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The same transformation, whose updates are 0 wherever the gradient was not usable: no decay there either."""

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        out, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(_where_usable, out, updates, params), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _where_usable(x: Any, g: Any, like: Any) -> jax.Array:
    """X where the gradient can be used in the arithmetic of ``like``, else 0; part by part if complex."""
    usable = _is_usable(_parts(g).astype(_work_dtype(like)))
    return _whole(jnp.where(usable, _parts(x), 0), jnp.result_type(x))


def _is_usable(g: jax.Array) -> jax.Array:
    """Where a gradient is finite, and small enough that no square in the rule overflows."""
    return jnp.abs(g) < (2.0**510 if g.dtype == jnp.float64 else 2.0**62)


def _parts(x: Any) -> jax.Array:
    """A complex array as pairs of real numbers, each with a gate of its own, as in the torch class."""
    x = jnp.asarray(x)
    return jnp.stack([x.real, x.imag], axis=-1) if jnp.iscomplexobj(x) else x


def _whole(x: jax.Array, dtype: Any) -> jax.Array:
    """Pairs of real numbers as a complex array again, where ``dtype`` is complex."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return x.astype(dtype)
    return jax.lax.complex(x[..., 0], x[..., 1]).astype(dtype)


def _float(x: Any) -> jax.Array:
    """A scalar in the widest float there is: float64 under x64, else float32."""
    return jnp.asarray(x, dtype=jnp.result_type(float))


def _work_dtype(x: Any) -> Any:
    """Arithmetic is done in float32, or in float64 for float64 and complex128."""
    return jnp.float64 if jnp.result_type(x) in (jnp.float64, jnp.complex128) else jnp.float32


def _zeros(params: Tree, dtype: Any = None) -> Tree:
    """Moments for these parameters; those of a complex one hold two real moments as one complex number."""

    def zeros(p: Any) -> jax.Array:
        own = jnp.result_type(p)
        is_complex = jnp.issubdtype(own, jnp.complexfloating)
        return jnp.zeros_like(p, dtype=own if is_complex else dtype or _work_dtype(p))

    return jax.tree.map(zeros, params)


def _column(tree: Tree, structure: Any) -> list[Any]:
    """The leaves of a tree of that structure; of no tree, as many times None."""
    return [None] * structure.num_leaves if tree is None else structure.flatten_up_to(tree)


def _is_ours(x: Any) -> bool:
    return isinstance(x, PopulationRiskState)


def _checked(given: dict[str, Any]) -> _Options:
    """The options in one form; refuses those out of range, as ``poprisk.optim.validation`` does."""
    o = _Options(**given)
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
    return replace(o, **{name: _number(name, getattr(o, name), *rule) for name, rule in numbers.items()})


def _number(name: str, value: Any, expected: str, ok: Callable[[float], bool]) -> Any:
    """A number as a float, or an array of floats; refused if out of range, unless its value is not known yet."""
    if isinstance(value, Tracer):
        return _float(value)
    plain = value.item() if getattr(value, "shape", None) == () else value
    if isinstance(plain, bool) or not isinstance(plain, Real) or not math.isfinite(plain) or not ok(float(plain)):
        raise HyperparameterError(f"{name} must be {expected}, got {value!r}")
    return _float(value) if isinstance(value, jax.Array) else float(plain)


def _is_real_dtype(dtype: Any) -> bool:
    try:
        return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
    except TypeError:
        return False


def _check_dtype(leaf: Any) -> None:
    dtype = jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise GradientError(
            f"the gate needs floating-point or complex parameters, got dtype {dtype} for one of shape "
            f"{jnp.shape(leaf)}: leave it out with optax.masked, or give it a label of its own in optax.multi_transform"
        )


def _check_structure(updates: Tree, state: PopulationRiskState) -> None:
    got, expected = jax.tree.structure(updates), jax.tree.structure(state.mu)
    if got != expected:
        raise GradientError(
            f"gradients must have the tree structure of the parameters given to init, {expected}, got {got}: leave "
            "parameters without gradients out with optax.masked, or have None in their place in both trees"
        )
