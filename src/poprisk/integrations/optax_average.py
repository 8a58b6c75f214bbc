r"""Averaged parameters in optax: :class:`poprisk.TailAverage` as a gradient transformation."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from poprisk.errors import HyperparameterError, MissingExtraError, StateDictError

try:
    import jax
    import jax.numpy as jnp
    import optax
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("jax", "jaxlib", "optax"):
        raise  # the installed jax or optax is broken: its own message is more helpful
    raise MissingExtraError("optax", "jax", "the optax integration") from None

Tree = Any


class TailAverageState(NamedTuple):
    """Number of steps, and one tree of means for each tail."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  # optax's name for it
    means: tuple[Tree, ...]


def tail_average(tail: float | Sequence[float] = 0.2) -> optax.GradientTransformationExtraArgs:
    r"""Average the parameters over about the last ``tail`` of the steps so far; updates pass through unchanged.

    .. math:: \bar w_t = \bar w_{t-1} + \frac{c}{t + c - 1} (w_t - \bar w_{t-1}), \qquad c = 1/\text{tail},

    polynomial-decay averaging (Shamir and Zhang, 2013), with the same numbers as :class:`poprisk.TailAverage`. Put it
    **last** in a chain and pass ``params`` to ``update``, as for weight decay: the parameters after the step are
    computed from them and from the updates that reach this transformation, as ``optax.apply_updates`` does. Read the
    averages with :func:`averaged_params`, at any step. Parameters below float32 are averaged in float32.

    Args:
        tail: Share of the steps that the mean covers, in (0, 1], or several of them: one average each.

    Raises:
        HyperparameterError: ``tail`` is not in (0, 1], or ``update`` was called without ``params``.

    Example:
        >>> optimizer = optax.chain(optax.sgd(1.0), tail_average(tail=1.0))
        >>> params = jnp.zeros(1)
        >>> state, update = optimizer.init(params), jax.jit(optimizer.update)
        >>> for _ in range(3):  # the parameter goes to -1, -2, -3
        ...     updates, state = update(jnp.ones(1), state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> averaged_params(state, params).item()
        -2.0
    """
    tails = tuple(float(each) for each in (tail if isinstance(tail, Sequence) else (tail,)))
    if not tails or not all(0 < each <= 1 for each in tails):
        raise HyperparameterError(f"tail must be in (0, 1], or several such numbers, got {tail!r}: use 0.1")

    def init(params: Tree) -> TailAverageState:
        return TailAverageState(jnp.zeros((), jnp.int32), tuple(jax.tree.map(_wide, params) for _ in tails))

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, TailAverageState]:
        del extra
        if params is None:
            raise HyperparameterError("tail_average needs the parameters: call update(updates, state, params)")
        count: Any = optax.safe_increment(state.count)
        after = optax.apply_updates(params, updates)
        means = []
        for each, mean in zip(tails, state.means, strict=True):
            c = 1 / each
            weight = c / (count.astype(jnp.result_type(float)) + (c - 1))
            means.append(jax.tree.map(lambda m, w, weight=weight: _moved(m, w, weight), mean, after))
        return updates, TailAverageState(count, tuple(means))

    return optax.GradientTransformationExtraArgs(init, update)


def averaged_params(state: Tree, params: Tree, which: int = 0) -> Tree:
    """The averaged parameters, in the data types of ``params``; may be jitted.

    Args:
        state: The state of an optimizer with one :func:`tail_average` in it.
        params: The current parameters, which give the data types; before the first step they are returned.
        which: Index of the average, where ``tail`` has several.

    Raises:
        StateDictError: The state does not contain exactly one :func:`tail_average`.
    """
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_ours) if _is_ours(x)]
    if len(found) != 1:
        raise StateDictError(
            f"averaged_params needs a state that contains one TailAverageState, got {type(state).__name__} with "
            f"{len(found)}: put tail_average() last in the optimizer's chain"
        )
    begun = found[0].count > 0
    return jax.tree.map(lambda m, p: jnp.where(begun, m.astype(p.dtype), p), found[0].means[which], params)


def _wide(x: Any) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _moved(mean: jax.Array, now: Any, weight: jax.Array) -> jax.Array:
    if not jnp.issubdtype(mean.dtype, jnp.inexact):
        return jnp.asarray(now)
    real = jnp.finfo(mean.dtype).dtype
    return mean + weight.astype(real) * (jnp.asarray(now).astype(mean.dtype) - mean)


def _is_ours(x: Any) -> bool:
    return isinstance(x, TailAverageState)
