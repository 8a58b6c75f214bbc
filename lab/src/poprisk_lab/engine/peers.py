r"""The rules of the optimizers that gates are compared with, as pure functions: gradient and state in, direction out.

Every rule is ``direction(g, state, h, t) -> (u, new state)``. The caller takes the step with decoupled weight decay,
:math:`w \leftarrow w - \eta u - \eta \lambda w`, and sets every state to zero before the first step. The
hyper-parameters in ``h`` and the step number ``t`` (1 at the first step) are numbers, or tensors that broadcast against
the weights ``[members, parameters]``: many training runs with different settings are then one computation. Nothing
waits for the device or branches on a tensor, so that a step can be captured in a CUDA graph. Values that depend on the
member but not on the coordinate are computed in float64 and cast, so that :math:`1-\beta^t` is accurate and the large
arrays keep their dtype; pass a β close to 1 as a number or in float64.

Hyper-parameters are validated by the caller, not here; ``eps`` must be positive for the rules that have one.
In the formulas :math:`m, v` are exponential averages of :math:`g, g^2` and hats divide by :math:`1-\beta^t`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk.optim import snr_gate
from poprisk.optim.rules._adam import adam_moments, adam_scale, moving_average
from poprisk_lab.engine.gradients import GradientKind

States = Mapping[str, Tensor]
Knobs = Mapping[str, Scalar]


def adamw(
    g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar
) -> tuple[Float[Tensor, "*members d"], dict[str, Tensor]]:
    r"""AdamW (Kingma & Ba 2015, Loshchilov & Hutter 2019), as ``torch.optim.AdamW``.

    .. math:: u = \hat m / (\sqrt{\hat v} + \epsilon)

    Knobs: ``beta1``, ``beta2``, ``eps``. States: ``m``, ``v``.

    >>> zero = {"m": torch.zeros(1, 2), "v": torch.zeros(1, 2)}
    >>> adamw(torch.tensor([[2.0, -0.5]]), zero, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}, 1)[0]
    tensor([[ 1., -1.]])
    """
    betas = h["beta1"], h["beta2"]
    m, v = adam_moments(g, state["m"], state["v"], betas)
    return m * adam_scale(v, t, betas, h["eps"]), {"m": m, "v": v}


def adabelief(
    g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar
) -> tuple[Float[Tensor, "*members d"], dict[str, Tensor]]:
    r"""AdaBelief (Zhuang et al. 2020, arXiv 2010.07468, Algorithm 2), without rectification.

    .. math:: s \leftarrow \beta_2 s + (1-\beta_2)(g - m_t)^2 + \epsilon, \qquad u = \hat m / (\sqrt{\hat s} + \epsilon)

    :math:`m_t` is the average *after* this gradient. As published, ε enters twice and is kept in s, where it grows to
    :math:`\epsilon/(1-\beta_2)`: the authors' package uses 1e-16, and results depend strongly on it. With ρ = β2 and
    ε = 0 the state is β1² times the gate's own s.

    Knobs: ``beta1``, ``beta2``, ``eps``. States: ``m``, ``s``.

    >>> zero = {"m": torch.zeros(1, 1), "s": torch.zeros(1, 1)}
    >>> u, state = adabelief(torch.tensor([[2.0]]), zero, {"beta1": 0.5, "beta2": 0.9, "eps": 1e-16}, 1)
    >>> u, state["s"]  # m = 1, so the deviation is 1: ŝ = 1 and m̂ = 2
    (tensor([[2.]]), tensor([[0.1000]]))
    """
    m = moving_average(state["m"], g, h["beta1"])
    s = moving_average(state["s"], (g - m).square(), h["beta2"]) + _cast(h["eps"], g)
    return m * adam_scale(s, t, (h["beta1"], h["beta2"]), h["eps"]), {"m": m, "s": s}


def msvag(
    g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar
) -> tuple[Float[Tensor, "*members d"], dict[str, Tensor]]:
    r"""M-SVAG (Balles & Hennig 2018, arXiv 1705.07774): momentum SGD, each coordinate shrunk by its estimated noise.

    .. math::
        u = \gamma \hat m, \quad \gamma = \frac{\hat m^2}{\hat m^2 + \rho_t \hat s}, \quad
        \hat s = \frac{\hat v - \hat m^2}{1 - \rho_t}, \quad
        \rho_t = \frac{(1-\beta)(1+\beta^t)}{(1+\beta)(1-\beta^t)}

    One β for both averages; :math:`\rho_t` is the variance of m̂ under white noise of unit variance. The factor is
    the SNR gate with strength :math:`\rho_t/(1-\rho_t) = (1-\beta)(1+\beta^t)/(2(\beta-\beta^t))` on
    :math:`\hat v - \hat m^2`, applied to m̂ and not to Adam's ratio: learning rates are those of SGD.

    At t = 1, one gradient contains no information about its variance: the estimate is 0 and γ = 1, which the authors'
    code reaches up to rounding by capping ρ at 0.999. A coordinate that never had a gradient does not move. Some public
    versions divide m by β^t instead of 1 - β^t, or drop the square of β in ρ.

    Knobs: ``beta1``. States: ``m``, ``v``.

    >>> state = {"m": torch.zeros(1, 1), "v": torch.zeros(1, 1)}
    >>> for t, g in ((1, 1.0), (2, 3.0)):
    ...     u, state = msvag(torch.tensor([[g]]), state, {"beta1": 0.5}, t)
    >>> u  # m̂ = 7/3, v̂ - m̂² = 8/9, ρ = 5/9 and γ = 49/59
    tensor([[1.9379]])
    """
    beta = h["beta1"]
    m, v = adam_moments(g, state["m"], state["v"], (beta, beta))
    debias = _cast(_debias(beta, t), g)
    m_hat = m * debias
    spread = (v * debias - m_hat * m_hat).clamp(min=0)  # negative by rounding only
    return snr_gate(m_hat, spread, _cast(_mean_noise_odds(beta, t), g)) * m_hat, {"m": m, "v": v}


def cautious(
    g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar
) -> tuple[Float[Tensor, "*members d"], dict[str, Tensor]]:
    r"""Cautious AdamW (Liang et al. 2024, arXiv 2411.16085): moves only where direction and gradient agree in sign.

    .. math:: u = \phi \odot u_{Adam} \cdot d / (|\phi|_1 + 1), \qquad \phi = 1\{u_{Adam} \odot g > 0\}

    Differs from the authors' code in the count: theirs is taken over one tensor of weights, ours over all ``d``
    coordinates of a member (the last axis). Their later code clamps the share at 1e-3 instead of adding 1 to the count,
    which differs only where almost nothing agrees. A public foreach version compares m with itself, so that
    nothing is ever masked.

    Knobs: ``beta1``, ``beta2``, ``eps``. States: ``m``, ``v``.

    >>> state = {"m": torch.tensor([[1.0, 1.0, 1.0]]), "v": torch.ones(1, 3)}
    >>> u, _ = cautious(torch.tensor([[1.0, 1.0, -1.0]]), state, {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8}, 1000)
    >>> u  # two of three agree: 3 / (2 + 1)
    tensor([[1., 1., 0.]])
    """
    u, new = adamw(g, state, h, t)
    agrees = (u * g > 0).to(g.dtype)
    scale = g.shape[-1] / (agrees.sum(-1, keepdim=True) + 1)
    return u * (agrees * scale), new


def grokfast(
    g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar
) -> tuple[Float[Tensor, "*members d"], dict[str, Tensor]]:
    r"""GrokFast-EMA (Lee et al. 2024, arXiv 2405.20233): Adam on a gradient whose slow part is amplified.

    .. math:: \mu \leftarrow \alpha \mu + (1-\alpha) g \quad (\mu = g \text{ at } t = 1), \qquad g' = g + \lambda \mu

    As in the authors' code the average starts at the first gradient. The package version that divides the learning
    rate by 1 + λ is the same up to lr, which is searched.

    Knobs: ``alpha_ema`` (α), ``lamb`` (λ), ``beta1``, ``beta2``, ``eps``. States: ``m``, ``v``, ``slow`` (μ).

    >>> zero = {name: torch.zeros(1, 1) for name in ("m", "v", "slow")}
    >>> h = {"alpha_ema": 0.98, "lamb": 2.0, "beta1": 0.5, "beta2": 0.5, "eps": 1e-8}
    >>> u, state = grokfast(torch.tensor([[1.0]]), zero, h, 1)
    >>> state["slow"], state["m"]  # Adam saw 1 + 2·1
    (tensor([[1.]]), tensor([[1.5000]]))
    """
    weight = _where(t > 1, 1 - _precise(h["alpha_ema"]), 1.0)
    slow = torch.lerp(state["slow"], g, _cast(weight, g))
    u, new = adamw(g + _cast(h["lamb"], g) * slow, state, h, t)
    return u, {**new, "slow": slow}


def cubed(
    g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar
) -> tuple[Float[Tensor, "*members d"], dict[str, Tensor]]:
    r"""The third power of Adam's direction: a control for whether a gate is more than a power of Adam's own ratio.

    .. math:: u = \mathrm{sign}(u_{Adam})\, |u_{Adam}|^3

    With β1 = β2 = ρ = β and raw averages, Adam's ratio gated by the SNR gate of strength β is exactly this rule.

    Knobs: ``beta1``, ``beta2``, ``eps``. States: ``m``, ``v``.

    >>> state = {"m": torch.tensor([[0.5]]), "v": torch.ones(1, 1)}
    >>> cubed(torch.tensor([[0.5]]), state, {"beta1": 0.9, "beta2": 1.0 - 1e-9, "eps": 1e-12}, 1e12)[0]
    tensor([[0.1250]])
    """
    u, new = adamw(g, state, h, t)
    return u * u * u, new


def casmo(
    g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar
) -> tuple[Float[Tensor, "*members d"], dict[str, Tensor]]:
    r"""CASMO 0.4 (package casmo-optimizer, commit e81a36e), default options; ``d`` are the weights of one tensor.

    .. math::
        s \leftarrow \beta_2 s + (1-\beta_2)(g - m_{t-1})^2, \quad
        a = \frac{\hat m^2}{\hat m^2 + \hat s}, \quad
        u = \sqrt{0.1 + 0.9\, \bar a} \; \mathrm{clip}\Big(\frac{a}{\bar a + \epsilon}, 0.1, 1\Big)
        \frac{\hat m}{\sqrt{\hat m^2 + \hat s} + \epsilon}

    :math:`\bar a` is the mean over the tensor. The root is the trust in the tensor (``robustness=0.5``, ``c_min=0.1``),
    the clipped ratio the focus on a coordinate (``rel_floor=0.1``).

    Knobs: ``beta1``, ``beta2``, ``eps``. States: ``m``, ``s``.

    >>> zero = {"m": torch.zeros(1, 2), "s": torch.zeros(1, 2)}
    >>> u, _ = casmo(torch.tensor([[2.0, -2.0]]), zero, {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}, 1)
    >>> u  # m̂² = ŝ: a = 1/2 everywhere, trust √0.55, and the denominator is √2 times |m̂|
    tensor([[ 0.5244, -0.5244]])
    """
    s = moving_average(state["s"], (g - state["m"]).square(), h["beta2"])
    m = moving_average(state["m"], g, h["beta1"])
    m_hat, s_hat = m * _cast(_debias(h["beta1"], t), g), s * _cast(_debias(h["beta2"], t), g)
    total = m_hat.square() + s_hat
    agreement = m_hat.square() / total.clamp(min=torch.finfo(g.dtype).tiny)
    mean, eps = agreement.mean(-1, keepdim=True), _cast(h["eps"], g)
    confidence = (0.1 + 0.9 * mean).sqrt() * (agreement / (mean + eps)).clamp(0.1, 1.0)
    return confidence * m_hat / (total.sqrt() + eps), {"m": m, "s": s}


def magma(
    g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar
) -> tuple[Float[Tensor, "*members d"], dict[str, Tensor]]:
    r"""Magma on Adam (Joo et al. 2026, arXiv 2602.15322): tensors rest at random, and move by their agreement.

    .. math::
        s \leftarrow 0.9\, s + 0.1\, \sigma\big(\cos(m, g)/2\big), \qquad u = s z\, u_{Adam}, \qquad
        z \sim \mathrm{Bernoulli}(1/2)

    ``d`` are the weights of one tensor, which is one block, and m includes this gradient. As published the surviving
    updates are not divided by 1/2. The score starts at zero.

    Knobs: ``beta1``, ``beta2``, ``eps``, and ``uniform``, random numbers of which the first of the tensor decides.
    States: ``m``, ``v``, ``score`` (one value, repeated).

    >>> zero = {name: torch.zeros(1, 2) for name in ("m", "v", "score")}
    >>> h = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "uniform": torch.tensor([[0.2, 0.9]])}
    >>> magma(torch.tensor([[2.0, -2.0]]), zero, h, 1)[0]  # 0.1·σ(1/2)
    tensor([[ 0.0622, -0.0622]])
    """
    u, new = adamw(g, state, h, t)
    cosine = torch.nn.functional.cosine_similarity(new["m"], g, dim=-1).unsqueeze(-1)
    score = 0.9 * state["score"] + 0.1 * torch.sigmoid(cosine / 2)
    uniform = h["uniform"]
    assert isinstance(uniform, Tensor)
    return torch.where(uniform[..., :1] < 0.5, score * u, 0.0), {**new, "score": score}


def schedule_free(
    g: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar
) -> tuple[Float[Tensor, "*members d"], dict[str, Tensor]]:
    r"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682), written for the point y where gradients are taken.

    .. math::
        z_{t+1} = z_t - \eta d, \quad x_{t+1} = (1-c) x_t + c z_{t+1}, \quad y = (1-\beta_1) z + \beta_1 x, \qquad
        d = g/(\sqrt{\hat v} + \epsilon) + \lambda y_t

    with :math:`c = \eta_t^2 / \sum_{i \le t} \eta_i^2`, which is 1/t at a constant rate. The state is
    :math:`\delta = (x - z)/\eta`, zero at first, so that :math:`u = (1 - \beta_1(1-c))\, d + \beta_1 c\, \delta`
    contains the weight decay and nothing is left for the caller to decay. The result of a run is x: see
    :func:`averaged_point`.

    Knobs: ``beta1``, ``beta2``, ``eps``, ``weight_decay``, ``lr_warmup``, and ``weights``, which are y. While the
    rate rises, δ is rescaled by the ratio of two consecutive rates. States: ``v``, ``delta``.

    >>> zero = {"v": torch.zeros(1, 1), "delta": torch.zeros(1, 1)}
    >>> h = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "lr_warmup": 0.0}
    >>> u, state = schedule_free(torch.tensor([[2.0]]), zero, {**h, "weights": torch.zeros(1, 1)}, 1)
    >>> u, state["delta"]  # after one step x = z = y
    (tensor([[1.]]), tensor([[0.]]))
    """
    y = h["weights"]
    assert isinstance(y, Tensor)
    v = moving_average(state["v"], g.square(), h["beta2"])
    d = g / ((v * _cast(_debias(h["beta2"], t), g)).sqrt() + _cast(h["eps"], g)) + _cast(h["weight_decay"], g) * y
    share, ratio = _average_share(h["lr_warmup"], t)
    c, beta = _cast(share, g), _cast(h["beta1"], g)
    before = state["delta"] * _cast(ratio, g)
    return (1 - beta * (1 - c)) * d + beta * c * before, {"v": v, "delta": (1 - c) * (before + d)}


