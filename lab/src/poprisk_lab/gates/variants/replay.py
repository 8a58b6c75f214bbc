r"""Variants that know how often the data have been replayed: open while batches are fresh, stricter with every pass."""

from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk.optim import snr_gate
from poprisk_lab.engine.peers import Knobs, States, _cast, _precise
from poprisk_lab.gates.variants.shared import Direction, moments, passes, smaller, where


def replayed_alpha(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The threshold rises with every pass, from break-even to Algorithm 1's.

    .. math:: \alpha_t = \min(\alpha,\ (1 + E)\, a_t)

    On the first pass a batch is independent of the weights and the theory asks for no more than break-even. After E
    passes each example has acted on the weights E times; what leave-one-out has to take away grows in proportion.
    *Limits:* E = 0 is the calibrated soft gate, E → ∞ the strict gate.
    """
    now = moments(g, state, h, t)
    rising = smaller((1 + passes(h, t)) * now.break_even, _precise(h["alpha"]))
    return now.adam * now.soft(rising, h, t), now.kept


def replayed_alpha_falling(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The paper's two regimes in turn: α = 1 while batches are fresh, then the finite data set's b/n above break-even.

    .. math:: \alpha_t = \alpha \text{ for } E = 0, \qquad \alpha_t = a_t + 1/T \text{ afterwards}

    :math:`T \approx n/b`, and Theorem ``thm:minibatch_covariance`` gives b/(n-b) for a finite data set. *Limits:* one
    pass is the strict gate; T → ∞ after it the calibrated one.
    """
    now, seen = moments(g, state, h, t), passes(h, t)
    later = now.break_even + 1 / _precise(h["gate_warmup"])
    return now.adam * now.soft(where(seen > 0, later, h["alpha"], g), h, t), now.kept


def open_first_pass(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""AdamW while batches are fresh, the strict gate as soon as the first example returns.

    .. math:: q = 1 \text{ for } E = 0, \qquad q = q_{strict} \text{ afterwards}

    A step on fresh examples is an unbiased step on the population risk, whatever its noise: nothing can be memorized
    that is seen once. *Limits:* one pass is AdamW; T = 0 the strict gate.
    """
    now, seen = moments(g, state, h, t), passes(h, t)
    return now.adam * where(seen > 0, now.strict(h, t), 1.0, g), now.kept


def closing_with_replay(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""A gate that closes in proportion to the share of replayed gradients.

    .. math:: q = \frac{1 + E\, q_{strict}}{1 + E}

    E/(1+E) is the share of all gradients so far that were not the first of their examples, the part for which the
    independence behind an ungated step fails. *Limits:* E = 0 is AdamW, E → ∞ the strict gate.
    """
    now, seen = moments(g, state, h, t), passes(h, t)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * _cast(1 / (1 + seen), g)), now.kept


def replayed_strength(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The SNR gate with a strength that counts the passes.

    .. math:: q = \hat m^2 / (\hat m^2 + \lambda E \hat s)

    The noise that can have been learnt from an example grows with its uses; the shrinker weighs signal against it.
    *Limits:* E = 0 is AdamW; E passes give the SNR gate of strength E.
    """
    now = moments(g, state, h, t)
    strength = _cast(_precise(h["strength"]) * passes(h, t), g)
    return now.adam * snr_gate(now.m_hat, now.s_hat, strength), now.kept
