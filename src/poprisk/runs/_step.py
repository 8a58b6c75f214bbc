r"""One optimizer step as it really happened, in the terms the operators of a run are made of."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

PerWeight = float | Float[Tensor, "d"]
"""One number for all weights, or one for each: parameter groups may differ."""


@dataclass(frozen=True)
class Step:
    r"""What step k did to the flat weights, given the output gradient g of the mean training loss.

    .. math::
       f_k &= J_S(w_k)^\top S_k\, g_k, \qquad g_k = \nabla_u \Phi_S(u_k), \quad
       \Phi_S = \tfrac1n \textstyle\sum_i \ell_i \\
       v_k &= \beta_k v_{k-1} + \kappa_k (f_k + \lambda^c_k w_k) \\
       w_{k+1} - w_k &= -M_k \odot \bigl(a_k v_k + b_k (f_k + \lambda^c_k w_k)\bigr) - \lambda_k \odot w_k + \sigma_k

    Adam, AdamW and PopRiskAdamW have κ = 1-β, a = 1, b = 0 and everything else inside M; torch's SGD has
    κ = 1 - dampening (1 at its first step), and with Nesterov a = β, b = 1. A clipped or accumulated gradient differs
    only in S. :mod:`poprisk.runs._linearize` has the table.
    """

    batch: Int[Tensor, "b"]
    """Which training examples, by index; an example drawn twice is there twice."""
    selection: Float[Tensor, "b"]
    """The diagonal of S on the batch: n/b for a mean, times the clip factor; weights of examples go here."""
    preconditioner: Float[Tensor, "d"]
    """M, with learning rate, gate and bias corrections inside."""
    momentum: PerWeight = 0.0
    """β."""
    new_gradient: PerWeight = 1.0
    """κ."""
    buffer_share: PerWeight = 1.0
    """a."""
    direct_share: PerWeight = 0.0
    """b."""
    decay: PerWeight = 0.0
    """λ, decoupled weight decay, the learning rate inside."""
    coupled_decay: PerWeight = 0.0
    """λᶜ, decay that enters the gradient (torch's SGD and Adam)."""
    source: PerWeight = 0.0
    """σ, whatever else moved the weights."""
