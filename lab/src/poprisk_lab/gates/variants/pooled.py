r"""Variants that judge weights together: blocks of 64, or the whole network."""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk.optim import snr_gate
from poprisk_lab.engine.peers import Knobs, States, _cast, _precise
from poprisk_lab.gates.variants.shared import (
    BLOCK,
    Direction,
    Moments,
    after_first,
    block_means,
    moments,
)

SAFE = 3.0
"""Standard errors by which a block's pooled signal must exceed noise."""


def pooled_blocks(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Blocks of 64 weights open by their pooled significance; within an open block the elements' ratio shapes.

    .. math::
        Q = \Big(1 - c\, a_t \frac{\sum \hat s}{\sum \hat m^2}\Big)_+,\quad c = 1 + 3\sqrt{2/64}, \qquad
        q_k = Q\, \frac{\hat m_k^2}{\hat m_k^2 + a_t \hat s_k}

    64 coordinates of equal noise tell signal from noise at a 64-fold smaller ratio than one: James–Stein's shrinkage of
    the block, with three standard errors of safety, in place of one coordinate's test at 4.5. *Limits:* Q → 1 and
    q → 1 (AdamW) as the signal grows, Q = 0 on a block of noise in all but 3 of 1000 cases.
    """
    now = moments(g, state, h, t)
    return now.adam * pooled_gate(now, g, t), now.kept


def pooled_gate(now: Moments, g: Tensor, t: Scalar) -> Tensor:
    """The gate of :func:`pooled_blocks`."""
    safety = 1 + SAFE * (2 / BLOCK) ** 0.5
    signal, noise = block_means(now.m_hat.square()), block_means(now.s_hat)
    opened = (1 - _cast(safety * now.break_even, g) * noise / signal.clamp(min=torch.finfo(g.dtype).tiny)).clamp(min=0)
    return opened * snr_gate(now.m_hat, now.s_hat, _cast(now.break_even, g)) * after_first(t, g)


def pooled_whole(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The whole training opens by the share of its step that leave-one-out leaves, elements pass the strict gate.

    .. math::
        Q = \Big(1 - (a_t + 1/T) \frac{\sum p_k \hat s_k}{\sum p_k \hat m_k^2}\Big)_+, \quad p = 1/\sqrt{\hat v},
        \qquad q = Q + (1-Q)\, q_{strict}

    1/T is b/n: where examples pull in directions of their own and only memorize, the mean gradient has
    :math:`\|\bar g\|^2 \approx \mathrm{tr}\,\Sigma/n`, which is that term, and Q = 0; where they share a direction Q is
    near 1. *Limits:* no noise is AdamW; pure noise the strict gate.
    """
    now = moments(g, state, h, t)
    share = _loo_share(now, _cast(now.break_even + 1 / _precise(h["gate_warmup"]), g))
    q = now.strict(h, t)
    return now.adam * (q + (1 - q) * share * after_first(t, q)), now.kept


def shrunk_blocks(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Empirical Bayes: the signal's variance is estimated in blocks of 64, each element is shrunk by its own noise.

    .. math::
        \tau^2 = \Big(\frac{1}{64}\sum \hat m^2 - a_t \hat s\Big)_+, \qquad
        q_k = \frac{\tau^2}{\tau^2 + \lambda a_t \hat s_k}

    If a block's signals are drawn with variance τ², q is the factor of least expected squared error (Efron and Morris).
    *Limits:* no noise is AdamW; a block without signal is closed; blocks of one element are the soft gate at
    break-even with :math:`\lambda a_t` for λ.
    """
    now = moments(g, state, h, t)
    noise = _cast(now.break_even, g) * now.s_hat
    spread = block_means(now.m_hat.square() - noise).clamp(min=0)
    q = spread / (spread + _cast(h["strength"], g) * noise).clamp(min=torch.finfo(g.dtype).tiny)
    return now.adam * q * after_first(t, q), now.kept


def _loo_share(now: Moments, threshold: Scalar) -> Tensor:
    """What is left of the preconditioned signal after the noise in it is taken away, as a share of it; at least 0."""
    weight = now.adam.abs() / now.m_hat.abs().clamp(min=torch.finfo(now.m_hat.dtype).tiny)
    signal = (weight * now.m_hat.square()).sum(-1, keepdim=True)
    noise = (weight * now.s_hat).sum(-1, keepdim=True)
    return (1 - threshold * noise / signal.clamp(min=torch.finfo(signal.dtype).tiny)).clamp(min=0)
