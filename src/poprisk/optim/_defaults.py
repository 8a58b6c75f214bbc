"""The numbers a user gets without asking, in one place: the library's defaults and the paper's."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from poprisk.optim._gate import PAPER_GATE, Gate
from poprisk.optim.rules._coefficients import Granularity, Hyper, Signal
from poprisk.optim.rules._gates import GateName
from poprisk.optim.rules._threshold import Centering

_RULE, _GATE = Hyper(), Gate()


@dataclass(frozen=True)
class Defaults:
    """Default of every entry of a parameter group of :class:`poprisk.PopRiskAdamW`; the gate's are :class:`Gate`'s."""

    lr: float = 0.06
    betas: tuple[float, float] = _RULE.betas
    eps: float = _RULE.eps
    weight_decay: float = 5e-3
    gate: GateName | None = _GATE.kind
    alpha: float | Literal["calibrated"] = _GATE.alpha
    strength: float = _GATE.strength
    rho: float = _GATE.rho
    gate_eps: float = _GATE.eps
    centering: Centering = _GATE.centering
    signal: Signal = _GATE.signal
    warmup_steps: int = _GATE.warmup_steps
    normalize_gate: bool = _GATE.normalize
    gated_decay: bool = _GATE.gated_decay
    granularity: Granularity = _GATE.granularity
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
"""What ``PopRiskAdamW(params)`` uses. Gate, strength, learning rate and weight decay are those that the lab's study
``default_choice`` ranks first; everything else is as in Algorithm 1."""

PAPER: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 1e-2,
    **PAPER_GATE.options(),
    "state": "full",
    "state_dtype": None,
    "skip_nonfinite": True,
}
"""Algorithm 1 as published, independent of ``DEFAULTS``. Where the paper gives no number (lr, betas, eps, weight decay,
ε) these are AdamW's and 0."""

RULE_OPTIONS = tuple(f.name for f in fields(Hyper) if f.name != "shared_state")
"""The group entries that are hyper-parameters of the rule itself: fields of :class:`poprisk.optim.rules.Hyper`."""
