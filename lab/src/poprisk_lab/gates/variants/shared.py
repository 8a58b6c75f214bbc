"""What the variants share: Algorithm 1's averages, evidence of agreement, blocks and halves of a row."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from poprisk._core.types import Scalar
from poprisk.optim import soft_gate
from poprisk.optim.rules._adam import adam_moments, adam_scale, moving_average
from poprisk.optim.rules._threshold import deviation_noise, mean_noise
from poprisk_lab.engine.peers import Knobs, States, _cast, _debias, _precise

Direction = tuple[Float[Tensor, "*members d"], dict[str, Tensor]]

BLOCK = 64
"""Consecutive weights that are judged together; in a matrix [out, in] they mostly belong to one unit."""
STEPS_OF_EVIDENCE = 0.99
"""Decay of the averages by which whole trainings or blocks are judged."""
SURE = 3.0
"""Standard errors of agreement at which a training or block is fully open."""


@dataclass(frozen=True)
class Moments:
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
        return q * after_first(t, q)


def moments(g: Tensor, state: States, h: Knobs, t: Scalar, squared: Tensor | None = None) -> Moments:
    """m, v, s with this gradient; s from the deviation from the last average unless its square is given."""
    deviation = (g - state["m"]).square() if squared is None else squared
    betas = h["beta1"], h["beta2"]
    m, v = adam_moments(g, state["m"], state["v"], betas)
    s = moving_average(state["s"], deviation, h["rho"])
    m_hat, s_hat = m * _cast(_debias(h["beta1"], t), m), s * _cast(_debias(h["rho"], t), s)
    return Moments({"m": m, "v": v, "s": s}, m_hat, s_hat, m * adam_scale(v, t, betas, h["eps"]), h["beta1"], t)


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


def agreement(gain: Tensor, state: States, t: Scalar, first: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    r"""How surely the mean of ``gain`` is positive, from 0 to 1, and its averages; samples count from step ``first``.

    The variance of an exponential average of white samples is :math:`(1-\rho)/(1+\rho)` of theirs; with fewer samples
    it is :math:`\kappa_t`, and the first sample alone, of which no spread is known, counts by its sign.
    """
    rho = STEPS_OF_EVIDENCE
    live = _at_least(_precise(t) - (first - 1), 1.0)
    mean, square = (_narrow(state[name], gain) for name in ("gain", "gain_square"))
    counts = after_first(t, gain) if first > 1 else 1.0
    mean, square = moving_average(mean, gain, rho), moving_average(square, gain * gain, rho)
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


def block_means(x: Float[Tensor, "*members d"]) -> Float[Tensor, "*members d"]:
    """The mean of each stretch of 64 (the last may be shorter), at each of its places.

    >>> block_means(torch.arange(66.0))[[0, 63, 64, 65]]
    tensor([31.5000, 31.5000, 64.5000, 64.5000])
    """
    flat = x.reshape(-1, x.shape[-1]).unsqueeze(1)
    means = F.avg_pool1d(flat, BLOCK, ceil_mode=True)
    spread = means.squeeze(1).unsqueeze(-1).expand(-1, -1, BLOCK).flatten(1)
    return spread[:, : x.shape[-1]].reshape(x.shape)


def halves(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean gradient, half A's and half B's, of a row that holds the mean and g_B/2."""
    mean, part = g.chunk(2, dim=-1)
    return mean, 2 * (mean - part), 2 * part


def first_part(state: States) -> dict[str, Tensor]:
    """The state of the mean gradient, without the part beside it."""
    return {name: value.chunk(2, dim=-1)[0] for name, value in state.items()}


def both_parts(u: Tensor, kept: dict[str, Tensor]) -> Direction:
    """The first part's values, zeros beside them."""
    return _widened(u), {name: _widened(value) for name, value in kept.items()}


def _widened(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros_like(x)], dim=-1)


def preconditioner(v: Tensor, h: Knobs, t: Scalar) -> Tensor:
    """1 / (√v̂ + ϵ)."""
    return 1 / (v.sqrt() * _cast(_debias(h["beta2"], t) ** 0.5, v) + _cast(h["eps"], v))


def after_first(t: Scalar, like: Tensor) -> Scalar:
    """1 from the second step on."""
    return (t > 1).to(like.dtype) if isinstance(t, Tensor) else float(t > 1)


def where(condition: Scalar, yes: Tensor | Scalar, no: Tensor | Scalar, like: Tensor) -> Tensor:
    """``torch.where`` for tensors and numbers alike, in the type and on the device of ``like``."""

    def tensor(x: Tensor | Scalar) -> Tensor:
        return x.to(like) if isinstance(x, Tensor) else torch.full((), float(x), dtype=like.dtype, device=like.device)

    return torch.where(torch.as_tensor(condition, device=like.device), tensor(yes), tensor(no))


def smaller(a: Scalar, b: Scalar) -> Scalar:
    """The smaller of two numbers, or of two tensors element by element."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        return torch.minimum(a, b.to(a.device))
    return min(a, b)


def _at_least(x: Scalar, low: float) -> Scalar:
    return x.clamp(min=low) if isinstance(x, Tensor) else max(x, low)
