r"""Variants that compare the two halves of a batch."""

from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk.optim import soft_gate
from poprisk.optim.rules._adam import moving_average
from poprisk_lab.engine.peers import Knobs, States, _cast, _debias
from poprisk_lab.gates.variants.shared import (
    Direction,
    after_first,
    agreement,
    block_means,
    both_parts,
    break_even,
    first_part,
    halves,
    moments,
    preconditioner,
)


def halves_agreement(g: Float[Tensor, "*members twice_d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Open while the two halves of a batch agree, over the whole training; strict once they do not.

    .. math:: x_t = \sum_k p_k\, g_{A,k}\, g_{B,k}, \qquad p = 1/(\sqrt{\hat v} + \epsilon)

    and C, z, a, q as in :func:`lagged_agreement`. The mean of x over batches drawn without replacement is the mean of
    :math:`g_i^\top P g_j` over pairs :math:`i \ne j`: the leave-one-out rate :math:`\Omega_S(P)` of an AdamW step on
    the whole data set, finite-sample correction included, with no threshold to set. *Limits:* equal halves are AdamW
    from step 2; halves of pure noise near the strict gate.
    """
    mean, a, b = halves(g)
    first = first_part(state)
    now = moments(mean, first, h, t)
    gain = (preconditioner(now.kept["v"], h, t) * a * b).sum(-1, keepdim=True)
    agreed, kept = agreement(gain, first, t)
    q = now.strict(h, t)
    return both_parts(now.adam * (q + (1 - q) * agreed), {**now.kept, **kept})


def halves_agreement_blocks(g: Float[Tensor, "*members twice_d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""As :func:`halves_agreement`, each block of 64 weights for itself.

    .. math:: x_t = \sum_{k \in \text{block}} p_k\, g_{A,k}\, g_{B,k}

    What memorizes and what learns may be different units. *Limits:* as for the whole training.
    """
    mean, a, b = halves(g)
    first = first_part(state)
    now = moments(mean, first, h, t)
    gain = block_means(preconditioner(now.kept["v"], h, t) * a * b)
    agreed, kept = agreement(gain, first, t)
    q = now.strict(h, t)
    return both_parts(now.adam * (q + (1 - q) * agreed), {**now.kept, **kept})


def held_apart(g: Float[Tensor, "*members twice_d"], state: States, h: Knobs, t: Scalar) -> Direction:
    r"""Each half of the data decides for the other: the gate of half A on the gradient of half B, and the reverse.

    .. math::
        u = \frac{q(\hat m_A, \hat s_A)\, \hat m_B + q(\hat m_B, \hat s_B)\, \hat m_A}{2 (\sqrt{\hat v} + \epsilon)}

    with the soft gate at break-even. A gate that is scored on the gradient it was chosen by is optimistic; chosen on
    other examples it needs no margin for that, and α = 1 can come down to break-even. *Limits:* equal halves without
    noise are the calibrated soft gate of their mean.
    """
    mean, a, b = halves(g)
    first = first_part(state)
    v = moving_average(first["v"], mean * mean, h["beta2"])
    kept, hats = {"v": v}, {}
    for name, half in (("a", a), ("b", b)):
        s = moving_average(first[f"s_{name}"], (half - first[f"m_{name}"]).square(), h["rho"])
        m = moving_average(first[f"m_{name}"], half, h["beta1"])
        kept |= {f"m_{name}": m, f"s_{name}": s}
        m_hat, s_hat = m * _cast(_debias(h["beta1"], t), m), s * _cast(_debias(h["rho"], t), s)
        q = soft_gate(m_hat, s_hat, _cast(break_even(h["beta1"], t), m), _cast(h["strength"], m))
        hats[name] = (m_hat, q * after_first(t, q))
    (m_a, q_a), (m_b, q_b) = hats["a"], hats["b"]
    return both_parts((q_a * m_b + q_b * m_a) / 2 * preconditioner(v, h, t), kept)
