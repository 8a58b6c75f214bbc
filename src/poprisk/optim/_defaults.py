"""The numbers a user gets without asking, in one place: the library's defaults and the paper's."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from poprisk.optim._gate import Gate
from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._gates import GateName

RULE_OPTIONS = tuple(f.name for f in fields(Hyper) if f.name != "shared_state")
"""The group entries that are hyper-parameters of the rule itself: fields of :class:`poprisk.optim.rules.Hyper`."""


@dataclass(frozen=True)
class Defaults(Hyper):
    """Default of every entry of a parameter group of :class:`poprisk.PopRiskAdamW`: Algorithm 1's unless listed here.

    Learning rate, betas, eps and weight decay are those of :class:`torch.optim.AdamW`.
    """

    lr: float = 1e-3
    gate: GateName | None = Gate().kind
    strength: float = Gate().strength
    normalize_gate: bool = Gate().normalize
    state: Literal["full", "shared"] = "full"
    state_dtype: Any = None
    maximize: bool = False
    foreach: bool | None = None
    capturable: bool = False
    differentiable: bool = False
    fused: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """One entry per option, as torch keeps them in a parameter group."""
        return {name: value for name, value in asdict(self).items() if name != "shared_state"}


DEFAULTS = Defaults()
"""What ``PopRiskAdamW(params)`` uses."""

PAPER = {**{name: getattr(Hyper(), name) for name in RULE_OPTIONS}, "lr": 1e-3, "state": "full", "state_dtype": None}
"""Algorithm 1 as published, independent of ``DEFAULTS``. Where the paper gives no number (lr, betas, eps, weight decay,
ε) these are AdamW's and 0."""