def averaged_point(y: Float[Tensor, "*members d"], state: States, h: Knobs, t: Scalar) -> Float[Tensor, "*members d"]:
    """The weights x that schedule-free AdamW returns after step t: y + (1 - β1)(x - z)."""
    rate = h["lr"] * _rise(h["lr_warmup"], t)
    return y + _cast((1 - _precise(h["beta1"])) * rate, y) * state["delta"]


def _rise(warmup: Scalar, t: Scalar) -> Scalar:
    """The learning rate of step t as a share of the final one, as in :func:`poprisk_lab.engine.updates.take_step`."""
    return (torch.as_tensor(t, dtype=torch.float64) / torch.as_tensor(warmup).clamp(min=1)).clamp(max=1)


def _average_share(warmup: Scalar, t: Scalar) -> tuple[Scalar, Scalar]:
    """η_t²/Σ η_i², and η_{t-1}/η_t (1 at the first step, when nothing was stored)."""
    t = torch.as_tensor(t, dtype=torch.float64)
    length = torch.as_tensor(warmup).double().clamp(min=1)
    rising = torch.minimum(t, length)
    total = rising * (rising + 1) * (2 * rising + 1) / (6 * length**2) + (t - length).clamp(min=0)
    now = _rise(warmup, t)
    return now**2 / total, _rise(warmup, (t - 1).clamp(min=1)) / now


