r"""Adam and AdamW as ``torch.optim`` defines them, as pure functions: state and gradient in, weights and state out.

Hyper-parameters and the step number t (1 in the first step) are numbers, or tensors that broadcast against the weights:
many trainings with different settings are then one computation. Such scalars are computed in float64 and cast, so that
:math:`1-\beta^t` is accurate and the large arrays keep their dtype; give a β close to 1 as a number or in float64.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Linearization, Scalar

Betas = tuple[Scalar, Scalar]


def adam_moments(
    g: Float[Tensor, "*shape"], m: Float[Tensor, "*shape"], v: Float[Tensor, "*shape"], betas: Betas
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    r"""The exponential averages m of g and v of :math:`g^2`, after one more gradient."""
    return moving_average(m, g, betas[0]), moving_average(v, g * g, betas[1])


def moving_average(old: Float[Tensor, "*shape"], new: Float[Tensor, "*shape"], beta: Scalar) -> Float[Tensor, "*shape"]:
    """β old + (1-β) new."""
    return torch.lerp(old, new, _cast(1 - _precise(beta), old))


def adam_scale(
    v: Float[Tensor, "*shape"], t: Scalar, betas: Betas, eps: Scalar, lr: Scalar = 1.0
) -> Float[Tensor, "*shape"]:
    r"""What Adam multiplies the average m by: :math:`M = \eta / \big((1-\beta_1^t)(\sqrt{\hat v} + \epsilon)\big)`."""
    gain, root = _corrections(t, betas)
    return _cast(lr * gain, v) / (v.sqrt() + _cast(root * eps, v))


def adam_step(
    w: Float[Tensor, "*shape"],
    g: Float[Tensor, "*shape"],
    m: Float[Tensor, "*shape"],
    v: Float[Tensor, "*shape"],
    t: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    r"""One step of Adam, or of AdamW with ``decoupled_weight_decay``.

    .. math:: w' = w - \eta\, \hat m / (\sqrt{\hat v} + \epsilon)

    Adam adds :math:`\lambda w` to the gradient, AdamW multiplies the weights by :math:`1 - \eta\lambda`.

    Here t is 1 in the first step, η is ``lr`` and λ ``weight_decay``. Returns the weights, m and v after the step.

    >>> zero = torch.zeros(1)
    >>> adam_step(zero, torch.ones(1), zero, zero, 1, lr=0.1, betas=(0.9, 0.999), eps=1e-8)[0]
    tensor([-0.1000])
    """
    f = g if decoupled_weight_decay or not weight_decay else torch.add(g, w, alpha=weight_decay)
    m, v = adam_moments(f, m, v, betas)
    kept = w * (1 - lr * weight_decay) if decoupled_weight_decay and weight_decay else w
    gain, root = _corrections(t, betas)
    return torch.addcdiv(kept, m, v.sqrt() + root * eps, value=float(-lr * gain)), m, v


def linearize_adam(
    v: Float[Tensor, "*shape"],
    t: float,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
) -> Linearization:
    """The step that left v behind, as an affine map of its gradient; for AMSGrad v is the running maximum."""
    decay, coupled = (lr * weight_decay, 0.0) if decoupled_weight_decay else (0.0, weight_decay)
    return Linearization(adam_scale(v, t, betas, eps, lr), betas[0], decay, coupled_decay=coupled)


def adam_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of step and linearization, from a parameter group of ``torch.optim.Adam`` or ``AdamW``."""
    numbers = {name: float(group[name]) for name in ("lr", "eps", "weight_decay")}
    betas = tuple(float(beta) for beta in group["betas"])
    return {**numbers, "betas": betas, "decoupled_weight_decay": bool(group["decoupled_weight_decay"])}


def _corrections(t: Scalar, betas: Betas) -> tuple[Scalar, Scalar]:
    r"""r/(1-β1ᵗ) and r = √(1-β2ᵗ): m̂/(√v̂ + ϵ) is r/(1-β1ᵗ) · m/(√v + rϵ), one operation less on the large arrays."""
    beta1, beta2, t = (_precise(x) for x in (*betas, t))
    root = (1 - beta2**t) ** 0.5
    return root / (1 - beta1**t), root


def _precise(x: Scalar) -> Scalar:
    return x.double() if isinstance(x, Tensor) else x


def _cast(x: Scalar, like: Tensor) -> Scalar:
    """In the dtype of the large array, which a float64 tensor of one or more axes would promote."""
    return x.to(like.dtype) if isinstance(x, Tensor) else x
