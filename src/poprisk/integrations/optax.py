r"""Algorithm 1 for JAX: a gradient transformation that gates Adam's direction, and AdamW with this gate.

It follows optax's conventions and does not import torch, so that a JAX program does not load a second framework. Tests
compare it with :class:`poprisk.PopRiskAdamW` step by step.
"""

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from poprisk.errors import HyperparameterError, LiteralGateWarning, MissingExtraError, StateDictError

try:
    import jax
    import jax.numpy as jnp
    import optax
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("jax", "jaxlib", "optax"):
        raise  # the installed jax or optax is broken: its own message is more helpful
    raise MissingExtraError("optax", "jax", "the optax integration") from None

if TYPE_CHECKING:  # torch is imported where these live
    from poprisk.optim import Centering, Gate, GateName, Granularity, Signal

from poprisk.integrations._optax_rule import (
    DEFAULTS,
    NAMES,
    Moments,
    Number,
    PopulationRiskState,
    Tree,
    advance,
    as_float,
    check_dtype,
    check_structure,
    checked_number,
    checked_options,
    column,
    first_scale,
    leaf_step,
    leaf_sums,
    where_usable,
    zeros_like_tree,
)
from poprisk.integrations.optax_average import TailAverageState, averaged_params, tail_average  # noqa: F401


class GateDiagnostics(NamedTuple):
    """Diagnostics of the last step, as scalars on the device; see :meth:`poprisk.PopRiskAdamW.diagnostics`."""

    active_fraction: jax.Array
    """Share of coordinates whose gate was not closed."""
    mean_gate: jax.Array
    """Mean of the gate q."""
    noise_scale: jax.Array
    """Gradient noise scale in batches, ``tr Cov(g_B) / |E g|²``, both debiased; infinite without a clear signal."""


