r"""The gate as one value: everything that decides how far a coordinate moves, and nothing else of the optimizer."""

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from numbers import Real
from typing import Any, Literal

from poprisk.errors import HyperparameterError
from poprisk.optim.rules._coefficients import Granularity, Hyper, Signal
from poprisk.optim.rules._gates import GateName
from poprisk.optim.rules._threshold import Centering


@dataclass(frozen=True, repr=False)
class Gate:
    r"""How :class:`poprisk.PopRiskAdamW` scales each coordinate's step by its gradient's signal-to-noise ratio.

    The gate q, between 0 and 1, tells signal from noise. With the debiased averages :math:`\hat m` of the gradient and
    :math:`\hat s` of its variance:

    .. math::
       \text{snr:}\ q = \frac{\hat m^2}{\hat m^2 + \lambda \hat s + \varepsilon}, \qquad
       \text{soft:}\ q = \frac{\delta}{\delta + \lambda \hat s + \varepsilon},\
       \delta = (\hat m^2 - \alpha \hat s)_+, \qquad
       \text{hard:}\ q = 1\{\hat m^2 > \alpha \hat s\}

    AdamW's step is multiplied by q itself in Algorithm 1 (``normalize=False``), and by default by q relative to its
    mean over the tensor, which keeps the meaning of AdamW's learning rate for every gate:

    .. math:: \tilde q = \tfrac12 \big(1 + \min(1, q/\bar q)\big)

    :math:`\bar q` is the mean of q over the tensor in the previous step. A coordinate whose gate is at least average
    for its tensor gets AdamW's step, the others less, down to half of AdamW's step where the gate is closed. Before the
    first step :math:`\bar q = 0`; while :math:`\bar q = 0`, the ratio counts as 1 where q > 0 and as 0 where q = 0.

    Symbol map: ``strength`` λ (the paper's λ_pop), ``alpha`` α, ``rho`` ρ, ``eps`` ε.

    Parameter groups hold the fields as plain entries, so that schedulers can change them and checkpoints need no
    class of ours: ``gate`` for ``kind``, ``gate_eps`` for ``eps``, ``normalize_gate`` for ``normalize``, and all
    others under their own names.

    Args:
        kind: ``"snr"`` (positive even below the cutoff), ``"soft"`` (Algorithm 1) or ``"hard"`` (the binary mask of
            the paper's corollary).
        strength: Weight of the noise. Not used by ``"hard"``. Without ``normalize``, a larger strength needs a larger
            learning rate.
        alpha: Leave-one-out coefficient in the paper's units (see :func:`poprisk.optim.loo_coefficient`), or
            ``"calibrated"``: the threshold at which pure noise breaks even for these averages, (1-β1)/2 in the long
            run. Not used by ``"snr"``.
        rho: Decay rate of the variance s.
        eps: Constant added to the gate's denominator. Any value other than 0 makes the gate depend on the scale of
            the gradients.
        centering: ``"paper"`` centers s on the raw previous mean, which counts the signal as noise in the first
            steps; ``"corrected"`` centers it on the debiased mean, so that a noise-free gradient passes from step 2.
        signal: What is compared with the noise: the averaged gradient (``"ema"``) or the gradient of this batch
            (``"batch"``), which with a ``variance`` source and ``rho=0`` is the corollary's one-batch test.
        warmup_steps: Number of initial steps without gating.
        normalize: Whether the gate is relative to its mean over each tensor (the formula above), so that ``lr`` is
            AdamW's. False multiplies the step by q as in Algorithm 1, which needs a larger ``lr``: about ten times
            AdamW's for a strength of 1, 60 times for 100.
        gated_decay: Apply the gate to the weight decay too, so that a closed literal gate leaves a weight unchanged.
        granularity: One gate per ``"element"``, per ``"row"`` (first axis) or per ``"tensor"``, from the pooled m̂²
            and ŝ.

    Raises:
        HyperparameterError: a field is out of range.

    Example:
        >>> Gate("soft", strength=1.0, alpha="calibrated")
        Gate('soft', strength=1.0, alpha='calibrated')
    """

    kind: GateName = "snr"
    _: KW_ONLY
    strength: float = 100.0
    alpha: float | Literal["calibrated"] = 1.0
    rho: float = 0.99
    eps: float = 0.0
    centering: Centering = "paper"
    signal: Signal = "ema"
    warmup_steps: int = 0
    normalize: bool = True
    gated_decay: bool = False
    granularity: Granularity = "element"

    def __post_init__(self) -> None:
        if self.kind is None:
            raise HyperparameterError("Gate.kind must be 'snr', 'soft' or 'hard', got None: for AdamW, pass gate=None")
        for name in _FIELDS:
            object.__setattr__(self, name, checked_field(name, getattr(self, name), f"Gate.{name}"))

    def __repr__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "kind"]
        defaults = {f.name: f.default for f in fields(self)}
        return f"Gate({', '.join([repr(self.kind), *(f'{k}={v!r}' for k, v in changed if v != defaults[k])])})"

    @classmethod
    def paper(cls, **changes: Any) -> "Gate":
        """The gate of Algorithm 1 as published, independent of this library's defaults, with some fields changed.

        >>> Gate.paper(alpha=0.5)
        Gate('soft', strength=1.0, alpha=0.5, normalize=False)
        """
        return replace(PAPER_GATE, **changes)

    def options(self) -> dict[str, Any]:
        """The fields as the plain entries of a parameter group.

        >>> Gate("soft", eps=1e-3).options()["gate_eps"]
        0.001
        """
        return {option: getattr(self, name) for name, option in _FIELDS.items()}


