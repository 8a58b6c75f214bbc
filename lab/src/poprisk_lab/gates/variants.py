r"""Variants of the gate: attempts at one that keeps noise out like the strict gate and is as quick as AdamW without it.

Every rule has the form of :mod:`poprisk_lab.engine.peers`: ``direction(g, state, h, t) -> (u, new state)``, with hyper-
parameters that may be columns, one row a training. The *strict gate* is Algorithm 1's, :math:`q = \delta/(\delta +
\lambda \hat s)` with :math:`\delta = (\hat m^2 - \alpha \hat s)_+` and α = λ = 1; *AdamW* is q = 1. Each docstring says
what the rule is, why it was expected to work and in which limit it is one of the two. What came of them is in
``docs/gates.md``.

Symbols: m, v, s as in Algorithm 1, hats debias. :math:`\kappa_t` is the variance of m̂ under white noise of unit
variance, :math:`a_t` the threshold at which pure noise breaks even, :math:`\hat m^2 = a_t \hat s` on average. T is the
number of steps in a pass over the data, given as the knob ``gate_warmup``, and :math:`E = \lfloor (t-1)/T \rfloor` how
often the examples of this step have been used before. A state that is one number a training is kept spread over its
row, because the callers keep arrays of one shape.

Rules that compare two halves of a batch take a gradient of twice the width: the mean gradient, and beside it the second
half's share in it, :math:`g_B/2`. They leave the second part where it is.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from poprisk._core.types import Scalar
from poprisk.optim import snr_gate, soft_gate
from poprisk.optim.rules._threshold import deviation_noise, mean_noise
from poprisk_lab.engine.peers import Knobs, Peer, States, _averaged, _cast, _debias, _precise, _ratio

Direction = tuple[Float[Tensor, "*members d"], dict[str, Tensor]]

BLOCK = 64
"""Consecutive weights that are judged together; in a matrix [out, in] they mostly belong to one unit."""
SLOW = 0.99
"""Decay of the slow average: ten times the memory of β1 = 0.9."""
STEPS_OF_EVIDENCE = 0.99
"""Decay of the averages by which whole trainings or blocks are judged."""
LONG = 0.997
"""Decay of the average over three times as many steps, which shows whether the other one falls."""
CALM = 0.97
"""What falls below this share of its longer average is taken to fall."""
SURE = 3.0
"""Standard errors of agreement at which a training or block is fully open."""
SAFE = 3.0
"""Standard errors by which a block's pooled signal must exceed noise."""
PASSES_OF_WORTH = 15.0
"""Passes after which a repeated example is worth 1/e of a fresh one."""


@dataclass(frozen=True)
class _Moments:
    """Algorithm 1's averages after this gradient, and what follows from them."""

    kept: dict[str, Tensor]
    m_hat: Tensor
    s_hat: Tensor
    adam: Tensor
    beta1: Scalar
    step: Scalar

    @property
    def break_even(self) -> Scalar:
        """a_t, computed where it is needed."""
        return break_even(self.beta1, self.step)

    def strict(self, h: Knobs, t: Scalar) -> Tensor:
        """The gate of Algorithm 1."""
        return self.soft(h["alpha"], h, t)

    def soft(self, alpha: Scalar, h: Knobs, t: Scalar) -> Tensor:
        """The soft gate at another threshold, closed at the first step, where m̂² = ŝ says nothing."""
        q = soft_gate(self.m_hat, self.s_hat, _cast(alpha, self.m_hat), _cast(h["strength"], self.m_hat))
        return q * _after_first(t, q)


def _moments(g: Tensor, state: States, h: Knobs, t: Scalar, squared: Tensor | None = None) -> _Moments:
    """m, v, s with this gradient; s from the deviation from the last average unless its square is given."""
    deviation = (g - state["m"]).square() if squared is None else squared
    m, v = _averaged(state["m"], g, h["beta1"]), _averaged(state["v"], g * g, h["beta2"])
    s = _averaged(state["s"], deviation, h["rho"])
    m_hat, s_hat = m * _cast(_debias(h["beta1"], t), m), s * _cast(_debias(h["rho"], t), s)
    return _Moments({"m": m, "v": v, "s": s}, m_hat, s_hat, _ratio(m, v, h, t), h["beta1"], t)


def break_even(beta1: Scalar, t: Scalar) -> Scalar:
    r"""The threshold a_t at which pure noise breaks even, up to the memory of s.

    It is :math:`\kappa_t` over the variance of the deviation that s averages, and tends to :math:`(1-\beta_1)/2`.

    >>> break_even(0.9, 1), round(break_even(0.9, 1000), 6)
    (1.0, 0.05)
    """
    return mean_noise(beta1, t) / deviation_noise(beta1, t)  # type: ignore[arg-type]


def passes(h: Knobs, t: Scalar) -> Scalar:
    """E: how often the examples of step t have been used before, with ``gate_warmup`` steps in a pass.

    >>> [passes({"gate_warmup": 10.0}, t) for t in (1, 10, 11, 25)]
    [0.0, 0.0, 1.0, 2.0]
    """
    return (_precise(t) - 1) // _precise(h["gate_warmup"])