@dataclass(frozen=True)
class Peer:
    """A rule, with the names of its state and its hyper-parameters.

    Attributes:
        states: Names of the state arrays, each with the shape of the weights and initially zero.
        direction: ``(g, state, h, t) -> (u, new state)``.
        knobs: Names of the hyper-parameters it reads; learning rate and weight decay belong to the caller, unless the
            rule reads ``weight_decay`` itself.
        gradient: How the gradient of a step is made: see :mod:`poprisk_lab.engine.gradients`.
        evaluated: ``(w, state, h, t) -> w`` gives the weights that are the result of the run, if not w itself.
    """

    states: tuple[str, ...]
    direction: Callable[[Tensor, States, Knobs, Scalar], tuple[Tensor, dict[str, Tensor]]]
    knobs: tuple[str, ...]
    gradient: GradientKind = "plain"
    evaluated: Callable[[Tensor, States, Knobs, Scalar], Tensor] | None = None


_ADAM = ("beta1", "beta2", "eps")

PEERS: dict[str, Peer] = {
    "adamw": Peer(("m", "v"), adamw, _ADAM),
    "adabelief": Peer(("m", "s"), adabelief, _ADAM),
    "msvag": Peer(("m", "v"), msvag, ("beta1",)),
    "cautious": Peer(("m", "v"), cautious, _ADAM),
    "grokfast": Peer(("m", "v", "slow"), grokfast, (*_ADAM, "alpha_ema", "lamb")),
    "cubed": Peer(("m", "v"), cubed, _ADAM),
    "casmo": Peer(("m", "s"), casmo, _ADAM),
    "magma": Peer(("m", "v", "score"), magma, (*_ADAM, "uniform")),
    "schedule_free": Peer(
        ("v", "delta"), schedule_free, (*_ADAM, "weight_decay", "lr_warmup", "weights"), evaluated=averaged_point
    ),
    "rm3": Peer(("m", "v"), adamw, _ADAM, gradient="median of three"),
    "sam": Peer(("m", "v"), adamw, _ADAM, gradient="sharpness"),
}
"""Every rule of this module by its name."""