def population_risk_gate(
    b1: Number = DEFAULTS.b1,
    b2: Number = DEFAULTS.b2,
    eps: Number = DEFAULTS.eps,
    *,
    gate: "Gate | GateName | None" = DEFAULTS.gate,
    alpha: Number | Literal["calibrated"] = DEFAULTS.alpha,
    strength: Number = DEFAULTS.strength,
    rho: Number = DEFAULTS.rho,
    gate_eps: Number = DEFAULTS.gate_eps,
    centering: "Centering" = DEFAULTS.centering,
    signal: "Signal" = DEFAULTS.signal,
    warmup_steps: Number = DEFAULTS.warmup_steps,
    normalize_gate: bool = DEFAULTS.normalize_gate,
    granularity: "Granularity" = DEFAULTS.granularity,
    skip_nonfinite: bool = DEFAULTS.skip_nonfinite,
    mu_dtype: Any = DEFAULTS.mu_dtype,
    inner: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Transform gradients into the gated direction: lines 4 to 9 of Algorithm 1 (``alg:pop_risk``).

    .. math:: u = q \odot \frac{\hat m}{\sqrt{\hat v} + \epsilon}, \qquad
              q = \frac{\delta}{\delta + \lambda_{pop} \hat s + \varepsilon}, \quad
              \delta = (\hat m^2 - \alpha \hat s)_+

    In a chain, use it in place of ``optax.scale_by_adam``, before anything that averages or normalizes gradients,
    because it measures their noise. For the same reason, a gate for another optimizer wraps that optimizer: with
    ``inner`` the updates are :math:`u = q \odot \mathrm{inner}(g)`, where q is computed from the incoming gradients.
    ``inner=optax.identity()`` is gated gradient descent, ``inner=optax.scale_by_adam()`` is again Algorithm 1 (with one
    more state vector), and in a chain that ends with ``add_decayed_weights`` the decay is gated, too.

    Symbol map: ``b1``, ``b2`` β1, β2, ``eps`` ϵ, ``alpha`` α, ``strength`` λ_pop (λ of the SNR gate), ``rho`` ρ,
    ``gate_eps`` ε.

    Args:
        b1: Decay of the average of the gradient.
        b2: Decay of the average of its square; no effect with ``inner``, like ``eps``.
        eps: Constant added to Adam's denominator.
        gate: ``"snr"`` (positive even below the cutoff), ``"soft"`` (Algorithm 1), ``"hard"`` (the binary mask), or
            None for Adam, or for ``inner`` without a gate. Or a :class:`poprisk.Gate`, which contains the next nine
            options; if you pass them one by one, ``optax.inject_hyperparams`` can schedule the numbers among them.
        alpha: Leave-one-out coefficient in the paper's units, or ``"calibrated"``: the value at which pure noise
            breaks even.
        strength: Weight of the noise.
        rho: Decay rate of s.
        gate_eps: Constant added to the gate's denominator; any value other than 0 makes the gate depend on the scale
            of the gradients.
        centering: ``"paper"`` centers s on the raw previous mean, ``"corrected"`` on the debiased mean.
        signal: What is compared with the noise: the averaged gradient (``"ema"``) or this batch's (``"batch"``).
        warmup_steps: Number of initial steps without gating.
        normalize_gate: Whether the gate is relative to its mean over each leaf, so that the learning rate is AdamW's
            (see :class:`poprisk.Gate`); False is Algorithm 1's gate, which needs a larger one.
        granularity: One gate per ``"element"``, per ``"row"`` (first axis) or per ``"tensor"`` (leaf).
        skip_nonfinite: Whether to keep a coordinate's m, v, s, and return 0 for it, in a step in which its gradient is
            NaN, infinite, or too large to square.
        mu_dtype: Data type of m. Default: that of v and s, float32, or float64 for float64 parameters; complex
            parameters always have complex moments.
        inner: The transformation to gate instead of Adam's direction.

    Returns:
        The transformation; its state is a :class:`PopulationRiskState`. Numbers may be traced, as by
        ``optax.inject_hyperparams``; extra arguments of ``update`` are passed to ``inner`` and otherwise ignored.

    Raises:
        HyperparameterError: an option is out of range.

    Example:
        >>> gate = population_risk_gate(gate="hard", normalize_gate=False)  # the literal gate: closed or open
        >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), gate, optax.scale_by_learning_rate(0.1))
        >>> state, update = optimizer.init({"w": jnp.zeros(3)}), jax.jit(optimizer.update)
        >>> for t in range(80):  # the third gradient is all noise
        ...     updates, state = update({"w": jnp.array([1.0, -1.0, (-1.0) ** t])}, state)
        >>> (updates["w"] != 0).tolist()
        [True, True, False]
    """
    given = locals()
    o = checked_options({name: given[name] for name in NAMES})
    if inner is not None and not (callable(getattr(inner, "init", None)) and callable(getattr(inner, "update", None))):
        raise HyperparameterError(f"inner must be an optax.GradientTransformation or None, got {inner!r}")
    wrapped = None if inner is None else optax.with_extra_args_support(inner)
    if wrapped is not None and o.gate is None:
        return wrapped

    normalizes = o.gate is not None and o.normalize_gate

    def init(params: Tree) -> PopulationRiskState:
        for leaf in jax.tree.leaves(params):
            check_dtype(leaf)
        return PopulationRiskState(
            count=jnp.zeros((), jnp.int32),
            mu=zeros_like_tree(params, o.mu_dtype),
            nu=zeros_like_tree(params) if wrapped is None else None,
            s=zeros_like_tree(params) if o.gate is not None else None,
            var_count=jnp.zeros((), jnp.int32),
            gain=as_float(0.0),
            inner_state=() if wrapped is None else wrapped.init(params),
            gate_scale=jax.tree.map(first_scale, params) if normalizes else None,
        )

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, PopulationRiskState]:
        check_structure(updates, state)
        c, counters = advance(o, state)
        directions, inner_state = None, state.inner_state
        if wrapped is not None:
            usable = jax.tree.map(where_usable, updates, updates, state.s) if o.skip_nonfinite else updates
            directions, inner_state = wrapped.update(usable, state.inner_state, params, **extra)
        gradients, structure = jax.tree.flatten(updates)
        old_scale = state.gate_scale if normalizes else None
        if normalizes and old_scale is None:  # the state of version 0.1: its learning rate suits a literal gate
            warnings.warn(
                "this state was saved with a gate that is not normalized, which goes on; pass normalize_gate=False to "
                "keep it, or start from init(params) with AdamW's learning rate",
                LiteralGateWarning,
                stacklevel=2,
            )
        columns = [column(x, structure) for x in (directions, state.mu, state.nu, state.s, old_scale)]
        steps = [leaf_step(g, u, Moments(*x), c, o) for g, u, *x in zip(gradients, *columns, strict=True)]
        out = structure.unflatten([direction for direction, _ in steps])
        mu, nu, s, scale = (
            None if old is None else structure.unflatten([moments[i] for _, moments in steps])
            for i, old in enumerate((state.mu, state.nu, state.s, old_scale))
        )
        return out, PopulationRiskState(mu=mu, nu=nu, s=s, inner_state=inner_state, gate_scale=scale, **counters)

    return optax.GradientTransformationExtraArgs(init, update)


def poprisk_adamw(
    learning_rate: optax.ScalarOrSchedule = 1e-3,
    b1: Number = DEFAULTS.b1,
    b2: Number = DEFAULTS.b2,
    eps: Number = DEFAULTS.eps,
    weight_decay: Number = 1e-2,
    mask: Tree | Callable[[Tree], Tree] | None = None,
    mu_dtype: Any = DEFAULTS.mu_dtype,
    *,
    gate: "Gate | GateName | None" = DEFAULTS.gate,
    alpha: Number | Literal["calibrated"] = DEFAULTS.alpha,
    strength: Number = DEFAULTS.strength,
    rho: Number = DEFAULTS.rho,
    gate_eps: Number = DEFAULTS.gate_eps,
    centering: "Centering" = DEFAULTS.centering,
    signal: "Signal" = DEFAULTS.signal,
    warmup_steps: Number = DEFAULTS.warmup_steps,
    normalize_gate: bool = DEFAULTS.normalize_gate,
    granularity: "Granularity" = DEFAULTS.granularity,
    skip_nonfinite: bool = DEFAULTS.skip_nonfinite,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW with the gate of Algorithm 1: :class:`poprisk.PopRiskAdamW` for JAX, a replacement for ``optax.adamw``.

    .. math:: w_t = w_{t-1} - \eta\, q_t \odot \frac{\hat m_t}{\sqrt{\hat v_t} + \epsilon} - \eta \lambda_{wd} w_{t-1}

    A chain of :func:`population_risk_gate`, ``optax.add_decayed_weights`` and ``optax.scale_by_learning_rate``. The
    decay is not gated: weights decay even if the gate is closed. A coordinate whose gradient is not finite skips the
    whole step.

    Pass **the learning rate and schedule that you would give AdamW**: the gate q is relative to its mean over each leaf
    (:class:`poprisk.Gate` has the formula). ``gate="soft", strength=1.0, normalize_gate=False`` is Algorithm 1, which
    multiplies by the gate itself and needs about ten times AdamW's learning rate.

    Args:
        learning_rate: AdamW's η, a number or an optax schedule.
        b1: Decay of the average of the gradient.
        b2: Decay of the average of its square.
        eps: Constant added to Adam's denominator.
        weight_decay: Decoupled weight decay λ_wd; the default is that of :class:`torch.optim.AdamW`, not of optax.
        mask: Which leaves are decayed, as in ``optax.adamw``.
        mu_dtype: Data type of m; this and all options below are as in :func:`population_risk_gate`.
        gate: ``"snr"``, ``"soft"``, ``"hard"``, a :class:`poprisk.Gate`, or None for AdamW.
        alpha: Leave-one-out coefficient, or ``"calibrated"``.
        strength: Weight of the noise: λ_pop, or λ of the SNR gate.
        rho: Decay rate of s.
        gate_eps: Constant added to the gate's denominator.
        centering: ``"paper"`` or ``"corrected"``.
        signal: ``"ema"`` or ``"batch"``.
        warmup_steps: Number of initial steps without gating.
        normalize_gate: Whether the gate is relative to its mean over each leaf, so that the learning rate is AdamW's
            (see :class:`poprisk.Gate`); False is Algorithm 1's gate, which needs a larger one.
        granularity: ``"element"``, ``"row"`` or ``"tensor"``.
        skip_nonfinite: Whether a coordinate skips the step, including its decay, if its gradient is not finite.

    Returns:
        The optimizer. Its ``update`` needs ``params`` for the decay.

    Raises:
        HyperparameterError: an option is out of range.

    Example:
        >>> optimizer = poprisk_adamw(0.1, weight_decay=0.0, gate="soft", strength=1.0, normalize_gate=False)
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
        checked_number("learning_rate", learning_rate, "a finite number ≥ 0, or a schedule", lambda x: x >= 0)
    if not callable(weight_decay):  # optax takes a schedule here too
        checked_number("weight_decay", weight_decay, "a finite number ≥ 0", lambda x: x >= 0)
    adamw = optax.chain(
        population_risk_gate(**{name: given[name] for name in NAMES}),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
    return adamw if gate is None or not skip_nonfinite else _sitting_out(adamw)


def gate_diagnostics(state: Tree, **options: Any) -> GateDiagnostics:
    r"""Gate diagnostics of the last step, computed from the state of an optimizer; may be jitted.

    The state does not contain the hyper-parameters: **pass those of the gate** if they are not the defaults. If a state
    contains several gates, as with ``optax.multi_transform``, the diagnostics are over all of them; if their options
    differ, pass one inner state at a time. With a ``mu_dtype`` below float32, they are computed from a rounded m.

    Args:
        state: The state of :func:`poprisk_adamw`, or of any optimizer with a :func:`population_risk_gate` in it.
        **options: The gate's options, by the names of :func:`population_risk_gate`. With ``signal="batch"``, the
            diagnostics use the averaged signal, since the batch is not available after the step.

    Raises:
        StateDictError: The state does not contain a gate.

    Example:
        >>> options = {"gate": "snr", "centering": "corrected", "normalize_gate": False}
        >>> optimizer = poprisk_adamw(**options)
        >>> w = jnp.zeros(4)
        >>> state, update = optimizer.init(w), jax.jit(optimizer.update)
        >>> for _ in range(2):  # no noise, so that the gate is open wherever there is a gradient
        ...     _, state = update(jnp.array([1.0, 2.0, 3.0, 0.0]), state, w)
        >>> gate_diagnostics(state, **options).mean_gate.item()
        0.75
    """
    o = checked_options(options)
    states = [x for x in jax.tree.leaves(state, is_leaf=_is_ours) if _is_ours(x)]
    if not states:
        raise StateDictError(
            f"gate_diagnostics needs a state that contains a PopulationRiskState, got {type(state).__name__} without "
            "one: pass the state returned by init or update of poprisk_adamw or population_risk_gate"
        )
    total, coordinates = jnp.zeros(4, jnp.result_type(float)), 0
    for x in states:
        sums, size = leaf_sums(x, o)
        total, coordinates = total + sums, coordinates + size
    active, gate, noise, signal = total
    n = max(1, coordinates)
    return GateDiagnostics(active / n, gate / n, noise / jnp.maximum(signal, 0))


def _sitting_out(inner: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """The same transformation with updates of 0, decay included, for coordinates with unusable gradients."""

    def update(updates: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        out, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(where_usable, out, updates, params), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _is_ours(x: Any) -> bool:
    return isinstance(x, PopulationRiskState)
