r"""Variants that compare a gradient with its own past: a slower average, the last pass, an earlier proof."""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk.optim import soft_gate
from poprisk.optim.rules._adam import moving_average
from poprisk.optim.rules._threshold import mean_noise
from poprisk_lab.engine.peers import Knobs, States, _cast, _debias, _precise
from poprisk_lab.gates.variants.shared import Direction, after_first, moments, passes, where

SLOW = 0.99
"""Decay of the slow average: ten times the memory of β1 = 0.9."""


def slow_evidence(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The strict test at its own level, decided by an average with ten times the memory; Adam's fast one is stepped.

    .. math::
        q = \frac{\delta}{\delta + \lambda_t \hat s}, \quad \delta = (\hat\mu^2 - \alpha_t \hat s)_+, \quad
        \mu \leftarrow 0.99 \mu + 0.01 g, \quad (\alpha_t, \lambda_t) = (\alpha, \lambda)\, \kappa^\mu_t / \kappa_t

    α = 1 with β1 = 0.9 rejects noise at 4.5 standard errors. The same level on an average over 200 steps lets signals
    of a third of the strength pass. *Limits:* with the slow decay equal to β1 it is the strict gate.
    """
    now = moments(g, state, h, t)
    slow = moving_average(state["slow"], g, SLOW)
    level = _cast(mean_noise(SLOW, t) / mean_noise(h["beta1"], t), g)  # type: ignore[arg-type]
    mean = slow * _cast(_debias(SLOW, t), g)
    q = soft_gate(mean, now.s_hat, _cast(h["alpha"], g) * level, _cast(h["strength"], g) * level)
    return now.adam * q * after_first(t, q), {**now.kept, "slow": slow}


def sign_agreement(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""AdamW where the fast and a ten times slower average point the same way, the strict gate elsewhere.

    .. math:: q = 1 \text{ where } m \mu > 0, \qquad q = q_{strict} \text{ elsewhere}

    Signal has one sign for long, noise changes its own with every memory of the average. *Limits:* at t = 1, and for a
    gradient of one sign, it is AdamW; the averages of white noise agree in a little more than half of the coordinates.
    """
    now = moments(g, state, h, t)
    slow = moving_average(state["slow"], g, SLOW)
    agree = now.m_hat * slow > 0
    return now.adam * torch.where(agree, 1.0, now.strict(h, t)), {**now.kept, "slow": slow}


def pass_agreement(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The mean gradient of the last whole pass must agree with the average now.

    .. math:: q = \frac{(\bar g_{E-1} \hat m)_+}{(\bar g_{E-1} \hat m)_+ + a_t \lambda \hat s}

    Do the same examples pull the same way when they come back? Over a pass the sampling noise cancels, so that the
    product is signal times signal. *Limits:* on the first pass it is AdamW, as it is for a constant gradient without
    noise.
    """
    now, seen, length = moments(g, state, h, t), passes(h, t), _precise(h["gate_warmup"])
    ends = (_precise(t) % length) == 0
    total = state["total"] + g
    last = where(ends, total / _cast(length, g), state["pass"], g)
    product = (state["pass"] * now.m_hat).clamp(min=0)
    noise = _cast(now.break_even * _precise(h["strength"]), g) * now.s_hat
    q = product / (product + noise).clamp(min=torch.finfo(g.dtype).tiny)
    kept = {**now.kept, "total": where(ends, torch.zeros_like(total), total, g), "pass": last}
    return now.adam * where(seen > 0, q, 1.0, g), kept


def hysteresis(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""A coordinate opens at α = 1 and stays open until its signal is under break-even.

    .. math:: q = 1 \text{ from } \hat m^2 > \alpha \hat s \text{ until } \hat m^2 < a_t \hat s

    Strict proof is asked once; a signal that has been proven need not be proven at every step. *Limits:* a threshold of
    closing equal to that of opening is the hard gate; zero makes it AdamW after the first opening.
    """
    now = moments(g, state, h, t)
    squared = now.m_hat.square()
    opens = squared > _cast(h["alpha"], g) * now.s_hat
    closes = squared < _cast(now.break_even, g) * now.s_hat
    q = torch.where(opens, 1.0, torch.where(closes, 0.0, state["open"])) * after_first(t, g)
    return now.adam * q, {**now.kept, "open": q}
