"""The optimizers that are compared: the rule of each, what is fixed and what is searched, and over which ranges.

A range of learning rates is 3.5 decades wide for every arm. It begins at 3e-6 for AdamW and its relatives, where a
run of these lengths is early stopping by another name, and ten times higher for rules that shrink most steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from poprisk.errors import HyperparameterError
from poprisk.optim._defaults import DEFAULTS
from poprisk.optim.rules._coefficients import Hyper
from poprisk_lab.engine.search import Range

Control = Literal["gate_mean", "random_mask", "update_norm"]
"""What a control copies, step by step, from the member with the library's defaults and the same seed."""

BETA1 = 0.9
USUAL: dict[str, float] = {
    "lr": 1e-3,
    "weight_decay": 0.01,
    "beta2": 0.999,
    "alpha": 1.0,
    "strength": 1.0,
    "rho": 0.99,
    "lamb": 2.0,
    "alpha_ema": 0.98,
    "lr_warmup": 0.0,
    "gate_warmup": 0.0,
}
"""Every hyper-parameter a member can have, and what it is where neither arm nor search nor setting says otherwise."""

_LR = (3e-6, 1e-2)
_SHARED = {"weight_decay": Range(1e-3, 2.0), "beta2_gap": Range(1e-3, 5e-2)}
_GATE = {"rho_gap": Range(3e-3, 3e-2)}


@dataclass(frozen=True)
class Arm:
    """One optimizer in a comparison.

    Attributes:
        name: Its key in a stored result.
        label: Its words in tables and figures.
        rule: ``soft``, ``hard`` or ``snr`` (a gate), or a name in :data:`poprisk_lab.engine.peers.PEERS`.
        fixed: Hyper-parameters that differ from :data:`USUAL` and are not searched.
        searched: Ranges of those that are; ``beta2_gap`` is 1 - β2 and ``rho_gap`` 1 - ρ.
        calibrated: Whether the gate's threshold is the one at which pure noise breaks even.
        per_tensor: Whether each tensor has one gate.
        cosine: Whether the learning rate falls to zero along a cosine.
        control: What it copies from the defaults.
    """

    name: str
    label: str
    rule: str
    fixed: Mapping[str, float] = field(default_factory=dict)
    searched: Mapping[str, Range] = field(default_factory=dict)
    calibrated: bool = False
    per_tensor: bool = False
    cosine: bool = False
    control: Control | None = None

    @property
    def gated(self) -> bool:
        """Whether it has a gate of its own."""
        return self.rule in ("soft", "hard", "snr")

    def definition(self) -> dict[str, Any]:
        """All that decides what the arm does with given hyper-parameters."""
        words = {name: getattr(self, name) for name in ("rule", "calibrated", "per_tensor", "cosine", "control", "eps")}
        return words | {"beta1": BETA1}

    @property
    def eps(self) -> float:
        """Added to the denominator: Adam's usual, or what AdaBelief's authors use, on which its results hinge."""
        return 1e-16 if self.rule == "adabelief" else 1e-8

    def hyper(self, given: Mapping[str, float]) -> dict[str, float]:
        """All hyper-parameters of a member: what is given, over what is fixed, over the usual.

        Raises:
            HyperparameterError: a name is not known.

        >>> ARMS["soft"].hyper({"lr": 0.01, "beta2_gap": 0.02})["beta2"]
        0.98
        """
        plain = {name: value for name, value in given.items() if not name.endswith("_gap")}
        gaps = {name[:-4]: round(1 - value, 9) for name, value in given.items() if name.endswith("_gap")}
        unknown = sorted(set(plain | gaps) - set(USUAL))
        if unknown:
            raise HyperparameterError(f"unknown hyper-parameters {unknown} for {self.name!r}; known: {sorted(USUAL)}")
        return {**USUAL, **self.fixed, **plain, **gaps}


def _arm(name: str, label: str, rule: str, scale: float = 1.0, knobs: Mapping[str, Range] | None = None, **rest) -> Arm:
    searched = {"lr": Range(_LR[0] * scale, _LR[1] * scale), **_SHARED, **(knobs or {})}
    return Arm(name, label, rule, searched=searched, **rest)


def _defaults() -> Arm:
    """The library's defaults as an arm; what an arm cannot express must be as the rule has it."""
    rule = Hyper()
    unlike = [
        name
        for name in ("eps", "gate_eps", "centering", "signal", "normalize_gate", "gated_decay", "granularity")
        if getattr(DEFAULTS, name) != getattr(rule, name)
    ]
    assert not unlike, f"arms know nothing of the defaults' {unlike}"
    assert DEFAULTS.betas[0] == BETA1
    calibrated = isinstance(DEFAULTS.alpha, str)
    fixed = {
        "lr": DEFAULTS.lr,
        "weight_decay": DEFAULTS.weight_decay,
        "beta2": DEFAULTS.betas[1],
        "strength": DEFAULTS.strength,
        "rho": DEFAULTS.rho,
        "gate_warmup": float(DEFAULTS.warmup_steps),
        **({} if isinstance(DEFAULTS.alpha, str) else {"alpha": float(DEFAULTS.alpha)}),
    }
    return Arm("defaults", "PopRiskAdamW, defaults", str(DEFAULTS.gate), fixed, calibrated=calibrated)


_SOFT = {"strength": Range(0.1, 10.0), **_GATE}
_SNR = {"strength": Range(0.3, 30.0), **_GATE}
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        _defaults(),
        _arm("adamw", "AdamW", "adamw"),
        _arm("adamw_cosine", "AdamW, cosine decay", "adamw", cosine=True),
        _arm("soft", "soft gate, α = 1", "soft", 10, _SOFT),
        _arm("hard", "hard gate, α = 1", "hard", 10, _GATE),
        _arm("snr", "SNR gate", "snr", 10, _SNR),
        _arm("soft_calibrated", "soft gate, calibrated α", "soft", 10, _SOFT, calibrated=True),
        _arm("hard_calibrated", "hard gate, calibrated α", "hard", 10, _GATE, calibrated=True),
        _arm("tensor_gate", "SNR gate per tensor", "snr", 10, _SNR, per_tensor=True),
        _arm("gate_schedule", "AdamW, mean gate as schedule", "adamw", 10, control="gate_mean"),
        _arm("random_mask", "AdamW, random mask of equal density", "adamw", 10, control="random_mask"),
        _arm("matched_norm", "AdamW, matched update norm", "adamw", 10, control="update_norm"),
        _arm("adabelief", "AdaBelief", "adabelief"),
        _arm("msvag", "M-SVAG", "msvag", 1000, {"weight_decay": Range(1e-6, 2e-3)}),  # lr · decay as for AdamW
        _arm("cautious", "Cautious AdamW", "cautious"),
        _arm("grokfast", "GrokFast", "grokfast", 1, {"lamb": Range(0.5, 5.0)}),
        _arm("cubed", "|u|³ Adam", "cubed", 10),
    )
}
"""Every arm by name; ``defaults`` is the library's own setting and has nothing to search."""

ALL_ARMS = tuple(name for name in ARMS if name != "defaults")


def require_arm(name: str) -> Arm:
    """The arm of this name.

    Raises:
        HyperparameterError: there is none.
    """
    if name not in ARMS:
        raise HyperparameterError(f"no arm is called {name!r}; known: {', '.join(ARMS)}")
    return ARMS[name]
