"""The numbers a user gets without asking, in one place: the library's defaults and the paper's."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from poprisk.optim.rules._coefficients import Granularity, Hyper, Signal
from poprisk.optim.rules._gates import GateName
from poprisk.optim.rules._threshold import Centering

_RULE = Hyper()  # the rule's own numbers have their defaults there


@dataclass(frozen=True)
class Defaults:
    """Default value of every hyper-parameter of :class:`poprisk.PopRiskAdamW`."""

    lr: float = 0.06
    betas: tuple[float, float] = _RULE.betas
    eps: float = _RULE.eps
    weight_decay: float = 5e-3
    gate: GateName | None = "snr"
    alpha: float | Literal["calibrated"] = _RULE.alpha
    strength: float = 100.0
    rho: float = _RULE.rho
    gate_eps: float = _RULE.gate_eps
    centering: Centering = _RULE.centering
    signal: Signal = _RULE.signal
    warmup_steps: int = _RULE.warmup_steps
    normalize_gate: bool = _RULE.normalize_gate
    gated_decay: bool = _RULE.gated_decay
    granularity: Granularity = _RULE.granularity
    state: Literal["full", "shared"] = "full"
    state_dtype: Any = None
    skip_nonfinite: bool = _RULE.skip_nonfinite
    maximize: bool = False
    foreach: bool | None = None
    capturable: bool = False
    differentiable: bool = False
    fused: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """One entry per option, as torch keeps them in a parameter group."""
        return asdict(self)


DEFAULTS = Defaults()
"""What ``PopRiskAdamW(params)`` uses. Gate, strength, learning rate and weight decay are those that the study
``default_choice`` ranks first; all else is Algorithm 1."""

PAPER = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "gate": "soft",
    "alpha": 1.0,
    "strength": 1.0,
    "rho": 0.99,
    "gate_eps": 0.0,
    "centering": "paper",
    "signal": "ema",
    "warmup_steps": 0,
    "normalize_gate": False,
    "gated_decay": False,
    "granularity": "element",
    "state": "full",
    "state_dtype": None,
    "skip_nonfinite": True,
}
"""Algorithm 1 as published, written out so that it stays what it is whatever ``DEFAULTS`` becomes. Where the paper
gives no number (lr, betas, eps, weight decay, ε) these are AdamW's and 0."""

RULE_OPTIONS = tuple(f.name for f in fields(Hyper) if f.name != "shared_state")
"""The group entries that are hyper-parameters of the rule itself, by the names of :class:`poprisk.optim.rules.Hyper`."""
