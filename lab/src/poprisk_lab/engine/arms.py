"""The optimizers that are compared: the rule of each, its fixed hyper-parameters, and the ranges of those searched.

The range of learning rates spans 3.5 decades for every arm. It begins at 3e-6 for AdamW and its relatives, where runs
of these lengths amount to early stopping, and ten times higher for rules that shrink most steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.search import Range

Control = Literal["gate_mean", "random_mask", "update_norm", "shuffled_gate"]
"""What a control copies at every step from the member of the arm ``defaults`` with the same seed."""

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
"""Every hyper-parameter of a member, with the value used unless the arm, the search or a setting changes it."""

_LR = (3e-6, 1e-2)
_SHARED = {"weight_decay": Range(1e-3, 2.0), "beta2_gap": Range(1e-3, 5e-2)}
_GATE = {"rho_gap": Range(3e-3, 3e-2)}


@dataclass(frozen=True)
class Arm:
    """One optimizer in a comparison.

    Attributes:
        name: Key in a stored result.
        label: Label in tables and figures.
        rule: ``soft``, ``hard`` or ``snr`` (a gate), or a name in :data:`poprisk_lab.engine.peers.PEERS`.
        fixed: Hyper-parameters that differ from :data:`USUAL` and are not searched.
        searched: Ranges of the hyper-parameters that are searched; ``beta2_gap`` is 1 - β2 and ``rho_gap`` 1 - ρ.
        calibrated: Whether the threshold of the gate is the one at which pure noise breaks even.
        per_tensor: Whether all weights of a tensor share a gate.
        cosine: Whether the learning rate decays to zero along a cosine.
        control: What is copied from the member of the arm ``defaults``.
        relative: Whether the gate q is replaced by (1 + min(1, q / its mean over the tensor))/2, so that learning rates
            are those of AdamW. The mean is that of the current step.
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
    relative: bool = False

    @property
    def gated(self) -> bool:
        """Whether the rule has a gate."""
        return self.rule in ("soft", "hard", "snr")

    def definition(self) -> dict[str, Any]:
        """Everything besides the hyper-parameters that determines what the arm does."""
        words = {name: getattr(self, name) for name in ("rule", "calibrated", "per_tensor", "cosine", "control", "eps")}
        return words | {"beta1": BETA1} | ({"relative": True} if self.relative else {})

    @property
    def eps(self) -> float:
        """Term added to the denominator: Adam's usual value, or that of AdaBelief's authors, which its results need."""
        return 1e-16 if self.rule == "adabelief" else 1e-8

    def hyper(self, given: Mapping[str, float]) -> dict[str, float]:
        """All hyper-parameters of a member: given values override fixed ones, and these the usual ones.

        Raises:
            HyperparameterError: a name is unknown.

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


_LITERAL = {
    "lr": 0.06,
    "weight_decay": 5e-3,
    "strength": 100.0,
    "rho": 0.99,
    "beta2": 0.999,
    "gate_warmup": 0.0,
    "alpha": 1.0,
}
"""The literal SNR gate at the learning rate that suits it: the library's defaults when the results were stored."""

_SOFT = {"strength": Range(0.1, 10.0), **_GATE}
_SNR = {"strength": Range(0.3, 30.0), **_GATE}
ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        Arm("defaults", "PopRiskAdamW, defaults", "snr", _LITERAL),
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
        Arm("shuffled_gate", "AdamW, shuffled gate", "adamw", control="shuffled_gate"),
        Arm("schedule_free", "schedule-free AdamW", "schedule_free", {"lr": 2.5e-3}),  # the rate of its package
        Arm("casmo", "CASMO 0.4", "casmo", per_tensor=True),
        Arm("magma", "Magma", "magma", per_tensor=True),
        Arm("rm3", "RM3, AdamW", "rm3"),
        Arm("sam", "SAM, AdamW", "sam"),
    )
}
"""All arms by name; controls follow ``defaults``, and arms without a range are used at given settings only."""

ALL_ARMS = tuple(name for name, arm in ARMS.items() if arm.searched)
"""Names of the arms that the studies of the paper search."""

_RELATIVE = {"strength": 100.0, "rho": 0.99}
ARMS["relative"] = Arm("relative", "SNR gate relative to its mean", "snr", _RELATIVE, relative=True)


def require_arm(name: str) -> Arm:
    """The arm of this name.

    Raises:
        HyperparameterError: there is no such arm.
    """
    if name not in ARMS:
        raise HyperparameterError(f"there is no arm {name!r}; choose one of {', '.join(ARMS)}")
    return ARMS[name]
