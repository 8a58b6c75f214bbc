"""The numbers a user gets without asking, in one place: the library's defaults and the paper's."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from poprisk.rules.coefficients import Granularity, Signal
from poprisk.rules.gates import GateName
from poprisk.rules.threshold import Centering


@dataclass(frozen=True)
class Defaults:
    """Default value of every hyper-parameter of :class:`poprisk.PopRiskAdamW`."""

    lr: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    gate: GateName | None = "soft"
    alpha: float | Literal["calibrated"] = 1.0
    strength: float = 1.0
    rho: float = 0.99
    gate_eps: float = 0.0
    centering: Centering = "paper"
    signal: Signal = "ema"
    warmup_steps: int = 0
    normalize_gate: bool = False
    gated_decay: bool = False
    granularity: Granularity = "element"
    state: Literal["full", "shared"] = "full"
    state_dtype: Any = None
    skip_nonfinite: bool = True
    maximize: bool = False
    foreach: bool | None = None
    capturable: bool = False
    differentiable: bool = False
    fused: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """One entry per option, as torch keeps them in a parameter group."""
        return asdict(self)


DEFAULTS = Defaults()
"""What ``PopRiskAdamW(params)`` uses. The update is Algorithm 1; the learning rate is chosen from our own evidence."""

PAPER = Defaults(lr=1e-3)
"""Algorithm 1 as published, whatever ``DEFAULTS`` becomes. The paper gives no default lr; this one is AdamW's."""

RULE_OPTIONS = (
    "lr",
    "betas",
    "eps",
    "weight_decay",
    "gate",
    "alpha",
    "strength",
    "rho",
    "gate_eps",
    "centering",
    "warmup_steps",
    "normalize_gate",
    "gated_decay",
    "granularity",
    "signal",
    "skip_nonfinite",
)
"""The group entries that are hyper-parameters of the rule itself, by the names of :class:`poprisk.rules.Hyper`."""