# --- How often data have been replayed ---------------------------------------------------------------------------


def replayed_alpha(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The threshold rises with every pass, from break-even to Algorithm 1's.

    .. math:: \alpha_t = \min(\alpha,\ (1 + E)\, a_t)

    On the first pass a batch is independent of the weights and the theory asks for no more than break-even. After E
    passes each example has acted on the weights E times; what leave-one-out has to take away grows in proportion.
    *Limits:* E = 0 is the calibrated soft gate, E → ∞ the strict gate.
    """
    now = _moments(g, state, h, t)
    rising = _smaller((1 + passes(h, t)) * now.break_even, _precise(h["alpha"]))
    return now.adam * now.soft(rising, h, t), now.kept


def replayed_alpha_falling(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The paper's two regimes in turn: α = 1 while batches are fresh, then the finite data set's b/n above break-even.

    .. math:: \alpha_t = \alpha \text{ for } E = 0, \qquad \alpha_t = a_t + 1/T \text{ afterwards}

    :math:`T \approx n/b`, and Theorem ``thm:minibatch_covariance`` gives b/(n-b) for a finite data set. *Limits:* one
    pass is the strict gate; T → ∞ after it the calibrated one.
    """
    now, seen = _moments(g, state, h, t), passes(h, t)
    later = now.break_even + 1 / _precise(h["gate_warmup"])
    return now.adam * now.soft(_where(seen > 0, later, h["alpha"], g), h, t), now.kept


def open_first_pass(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""AdamW while batches are fresh, the strict gate as soon as the first example returns.

    .. math:: q = 1 \text{ for } E = 0, \qquad q = q_{strict} \text{ afterwards}

    A step on fresh examples is an unbiased step on the population risk, whatever its noise: nothing can be memorized
    that is seen once. *Limits:* one pass is AdamW; T = 0 the strict gate.
    """
    now, seen = _moments(g, state, h, t), passes(h, t)
    return now.adam * _where(seen > 0, now.strict(h, t), 1.0, g), now.kept


def closing_with_replay(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""A gate that closes in proportion to the share of replayed gradients.

    .. math:: q = \frac{1 + E\, q_{strict}}{1 + E}

    E/(1+E) is the share of all gradients so far that were not the first of their examples, the part for which the
    independence behind an ungated step fails. *Limits:* E = 0 is AdamW, E → ∞ the strict gate.
    """
    now, seen = _moments(g, state, h, t), passes(h, t)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * _cast(1 / (1 + seen), g)), now.kept


def replayed_strength(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The SNR gate with a strength that counts the passes.

    .. math:: q = \hat m^2 / (\hat m^2 + \lambda E \hat s)

    The noise that can have been learnt from an example grows with its uses; the shrinker weighs signal against it.
    *Limits:* E = 0 is AdamW; E passes give the SNR gate of strength E.
    """
    now = _moments(g, state, h, t)
    strength = _cast(_precise(h["strength"]) * passes(h, t), g)
    return now.adam * snr_gate(now.m_hat, now.s_hat, strength), now.kept


# --- Another variance ------------------------------------------------------------------------------------------------


def successive_differences(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Noise from the differences of successive gradients, which a drift of the mean does not enter.

    .. math:: s \leftarrow \rho s + (1-\rho) (g_t - g_{t-1})^2 / 2

    Algorithm 1's deviation from a lagging average takes the movement of the gradient itself for noise and closes where
    learning is fastest. A difference of neighbours has the noise's variance, and of a mean that drifts by d only d²/2.
    *Limits:* under white noise s has the mean of Algorithm 1's, less its share :math:`\kappa`; for a gradient that is
    constant from step 2 on it vanishes with ρ^t and the rule is AdamW.
    """
    fresh = (g - state["last"]).square() / 2 * _after_first(t, g)
    now = _moments(g, state, h, t, fresh)
    return now.adam * now.strict(h, t), {**now.kept, "last": g}


def halves_variance(g: Float[Tensor, "*members twice_d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Noise from the two halves of each batch: exact in the mean, and blind to time.

    .. math:: s \leftarrow \rho s + (1-\rho) \big((g_A - g_B)/2\big)^2

    For halves of independent examples the square has mean :math:`\Sigma_{kk}/b`, the variance of the batch mean,
    whatever the gradient did since the last step: neither drift nor learning is mistaken for noise. *Limits:* equal
    halves give AdamW from step 2; white noise the strict gate.
    """
    mean, a, b = _halves(g)
    now = _moments(mean, _first_part(state), h, t, ((a - b) / 2).square())
    return _both_parts(now.adam * now.strict(h, t), now.kept)


# --- More evidence for the same test ---------------------------------------------------------------------------------


def slow_evidence(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The strict test at its own level, decided by an average with ten times the memory; Adam's fast one is stepped.

    .. math::
        q = \frac{\delta}{\delta + \lambda_t \hat s}, \quad \delta = (\hat\mu^2 - \alpha_t \hat s)_+, \quad
        \mu \leftarrow 0.99 \mu + 0.01 g, \quad (\alpha_t, \lambda_t) = (\alpha, \lambda)\, \kappa^\mu_t / \kappa_t

    α = 1 with β1 = 0.9 rejects noise at 4.5 standard errors. The same level on an average over 200 steps lets signals
    of a third of the strength pass. *Limits:* with the slow decay equal to β1 it is the strict gate.
    """
    now = _moments(g, state, h, t)
    slow = _averaged(state["slow"], g, SLOW)
    level = _cast(mean_noise(SLOW, t) / mean_noise(h["beta1"], t), g)  # type: ignore[arg-type]
    mean = slow * _cast(_debias(SLOW, t), g)
    q = soft_gate(mean, now.s_hat, _cast(h["alpha"], g) * level, _cast(h["strength"], g) * level)
    return now.adam * q * _after_first(t, q), {**now.kept, "slow": slow}


def sign_agreement(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""AdamW where the fast and a ten times slower average point the same way, the strict gate elsewhere.

    .. math:: q = 1 \text{ where } m \mu > 0, \qquad q = q_{strict} \text{ elsewhere}

    Signal has one sign for long, noise changes its own with every memory of the average. *Limits:* at t = 1, and for a
    gradient of one sign, it is AdamW; the averages of white noise agree in a little more than half of the coordinates.
    """
    now = _moments(g, state, h, t)
    slow = _averaged(state["slow"], g, SLOW)
    agree = now.m_hat * slow > 0
    return now.adam * torch.where(agree, 1.0, now.strict(h, t)), {**now.kept, "slow": slow}


def pass_agreement(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The mean gradient of the last whole pass must agree with the average now.

    .. math:: q = \frac{(\bar g_{E-1} \hat m)_+}{(\bar g_{E-1} \hat m)_+ + a_t \lambda \hat s}

    Do the same examples pull the same way when they come back? Over a pass the sampling noise cancels, so that the
    product is signal times signal. *Limits:* on the first pass it is AdamW, as it is for a constant gradient without
    noise.
    """
    now, seen, length = _moments(g, state, h, t), passes(h, t), _precise(h["gate_warmup"])
    ends = (_precise(t) % length) == 0
    total = state["total"] + g
    last = _where(ends, total / _cast(length, g), state["pass"], g)
    product = (state["pass"] * now.m_hat).clamp(min=0)
    noise = _cast(now.break_even * _precise(h["strength"]), g) * now.s_hat
    q = product / (product + noise).clamp(min=torch.finfo(g.dtype).tiny)
    kept = {**now.kept, "total": _where(ends, torch.zeros_like(total), total, g), "pass": last}
    return now.adam * _where(seen > 0, q, 1.0, g), kept


# --- Judged together, shaped alone -----------------------------------------------------------------------------------


def pooled_blocks(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Blocks of 64 weights open by their pooled significance; within an open block the elements' ratio shapes.

    .. math::
        Q = \Big(1 - c\, a_t \frac{\sum \hat s}{\sum \hat m^2}\Big)_+,\quad c = 1 + 3\sqrt{2/64}, \qquad
        q_k = Q\, \frac{\hat m_k^2}{\hat m_k^2 + a_t \hat s_k}

    64 coordinates of equal noise tell signal from noise at a 64-fold smaller ratio than one: James–Stein's shrinkage of
    the block, with three standard errors of safety, in place of one coordinate's test at 4.5. *Limits:* Q → 1 and
    q → 1 (AdamW) as the signal grows, Q = 0 on a block of noise in all but 3 of 1000 cases.
    """
    now = _moments(g, state, h, t)
    return now.adam * _pooled_gate(now, g, t), now.kept


def _pooled_gate(now: _Moments, g: Tensor, t: Scalar) -> Tensor:
    safety = 1 + SAFE * (2 / BLOCK) ** 0.5
    signal, noise = _block_means(now.m_hat.square()), _block_means(now.s_hat)
    opened = (1 - _cast(safety * now.break_even, g) * noise / signal.clamp(min=torch.finfo(g.dtype).tiny)).clamp(min=0)
    return opened * snr_gate(now.m_hat, now.s_hat, _cast(now.break_even, g)) * _after_first(t, g)


def pooled_whole(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The whole training opens by the share of its step that leave-one-out leaves, elements pass the strict gate.

    .. math::
        Q = \Big(1 - (a_t + 1/T) \frac{\sum p_k \hat s_k}{\sum p_k \hat m_k^2}\Big)_+, \quad p = 1/\sqrt{\hat v},
        \qquad q = Q + (1-Q)\, q_{strict}

    1/T is b/n: where examples pull in directions of their own and only memorize, the mean gradient has
    :math:`\|\bar g\|^2 \approx \mathrm{tr}\,\Sigma/n`, which is that term, and Q = 0; where they share a direction Q is
    near 1. *Limits:* no noise is AdamW; pure noise the strict gate.
    """
    now = _moments(g, state, h, t)
    share = _loo_share(now, _cast(now.break_even + 1 / _precise(h["gate_warmup"]), g))
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * share * _after_first(t, q)), now.kept


def _loo_share(now: _Moments, threshold: Scalar) -> Tensor:
    """What is left of the preconditioned signal after the noise in it is taken away, as a share of it; at least 0."""
    weight = now.adam.abs() / now.m_hat.abs().clamp(min=torch.finfo(now.m_hat.dtype).tiny)
    signal = (weight * now.m_hat.square()).sum(-1, keepdim=True)
    noise = (weight * now.s_hat).sum(-1, keepdim=True)
    return (1 - threshold * noise / signal.clamp(min=torch.finfo(signal.dtype).tiny)).clamp(min=0)


def lagged_agreement(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Open while each new batch agrees with the step decided before it, strict once it does not.

    .. math::
        x_t = \sum_k g_{t,k}\, u_{t-1,k}, \quad C = \langle x \rangle, \quad
        z = C / \sqrt{\kappa_{.99} \langle (x - C)^2 \rangle}, \quad a = \min(1, (z/3)_+), \quad
        q = a + (1-a)\, q_{strict}

    x is, to first order, what the last AdamW direction u gains on examples it has not used in this pass: the population
    rate with a lagged gate, one well-measured number a training. While it is positive an ungated step pays; when
    training gains on its own examples only, it vanishes. *Limits:* a constant gradient is AdamW from step 2; under pure
    noise a < 1/3 in 84% of steps and the rule is near the strict gate.
    """
    now = _moments(g, state, h, t)
    agreed, kept = _agreement((g * state["u"]).sum(-1, keepdim=True), state, t, first=2)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * agreed), {**now.kept, **kept, "u": now.adam}


def lagged_agreement_blocks(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`lagged_agreement`, each block of 64 weights for itself.

    .. math:: x_t = \sum_{k \in \text{block}} g_{t,k}\, u_{t-1,k}

    What memorizes and what learns may be different units. *Limits:* as for the whole training.
    """
    now = _moments(g, state, h, t)
    agreed, kept = _agreement(_block_means(g * state["u"]), state, t, first=2)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * agreed), {**now.kept, **kept, "u": now.adam}


def lagged_agreement_elements(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`lagged_agreement`, each weight for itself: :math:`x_{t,k} = g_{t,k}\, u_{t-1,k}`.

    Algorithm 1 asks whether a coordinate's mean is large; this asks whether its steps would have paid on the batches
    after them, which drift does not disturb and two hundred steps can decide. *Limits:* as for the whole training.
    """
    now = _moments(g, state, h, t)
    agreed, kept = _agreement(g * state["u"], state, t, first=2)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * agreed), {**now.kept, **kept, "u": now.adam}


def agreement_over_blocks(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""AdamW while the next batch agrees, then :func:`pooled_blocks` instead of the strict gate.

    .. math:: q = a + (1-a)\, q_{blocks}

    Once the whole step no longer pays, parts of it may: blocks find them with far less signal than elements do.
    *Limits:* agreement is AdamW; its absence the pooled blocks.
    """
    now = _moments(g, state, h, t)
    agreed, kept = _agreement((g * state["u"]).sum(-1, keepdim=True), state, t, first=2)
    q = _pooled_gate(now, g, t)
    return now.adam * (q + (1 - q) * agreed), {**now.kept, **kept, "u": now.adam}


def agreement_after_first_pass(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""AdamW while batches are fresh; then, block by block, as far as the next batch agrees, strict where it does not.

    .. math:: q = b + (1-b)\, q_{strict}, \qquad b = f + (1-f)\, a, \qquad f = 1/(1+E)

    with the agreement a of :func:`lagged_agreement_blocks`. f is the share of gradients that were the first of their
    examples, for which an ungated step needs no proof (:func:`closing_with_replay`); the rest must be earned. A small
    trial had the two parts lose different clean tasks. *Limits:* E = 0 is AdamW, E → ∞ the agreement by blocks.
    """
    now = _moments(g, state, h, t)
    agreed, kept = _agreement(_block_means(g * state["u"]), state, t, first=2)
    return now.adam * _opened(now.strict(h, t), agreed, h, t), {**now.kept, **kept, "u": now.adam}


def fading_agreement(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`agreement_after_first_pass`, but agreement counts for less with every pass.

    .. math:: b = f + (1-f)\, a\, e^{-E/15}

    The next batch is no witness once its examples have shaped the weights. Muennighoff et al. (2023, "Scaling
    data-constrained language models") measure the worth of a repeated token as :math:`e^{-E/R}` with R near 15.
    *Limits:* E = 0 is AdamW, E → ∞ the strict gate.
    """
    now = _moments(g, state, h, t)
    agreed, kept = _agreement(_block_means(g * state["u"]), state, t, first=2)
    worth = torch.exp(-_like(passes(h, t), g) / PASSES_OF_WORTH)
    return now.adam * _opened(now.strict(h, t), agreed * worth, h, t), {**now.kept, **kept, "u": now.adam}


def latched_agreement(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`agreement_after_first_pass`, but a block that has once been disagreed with stays strict for good.

    .. math:: a = 1 \text{ until the first step after the first pass at which } C \le 0, \qquad a = 0 \text{ then on}

    Behind a closed gate the weights rest, new batches then agree again with what was not learnt, the gate opens, and
    noise comes in little by little; a latch leaves it out. *Limits:* E = 0 is AdamW; a block of pure noise is strict
    after a few steps.
    """
    now = _moments(g, state, h, t)
    agreed, kept = _agreement(_block_means(g * state["u"]), state, t, first=2)
    refused = ((agreed <= 0) & (_like(passes(h, t), g) > 0)).to(g.dtype)
    shut = torch.maximum(state["shut"], refused)
    return now.adam * _opened(now.strict(h, t), 1 - shut, h, t), {**now.kept, **kept, "u": now.adam, "shut": shut}


def _opened(q: Tensor, agreed: Tensor, h: Knobs, t: Scalar) -> Tensor:
    """The strict gate, opened by the share of fresh gradients and by agreement."""
    fresh = 1 / (1 + _like(passes(h, t), q))
    return q + (1 - q) * (fresh + (1 - fresh) * agreed)


def _like(x: Scalar, like: Tensor) -> Tensor:
    """A scalar as a tensor beside the large array, made there: nothing is copied to the device."""
    return x.to(like.dtype) if isinstance(x, Tensor) else torch.full((), x, dtype=like.dtype, device=like.device)


def tolerant_agreement(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`lagged_agreement`, but loss on the next batch is borne up to a tenth of the gain on the own one.

    .. math:: R = \frac{\langle g_t^\top u_{t-1} \rangle}{\langle g_t^\top u_t \rangle}, \qquad
        a = \min\big(1, (1 + R/(1-\beta_1))_+\big), \qquad q = a + (1-a)\, q_{strict}

    Under clean labels a network goes on improving for a while after the leave-one-out rate of its steps has turned
    negative, under wrong ones it gets worse: a tolerance of 1-β1, the weight of a batch in its own step, lies between
    what a small trial showed for the two. *Limits:* a gradient without noise is AdamW from the first step; no tolerance
    is a test of the sign of C.
    """
    now = _moments(g, state, h, t)
    agreed, kept = _tolerated(now, g, state, h)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * agreed), {**now.kept, **kept}


def agreement_or_calm(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`tolerant_agreement`, and open as well while the gain on the own batch falls.

    .. math:: a = 1 \text{ where } \langle g_t^\top u_t \rangle_{.99} < 0.97\, \langle g_t^\top u_t \rangle_{.997}

    Right labels that are memorized come to rest: gradients fall while it goes on. Wrong ones contradict their
    neighbours, and the more of them are memorized, the larger gradients grow. In a small trial the two sides of a
    classification, whose leave-one-out rates turn negative alike, differed in just this. *Limits:* a gain that grows is
    the tolerant agreement; one that falls by 1% a step is AdamW.
    """
    now = _moments(g, state, h, t)
    agreed, kept = _tolerated(now, g, state, h)
    long = _averaged(state["long"][..., :1], (g * now.adam).sum(-1, keepdim=True), LONG)
    short = kept["own"][..., :1] * _cast(_debias(STEPS_OF_EVIDENCE, t), g)
    falls = short < CALM * long * _cast(_debias(LONG, t), g)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * torch.where(falls, 1.0, agreed)), {**now.kept, **kept, "long": long.expand_as(g)}


def _tolerated(now: _Moments, g: Tensor, state: States, h: Knobs) -> tuple[Tensor, dict[str, Tensor]]:
    """How open a loss on the next batch leaves the whole training, and the averages it is judged by."""
    other = _averaged(state["gain"][..., :1], (g * state["u"]).sum(-1, keepdim=True), STEPS_OF_EVIDENCE)
    own = _averaged(state["own"][..., :1], (g * now.adam).sum(-1, keepdim=True), STEPS_OF_EVIDENCE)
    share = other / own.clamp(min=torch.finfo(g.dtype).tiny)
    agreed = (1 + share / _cast(1 - _precise(h["beta1"]), g)).clamp(0, 1)
    return agreed, {"gain": other.expand_as(g), "own": own.expand_as(g), "u": now.adam}


def halves_agreement(g: Float[Tensor, "*members twice_d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Open while the two halves of a batch agree, over the whole training; strict once they do not.

    .. math:: x_t = \sum_k p_k\, g_{A,k}\, g_{B,k}, \qquad p = 1/(\sqrt{\hat v} + \epsilon)

    and C, z, a, q as in :func:`lagged_agreement`. The mean of x over batches drawn without replacement is the mean of
    :math:`g_i^\top P g_j` over pairs :math:`i \ne j`: the leave-one-out rate :math:`\Omega_S(P)` of an AdamW step on
    the whole data set, finite-sample correction included, with no threshold to set. *Limits:* equal halves are AdamW
    from step 2; halves of pure noise near the strict gate.
    """
    mean, a, b = _halves(g)
    first = _first_part(state)
    now = _moments(mean, first, h, t)
    gain = (_preconditioner(now.kept["v"], h, t) * a * b).sum(-1, keepdim=True)
    agreed, kept = _agreement(gain, first, t)
    q = now.strict(h, t)
    return _both_parts(now.adam * (q + (1 - q) * agreed), {**now.kept, **kept})


def halves_agreement_blocks(g: Float[Tensor, "*members twice_d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`halves_agreement`, each block of 64 weights for itself.

    .. math:: x_t = \sum_{k \in \text{block}} p_k\, g_{A,k}\, g_{B,k}

    What memorizes and what learns may be different units. *Limits:* as for the whole training.
    """
    mean, a, b = _halves(g)
    first = _first_part(state)
    now = _moments(mean, first, h, t)
    gain = _block_means(_preconditioner(now.kept["v"], h, t) * a * b)
    agreed, kept = _agreement(gain, first, t)
    q = now.strict(h, t)
    return _both_parts(now.adam * (q + (1 - q) * agreed), {**now.kept, **kept})


def held_apart(g: Float[Tensor, "*members twice_d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Each half of the data decides for the other: the gate of half A on the gradient of half B, and the reverse.

    .. math::
        u = \frac{q(\hat m_A, \hat s_A)\, \hat m_B + q(\hat m_B, \hat s_B)\, \hat m_A}{2 (\sqrt{\hat v} + \epsilon)}

    with the soft gate at break-even. A gate that is scored on the gradient it was chosen by is optimistic; chosen on
    other examples it needs no margin for that, and α = 1 can come down to break-even. *Limits:* equal halves without
    noise are the calibrated soft gate of their mean.
    """
    mean, a, b = _halves(g)
    first = _first_part(state)
    v = _averaged(first["v"], mean * mean, h["beta2"])
    kept, hats = {"v": v}, {}
    for name, half in (("a", a), ("b", b)):
        s = _averaged(first[f"s_{name}"], (half - first[f"m_{name}"]).square(), h["rho"])
        m = _averaged(first[f"m_{name}"], half, h["beta1"])
        kept |= {f"m_{name}": m, f"s_{name}": s}
        m_hat, s_hat = m * _cast(_debias(h["beta1"], t), m), s * _cast(_debias(h["rho"], t), s)
        q = soft_gate(m_hat, s_hat, _cast(break_even(h["beta1"], t), m), _cast(h["strength"], m))
        hats[name] = (m_hat, q * _after_first(t, q))
    (m_a, q_a), (m_b, q_b) = hats["a"], hats["b"]
    return _both_parts((q_a * m_b + q_b * m_a) / 2 * _preconditioner(v, h, t), kept)


# --- What is done with the gate --------------------------------------------------------------------------------------


def hysteresis(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""A coordinate opens at α = 1 and stays open until its signal is under break-even.

    .. math:: q = 1 \text{ from } \hat m^2 > \alpha \hat s \text{ until } \hat m^2 < a_t \hat s

    Strict proof is asked once; a signal that has been proven need not be proven at every step. *Limits:* a threshold of
    closing equal to that of opening is the hard gate; zero makes it AdamW after the first opening.
    """
    now = _moments(g, state, h, t)
    squared = now.m_hat.square()
    opens = squared > _cast(h["alpha"], g) * now.s_hat
    closes = squared < _cast(now.break_even, g) * now.s_hat
    q = torch.where(opens, 1.0, torch.where(closes, 0.0, state["open"])) * _after_first(t, g)
    return now.adam * q, {**now.kept, "open": q}


def gated_momentum(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The gate decides what enters the momentum, not what leaves it.

    .. math::
        \tilde m \leftarrow \beta_1 \tilde m + (1-\beta_1)\, q_{strict}\, g, \qquad u = \hat{\tilde m}/\sqrt{\hat v}

    A signal once let in acts on through the momentum's memory, also in steps in which the gate is closed again.
    *Limits:* q = 1 throughout is AdamW; for a gate that does not change in time it is the gated step.
    """
    now = _moments(g, state, h, t)
    entered = _averaged(state["entered"], now.strict(h, t) * g, h["beta1"])
    u = entered * _cast(_debias(h["beta1"], t), g) * _preconditioner(now.kept["v"], h, t)
    return u, {**now.kept, "entered": entered}


def kept_norm(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The gate chooses the direction, AdamW the length of the step.

    .. math:: u = q_{strict} \odot u_{Adam} \cdot \|u_{Adam}\| / \|q_{strict} \odot u_{Adam}\|

    The slowness is a matter of length: what is left after gating is 1/1000 of AdamW's step. *Limits:* a gate that is
    the same for all coordinates is AdamW, however closed; a gate closed everywhere leaves the weights.
    """
    now = _moments(g, state, h, t)
    gated = now.adam * now.strict(h, t)
    scale = now.adam.norm(dim=-1, keepdim=True) / gated.norm(dim=-1, keepdim=True).clamp(
        min=torch.finfo(g.dtype).tiny ** 0.5
    )
    return gated * scale, now.kept


def root_gate(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""A power of the strong SNR gate: as strong against noise in order, gentler in size.

    .. math:: q = \big(\hat m^2/(\hat m^2 + 30 \lambda \hat s)\big)^{1/4}

    The power keeps the order of the coordinates and gives back the length that a strong gate takes from weak signals:
    at :math:`\hat m^2 = \hat s/10`, q = 0.24 where the gate itself has 0.003. *Limits:* the power 0 is AdamW, the
    power 1 the SNR gate of strength 30, the best of the known ones on noisy digits.
    """
    now = _moments(g, state, h, t)
    return now.adam * snr_gate(now.m_hat, now.s_hat, 30 * _cast(h["strength"], g)).sqrt().sqrt(), now.kept


def shrunk_blocks(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Empirical Bayes: the signal's variance is estimated in blocks of 64, each element is shrunk by its own noise.

    .. math::
        \tau^2 = \Big(\frac{1}{64}\sum \hat m^2 - a_t \hat s\Big)_+, \qquad
        q_k = \frac{\tau^2}{\tau^2 + \lambda a_t \hat s_k}

    If a block's signals are drawn with variance τ², q is the factor of least expected squared error (Efron and Morris).
    *Limits:* no noise is AdamW; a block without signal is closed; blocks of one element are the soft gate at
    break-even with :math:`\lambda a_t` for λ.
    """
    now = _moments(g, state, h, t)
    noise = _cast(now.break_even, g) * now.s_hat
    spread = _block_means(now.m_hat.square() - noise).clamp(min=0)
    q = spread / (spread + _cast(h["strength"], g) * noise).clamp(min=torch.finfo(g.dtype).tiny)
    return now.adam * q * _after_first(t, q), now.kept


# --- Parts ------------------------------------------------------------------------------------------------------------


def _agreement(gain: Tensor, state: States, t: Scalar, first: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    r"""How surely the mean of ``gain`` is positive, from 0 to 1, and its averages; samples count from step ``first``.

    The variance of an exponential average of white samples is :math:`(1-\rho)/(1+\rho)` of theirs; with fewer samples
    it is :math:`\kappa_t`, and the first sample alone, of which no spread is known, counts by its sign.
    """
    rho = STEPS_OF_EVIDENCE
    live = _at_least(_precise(t) - (first - 1), 1.0)
    mean, square = (_narrow(state[name], gain) for name in ("gain", "gain_square"))
    counts = _after_first(t, gain) if first > 1 else 1.0
    mean, square = _averaged(mean, gain, rho), _averaged(square, gain * gain, rho)
    mean, square = mean * counts, square * counts
    debias = _cast(_debias(rho, live), gain)
    centre = mean * debias
    spread = (square * debias - centre * centre).clamp(min=0)
    error = (_cast(mean_noise(rho, live), gain) * spread).sqrt().clamp(min=torch.finfo(gain.dtype).tiny ** 0.5)
    agreed = (centre / error / SURE).clamp(0, 1)
    return _as_wide(agreed, state["gain"]), {
        "gain": _as_wide(mean, state["gain"]),
        "gain_square": _as_wide(square, state["gain"]),
    }


def _narrow(kept: Tensor, like: Tensor) -> Tensor:
    """What was spread over the row: one number a training, or the block's at each of its weights."""
    return kept if kept.shape == like.shape else kept[..., :1]


def _as_wide(x: Tensor, row: Tensor) -> Tensor:
    return x.expand_as(row)


def _block_means(x: Float[Tensor, "*members d"]) -> Float[Tensor, "*members d"]:
    """The mean of each stretch of 64 (the last may be shorter), at each of its places.

    >>> _block_means(torch.arange(66.0))[[0, 63, 64, 65]]
    tensor([31.5000, 31.5000, 64.5000, 64.5000])
    """
    flat = x.reshape(-1, x.shape[-1]).unsqueeze(1)
    means = F.avg_pool1d(flat, BLOCK, ceil_mode=True)
    spread = means.squeeze(1).unsqueeze(-1).expand(-1, -1, BLOCK).flatten(1)
    return spread[:, : x.shape[-1]].reshape(x.shape)


def _halves(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean gradient, half A's and half B's, of a row that holds the mean and g_B/2."""
    mean, part = g.chunk(2, dim=-1)
    return mean, 2 * (mean - part), 2 * part


def _first_part(state: States) -> dict[str, Tensor]:
    return {name: value.chunk(2, dim=-1)[0] for name, value in state.items()}


def _both_parts(u: Tensor, kept: dict[str, Tensor]) -> Direction:
    """The first part's values, zeros beside them."""
    return _widened(u), {name: _widened(value) for name, value in kept.items()}


def _widened(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x)], dim=-1)


def _preconditioner(v: Tensor, h: Knobs, t: Scalar) -> Tensor:
    """1 / (√v̂ + ϵ)."""
    return 1 / (v.sqrt() * _cast(_debias(h["beta2"], t) ** 0.5, v) + _cast(h["eps"], v))


def _after_first(t: Scalar, like: Tensor) -> Scalar:
    """1 from the second step on."""
    return (t > 1).to(like.dtype) if isinstance(t, Tensor) else float(t > 1)


def _where(condition: Scalar, yes: Tensor | Scalar, no: Tensor | Scalar, like: Tensor) -> Tensor:
    def tensor(x: Tensor | Scalar) -> Tensor:
        return x.to(like) if isinstance(x, Tensor) else torch.full((), float(x), dtype=like.dtype, device=like.device)

    return torch.where(torch.as_tensor(condition, device=like.device), tensor(yes), tensor(no))


def _smaller(a: Scalar, b: Scalar) -> Scalar:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        return torch.minimum(a, b.to(a.device))
    return min(a, b)


def _at_least(x: Scalar, low: float) -> Scalar:
    return x.clamp(min=low) if isinstance(x, Tensor) else max(x, low)


_GATE = ("m", "v", "s")
_KNOBS = ("beta1", "beta2", "eps", "rho", "alpha", "strength")
_PASS = (*_KNOBS, "gate_warmup")
_GAIN = ("gain", "gain_square")

VARIANTS: dict[str, Peer] = {
    "replayed_alpha": Peer(_GATE, replayed_alpha, _PASS),
    "replayed_alpha_falling": Peer(_GATE, replayed_alpha_falling, _PASS),
    "open_first_pass": Peer(_GATE, open_first_pass, _PASS),
    "closing_with_replay": Peer(_GATE, closing_with_replay, _PASS),
    "replayed_strength": Peer(_GATE, replayed_strength, _PASS),
    "successive_differences": Peer((*_GATE, "last"), successive_differences, _KNOBS),
    "halves_variance": Peer(_GATE, halves_variance, _KNOBS),
    "slow_evidence": Peer((*_GATE, "slow"), slow_evidence, _KNOBS),
    "sign_agreement": Peer((*_GATE, "slow"), sign_agreement, _KNOBS),
    "pass_agreement": Peer((*_GATE, "total", "pass"), pass_agreement, _PASS),
    "pooled_blocks": Peer(_GATE, pooled_blocks, _KNOBS),
    "pooled_whole": Peer(_GATE, pooled_whole, _PASS),
    "shrunk_blocks": Peer(_GATE, shrunk_blocks, _KNOBS),
    "lagged_agreement": Peer((*_GATE, *_GAIN, "u"), lagged_agreement, _KNOBS),
    "lagged_agreement_blocks": Peer((*_GATE, *_GAIN, "u"), lagged_agreement_blocks, _KNOBS),
    "lagged_agreement_elements": Peer((*_GATE, *_GAIN, "u"), lagged_agreement_elements, _KNOBS),
    "agreement_over_blocks": Peer((*_GATE, *_GAIN, "u"), agreement_over_blocks, _KNOBS),
    "agreement_after_first_pass": Peer((*_GATE, *_GAIN, "u"), agreement_after_first_pass, _PASS),
    "fading_agreement": Peer((*_GATE, *_GAIN, "u"), fading_agreement, _PASS),
    "latched_agreement": Peer((*_GATE, *_GAIN, "u", "shut"), latched_agreement, _PASS),
    "tolerant_agreement": Peer((*_GATE, "gain", "own", "u"), tolerant_agreement, _KNOBS),
    "agreement_or_calm": Peer((*_GATE, "gain", "own", "u", "long"), agreement_or_calm, _KNOBS),
    "halves_agreement": Peer((*_GATE, *_GAIN), halves_agreement, _KNOBS),
    "halves_agreement_blocks": Peer((*_GATE, *_GAIN), halves_agreement_blocks, _KNOBS),
    "held_apart": Peer(("v", "m_a", "s_a", "m_b", "s_b"), held_apart, _KNOBS),
    "hysteresis": Peer((*_GATE, "open"), hysteresis, _KNOBS),
    "gated_momentum": Peer((*_GATE, "entered"), gated_momentum, _KNOBS),
    "kept_norm": Peer(_GATE, kept_norm, _KNOBS),
    "root_gate": Peer(_GATE, root_gate, _KNOBS),
}
"""Every rule of this module by its name."""

NEED_HALVES = ("halves_variance", "halves_agreement", "halves_agreement_blocks", "held_apart")
"""Those that take the gradient of a batch and of its second half."""
