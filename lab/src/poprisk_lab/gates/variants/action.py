r"""Variants of what the gate acts on: the momentum, the direction of a step, or a root of the gate."""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk.optim import snr_gate
from poprisk.optim.rules._adam import moving_average
from poprisk_lab.engine.peers import Knobs, States, _cast, _debias
from poprisk_lab.gates.variants.shared import Direction, moments, preconditioner


def gated_momentum(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The gate decides what enters the momentum, not what leaves it.

    .. math::
        \tilde m \leftarrow \beta_1 \tilde m + (1-\beta_1)\, q_{strict}\, g, \qquad u = \hat{\tilde m}/\sqrt{\hat v}

    A signal once let in acts on through the momentum's memory, also in steps in which the gate is closed again.
    *Limits:* q = 1 throughout is AdamW; for a gate that does not change in time it is the gated step.
    """
    now = moments(g, state, h, t)
    entered = moving_average(state["entered"], now.strict(h, t) * g, h["beta1"])
    u = entered * _cast(_debias(h["beta1"], t), g) * preconditioner(now.kept["v"], h, t)
    return u, {**now.kept, "entered": entered}


def kept_norm(g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""The gate chooses the direction, AdamW the length of the step.

    .. math:: u = q_{strict} \odot u_{Adam} \cdot \|u_{Adam}\| / \|q_{strict} \odot u_{Adam}\|

    The slowness is a matter of length: what is left after gating is 1/1000 of AdamW's step. *Limits:* a gate that is
    the same for all coordinates is AdamW, however closed; a gate closed everywhere leaves the weights.
    """
    now = moments(g, state, h, t)
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
    now = moments(g, state, h, t)
    return now.adam * snr_gate(now.m_hat, now.s_hat, 30 * _cast(h["strength"], g)).sqrt().sqrt(), now.kept
