r"""Variants that ask whether the next batch agrees with the step decided before it."""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk.optim.rules._adam import moving_average
from poprisk_lab.engine.peers import Knobs, States, _cast, _debias, _precise
from poprisk_lab.gates.variants.pooled import pooled_gate
from poprisk_lab.gates.variants.shared import (
    STEPS_OF_EVIDENCE,
    Direction,
    Moments,
    agreement,
    block_means,
    moments,
    passes,
)

LONG = 0.997
"""Decay of the average over three times as many steps, which shows whether the other one falls."""
CALM = 0.97
"""What falls below this share of its longer average is taken to fall."""
PASSES_OF_WORTH = 15.0
"""Passes after which a repeated example is worth 1/e of a fresh one."""


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
    now = moments(g, state, h, t)
    agreed, kept = agreement((g * state["u"]).sum(-1, keepdim=True), state, t, first=2)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * agreed), {**now.kept, **kept, "u": now.adam}


def lagged_agreement_blocks(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`lagged_agreement`, each block of 64 weights for itself.

    .. math:: x_t = \sum_{k \in \text{block}} g_{t,k}\, u_{t-1,k}

    What memorizes and what learns may be different units. *Limits:* as for the whole training.
    """
    now = moments(g, state, h, t)
    agreed, kept = agreement(block_means(g * state["u"]), state, t, first=2)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * agreed), {**now.kept, **kept, "u": now.adam}


def lagged_agreement_elements(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`lagged_agreement`, each weight for itself: :math:`x_{t,k} = g_{t,k}\, u_{t-1,k}`.

    Algorithm 1 asks whether a coordinate's mean is large; this asks whether its steps would have paid on the batches
    after them, which drift does not disturb and two hundred steps can decide. *Limits:* as for the whole training.
    """
    now = moments(g, state, h, t)
    agreed, kept = agreement(g * state["u"], state, t, first=2)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * agreed), {**now.kept, **kept, "u": now.adam}


def agreement_over_blocks(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""AdamW while the next batch agrees, then :func:`pooled_blocks` instead of the strict gate.

    .. math:: q = a + (1-a)\, q_{blocks}

    Once the whole step no longer pays, parts of it may: blocks find them with far less signal than elements do.
    *Limits:* agreement is AdamW; its absence the pooled blocks.
    """
    now = moments(g, state, h, t)
    agreed, kept = agreement((g * state["u"]).sum(-1, keepdim=True), state, t, first=2)
    q = pooled_gate(now, g, t)
    return now.adam * (q + (1 - q) * agreed), {**now.kept, **kept, "u": now.adam}


def agreement_after_first_pass(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""AdamW while batches are fresh; then, block by block, as far as the next batch agrees, strict where it does not.

    .. math:: q = b + (1-b)\, q_{strict}, \qquad b = f + (1-f)\, a, \qquad f = 1/(1+E)

    with the agreement a of :func:`lagged_agreement_blocks`. f is the share of gradients that were the first of their
    examples, for which an ungated step needs no proof (:func:`closing_with_replay`); the rest must be earned. A small
    trial had the two parts lose different clean tasks. *Limits:* E = 0 is AdamW, E → ∞ the agreement by blocks.
    """
    now = moments(g, state, h, t)
    agreed, kept = agreement(block_means(g * state["u"]), state, t, first=2)
    return now.adam * _opened(now.strict(h, t), agreed, h, t), {**now.kept, **kept, "u": now.adam}


def fading_agreement(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`agreement_after_first_pass`, but agreement counts for less with every pass.

    .. math:: b = f + (1-f)\, a\, e^{-E/15}

    The next batch is no witness once its examples have shaped the weights. Muennighoff et al. (2023, "Scaling
    data-constrained language models") measure the worth of a repeated token as :math:`e^{-E/R}` with R near 15.
    *Limits:* E = 0 is AdamW, E → ∞ the strict gate.
    """
    now = moments(g, state, h, t)
    agreed, kept = agreement(block_means(g * state["u"]), state, t, first=2)
    worth = torch.exp(-_like(passes(h, t), g) / PASSES_OF_WORTH)
    return now.adam * _opened(now.strict(h, t), agreed * worth, h, t), {**now.kept, **kept, "u": now.adam}


def latched_agreement(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`agreement_after_first_pass`, but a block that has once been disagreed with stays strict for good.

    .. math:: a = 1 \text{ until the first step after the first pass at which } C \le 0, \qquad a = 0 \text{ then on}

    Behind a closed gate the weights rest, new batches then agree again with what was not learnt, the gate opens, and
    noise comes in little by little; a latch leaves it out. *Limits:* E = 0 is AdamW; a block of pure noise is strict
    after a few steps.
    """
    now = moments(g, state, h, t)
    agreed, kept = agreement(block_means(g * state["u"]), state, t, first=2)
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
    now = moments(g, state, h, t)
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
    now = moments(g, state, h, t)
    agreed, kept = _tolerated(now, g, state, h)
    long = moving_average(state["long"][..., :1], (g * now.adam).sum(-1, keepdim=True), LONG)
    short = kept["own"][..., :1] * _cast(_debias(STEPS_OF_EVIDENCE, t), g)
    falls = short < CALM * long * _cast(_debias(LONG, t), g)
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * torch.where(falls, 1.0, agreed)), {**now.kept, **kept, "long": long.expand_as(g)}


def _tolerated(now: Moments, g: Tensor, state: States, h: Knobs) -> tuple[Tensor, dict[str, Tensor]]:
    """How open a loss on the next batch leaves the whole training, and the averages it is judged by."""
    other = moving_average(state["gain"][..., :1], (g * state["u"]).sum(-1, keepdim=True), STEPS_OF_EVIDENCE)
    own = moving_average(state["own"][..., :1], (g * now.adam).sum(-1, keepdim=True), STEPS_OF_EVIDENCE)
    share = other / own.clamp(min=torch.finfo(g.dtype).tiny)
    agreed = (1 + share / _cast(1 - _precise(h["beta1"]), g)).clamp(0, 1)
    return agreed, {"gain": other.expand_as(g), "own": own.expand_as(g), "u": now.adam}