def _debias(beta: Scalar, t: Scalar) -> Scalar:
    """1/(1-β^t)."""
    return 1 / (1 - _precise(beta) ** _precise(t))


def _mean_noise_odds(beta: Scalar, t: Scalar) -> Scalar:
    """ρ_t/(1-ρ_t), and 0 if the mean is a single gradient (t = 1, or β = 0): its variance is then 0 as well."""
    beta = _precise(beta)
    power = beta ** _precise(t)
    top, bottom = (1 - beta) * (1 + power), 2 * (beta - power)
    return _where(bottom > 0, top / _where(bottom > 0, bottom, 1.0), 0.0)


def _precise(x: Scalar) -> Scalar:
    return x.double() if isinstance(x, Tensor) else x


def _cast(x: Scalar, like: Tensor) -> Scalar:
    """Cast to the dtype of the large array, which a float64 tensor with axes would promote."""
    return x.to(like.dtype) if isinstance(x, Tensor) else x


def _where(condition: Tensor | bool, yes: Scalar, no: Scalar) -> Scalar:
    if not isinstance(condition, Tensor):
        return yes if condition else no
    pair = (x if isinstance(x, Tensor) else torch.full_like(condition, x, dtype=torch.float64) for x in (yes, no))
    return torch.where(condition, *pair)
