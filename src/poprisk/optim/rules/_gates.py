r"""The paper's three gates, Eq. ``soft_filter``, as pure functions of the debiased moments.

Each depends on the gradients' scale only through the ratio :math:`r = \hat m^2/\hat s`: there is no absolute epsilon
unless you pass one, and 0/0 (a coordinate that never had a gradient) gives a closed gate.
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Scalar

GateName = Literal["soft", "hard", "snr"]


def hard_gate(m_hat: Float[Tensor, "*shape"], s_hat: Float[Tensor, "*shape"], alpha: Scalar) -> Float[Tensor, "*shape"]:
    r"""Update a coordinate exactly when its signal beats its noise (Cor. ``thm:diagonal_gate``, Eq. ``hard_filter``).

    .. math:: q = 1\{\hat m^2 > \alpha \hat s\}

    >>> hard_gate(torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 2.0, 2.0]), alpha=1.0)
    tensor([0., 0., 1.])
    """
    return (m_hat * m_hat > alpha * s_hat).to(m_hat.dtype)


def soft_gate(
    m_hat: Float[Tensor, "*shape"],
    s_hat: Float[Tensor, "*shape"],
    alpha: Scalar,
    strength: Scalar,
    gate_eps: int | float = 0.0,
) -> Float[Tensor, "*shape"]:
    r"""The hard gate with a smooth rise above the cutoff: the mask of Algorithm 1, line 9.

    .. math:: q = \delta / (\delta + \lambda_{pop} \hat s + \varepsilon), \qquad \delta = (\hat m^2 - \alpha \hat s)_+

    >>> soft_gate(torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 2.0, 2.0]), alpha=1.0, strength=0.5)
    tensor([0.0000, 0.0000, 0.8750])
    """
    delta = (m_hat * m_hat - alpha * s_hat).clamp(min=0)
    return _share(delta, strength * s_hat + gate_eps)


def snr_gate(
    m_hat: Float[Tensor, "*shape"],
    s_hat: Float[Tensor, "*shape"],
    strength: Scalar,
    gate_eps: int | float = 0.0,
) -> Float[Tensor, "*shape"]:
    r"""The signal-to-noise shrinker, positive even under the cutoff (third line of Eq. ``soft_filter``).

    .. math:: q = \hat m^2 / (\hat m^2 + \lambda \hat s + \varepsilon)

    >>> snr_gate(torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 1.0, 3.0]), strength=1.0)
    tensor([0.0000, 0.5000, 0.7500])
    """
    return _share(m_hat * m_hat, strength * s_hat + gate_eps)


def _share(part: Tensor, rest: Tensor) -> Tensor:
    """Part / (part + rest), and 0 where both vanish: the smallest normal number is the only floor."""
    return part / (part + rest).clamp(min=torch.finfo(part.dtype).tiny)


def evaluate_gate(
    kind: GateName, m_hat: Tensor, s_hat: Tensor, alpha: Scalar, strength: Scalar, gate_eps: int | float = 0.0
) -> Tensor:
    """The gate of the given name; arguments that it does not use are ignored."""
    if kind == "hard":
        return hard_gate(m_hat, s_hat, alpha)
    if kind == "soft":
        return soft_gate(m_hat, s_hat, alpha, strength, gate_eps)
    return snr_gate(m_hat, s_hat, strength, gate_eps)
