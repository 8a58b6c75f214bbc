r"""SGD as ``torch.optim.SGD`` defines it, as pure functions: state and gradient in, weights and state out."""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Linearization


def sgd_step(
    w: Float[Tensor, "*shape"],
    g: Float[Tensor, "*shape"],
    buffer: Float[Tensor, "*shape"] | None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"] | None]:
    r"""One step of SGD with momentum μ, weight decay λ and κ = 1 - dampening (κ = 1 in the first step).

    .. math:: f = g + \lambda w, \qquad v' = \mu v + \kappa f, \qquad w' = w - \eta v'

    With Nesterov momentum the direction is :math:`f + \mu v'` instead of :math:`v'`.

    Here η is ``lr``, v the ``buffer``, and ``first`` marks the first step with momentum. Returns weights and buffer.

    >>> w, v = torch.zeros(1), torch.zeros(1)
    >>> for first in (True, False):
    ...     w, v = sgd_step(w, torch.ones(1), v, lr=0.5, momentum=0.9, first=first)
    >>> w  # -0.5 (1 + 1.9)
    tensor([-1.4500])
    """
    f = torch.add(g, w, alpha=weight_decay) if weight_decay else g
    if not momentum:
        return torch.sub(w, f, alpha=lr), buffer
    assert buffer is not None
    buffer = torch.add(momentum * buffer, f, alpha=1.0 if first else 1 - dampening)
    direction = torch.add(f, buffer, alpha=momentum) if nesterov else buffer
    return torch.sub(w, direction, alpha=lr), buffer


def linearize_sgd(
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    first: bool = False,
) -> Linearization:
    """The same step as an affine map of its gradient; the preconditioner is one number for all weights.

    >>> linearize_sgd(lr=0.1, momentum=0.9, dampening=0.5).new_gradient
    0.5
    """
    return Linearization(
        torch.tensor(lr, dtype=torch.float64),
        momentum,
        decay=0.0,
        new_gradient=1.0 if first or not momentum else 1 - dampening,
        buffer_share=momentum if nesterov else 1.0,
        direct_share=1.0 if nesterov else 0.0,
        coupled_decay=weight_decay,
    )


def sgd_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of both functions, from a parameter group of ``torch.optim.SGD``."""
    numbers = {name: float(group[name]) for name in ("lr", "momentum", "dampening", "weight_decay")}
    return {**numbers, "nesterov": bool(group["nesterov"])}