_FIELDS = {f.name: f.name for f in fields(Gate)} | {"kind": "gate", "eps": "gate_eps", "normalize": "normalize_gate"}
GATE_FIELD = {option: name for name, option in _FIELDS.items() if name != "kind"}
"""Field of the gate by its name in a parameter group, without the kind."""
GATE_CHOICES: dict[str, tuple[Any, ...]] = {
    "gate": ("soft", "hard", "snr", None),
    "centering": ("paper", "corrected"),
    "signal": ("ema", "batch"),
    "granularity": ("element", "row", "tensor"),
    "normalize_gate": (True, False),
    "gated_decay": (True, False),
}
"""The values that an entry of a parameter group may have, where they can be listed."""
_STORED = {"alpha", "strength", "rho", "gate_eps", "centering"}


def checked_number(label: str, value: Any, expected: str, ok: Callable[[float], bool]) -> float:
    """A real number of any kind (Python's, numpy's) as a float."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or not ok(float(value)):
        raise HyperparameterError(f"{label} must be {expected}, got {value!r}")
    return float(value)


def checked_field(name: str, value: Any, label: str) -> Any:
    """The value of one field in its usual type."""
    if _FIELDS[name] in GATE_CHOICES:
        allowed = tuple(x for x in GATE_CHOICES[_FIELDS[name]] if x is not None)  # a Gate has a kind
        if value not in allowed:
            raise HyperparameterError(f"{label} must be one of {allowed}, got {value!r}")
        return value
    if name == "warmup_steps":
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise HyperparameterError(f"{label} must be a whole number ≥ 0, got {value!r}")
        return value
    if name == "alpha":
        if isinstance(value, str) and value == "calibrated":
            return value
        return checked_number(label, value, "a finite number ≥ 0, or 'calibrated'", lambda x: x >= 0)
    if name == "rho":
        return checked_number(label, value, "a number in [0, 1)", lambda x: 0 <= x < 1)
    return checked_number(label, value, "a finite number ≥ 0", lambda x: x >= 0)


def check_gate_options(group: dict[str, Any]) -> None:
    """Checks the gate's entries of a parameter group, in place; a :class:`Gate` is unpacked first."""
    if isinstance(group["gate"], Gate):
        group.update(group["gate"].options())
    for option, name in GATE_FIELD.items():
        group[option] = checked_field(name, group[option], option)


def join_gate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options given one by one, as files and command lines give them, with the gate's fields joined into one value.

    >>> join_gate({"lr": 0.1, "gate": "soft", "gate_eps": 1e-3})
    {'lr': 0.1, 'gate': Gate('soft', eps=0.001)}
    """
    given = {name: value for name, value in options.items() if name in GATE_FIELD}
    if not given:
        return dict(options)
    refuse_both(options.get("gate"), given)
    flat = {GATE_FIELD[name]: value for name, value in given.items()}
    rest = {name: value for name, value in options.items() if name not in GATE_FIELD}
    kind = options.get("gate", Gate().kind)
    return {**rest, "gate": None if kind is None else Gate(kind, **flat)}


def unpack_gate(options: Mapping[str, Any], *, in_group: bool = False) -> dict[str, Any]:
    """The gate among these options as plain entries; options of the gate given one by one raise a warning.

    Most of them together are how a parameter group stores its gate, also one of an older version, and pass without
    a warning. A Gate that was put into such a group (``in_group``) replaces what is stored there.

    Raises:
        HyperparameterError: a gate and single options of it were given together.
    """
    flat = {name: value for name, value in options.items() if name in GATE_FIELD}
    gate, stored = options.get("gate"), flat.keys() >= _STORED
    if isinstance(gate, Gate):
        refuse_both(gate, {} if in_group else flat)
        return gate.options()
    for name in () if stored else flat:
        warnings.warn(
            f"the option {name} of PopRiskAdamW is now a field of the gate: pass gate=Gate(…, {GATE_FIELD[name]}=…) "
            f"instead of {name}=…",
            DeprecationWarning,
            stacklevel=_caller_level(),
        )
    return {**flat, **({"gate": gate} if "gate" in options else {})}


def refuse_both(gate: Any, flat: Mapping[str, Any]) -> None:
    """Rejects options of the gate, by their names in a parameter group, beside a :class:`Gate`."""
    if isinstance(gate, Gate) and (name := next((each for each in flat if each in GATE_FIELD), None)):
        value = flat[name]
        raise HyperparameterError(
            f"{name}={value!r} was given beside gate={gate!r}: write Gate(…, {GATE_FIELD[name]}={value!r})"
        )


def _caller_level() -> int:
    """The stack level, for a warning raised by the caller, of the first frame outside this package and torch."""
    frame, level = sys._getframe(1), 1
    inside = ("poprisk.optim", "torch.")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


PAPER_GATE = Gate(**{name: getattr(Hyper(), option) for name, option in _FIELDS.items()})
"""The gate of Algorithm 1, which does not follow the defaults."""
