"""One table of what the optimizer takes and what it refuses, from which the tests enumerate their products.

In the manner of torch's ``OptimizerInfo``: a row says the options, and which of them concern only some backends.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from poprisk.errors import DeviceError, HyperparameterError

GATES = ("soft", "hard", "snr")
BACKENDS: dict[str, dict[str, Any]] = {
    "forloop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


@dataclass(frozen=True)
class OptimizerInput:
    """A named set of options, and whether the single-pass kernels hand it on to the rule."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    two_pass: bool = False


ALGORITHM1 = {"lr": 1e-2, "weight_decay": 1e-2, "strength": 1.0, "normalize_gate": False}
"""Numbers at which every gate passes enough to be compared; the defaults, a strong gate in AdamW's units, are a row of
their own."""
NORMALIZED = {**ALGORITHM1, "normalize_gate": True}
INPUTS = (
    OptimizerInput("defaults"),
    OptimizerInput("Algorithm 1", ALGORITHM1),
    OptimizerInput("alpha and strength", {**ALGORITHM1, "alpha": 0.3, "strength": 3.0}),
    OptimizerInput("alpha above one", {**ALGORITHM1, "alpha": 2.0}),
    OptimizerInput("calibrated", {**ALGORITHM1, "alpha": "calibrated"}),
    OptimizerInput("corrected", {**ALGORITHM1, "centering": "corrected"}),
    OptimizerInput("corrected and calibrated", {**ALGORITHM1, "centering": "corrected", "alpha": "calibrated"}),
    OptimizerInput("warm-up", {**ALGORITHM1, "warmup_steps": 7}),
    OptimizerInput("gated decay", {**ALGORITHM1, "gated_decay": True, "weight_decay": 0.3}),
    OptimizerInput(
        "no decay, eps, rho", {**ALGORITHM1, "weight_decay": 0.0, "eps": 1e-6, "rho": 0.9, "gate_eps": 1e-3}
    ),
    OptimizerInput("shared state", {**ALGORITHM1, "state": "shared", "betas": (0.9, 0.9), "rho": 0.9}),
    OptimizerInput(
        "shared state, calibrated",
        {**ALGORITHM1, "state": "shared", "betas": (0.9, 0.9), "rho": 0.9, "alpha": "calibrated"},
    ),
    OptimizerInput("batch signal", {**ALGORITHM1, "signal": "batch", "alpha": 0.5}),
    OptimizerInput("maximize", {**ALGORITHM1, "maximize": True}),
    OptimizerInput("let non-finite through", {**ALGORITHM1, "skip_nonfinite": False}),
    OptimizerInput("normalized", NORMALIZED),
    OptimizerInput("normalized, calibrated", {**NORMALIZED, "alpha": "calibrated"}),
    OptimizerInput("normalized, warm-up", {**NORMALIZED, "warmup_steps": 7}),
    OptimizerInput("normalized, gated decay", {**NORMALIZED, "gated_decay": True, "weight_decay": 0.3}),
    OptimizerInput("normalized, row", {**NORMALIZED, "granularity": "row"}, two_pass=True),
    OptimizerInput("row", {**ALGORITHM1, "granularity": "row"}, two_pass=True),
    OptimizerInput("tensor", {**ALGORITHM1, "granularity": "tensor"}, two_pass=True),
)


@dataclass(frozen=True)
class ErrorInput:
    """Options that must be refused, with the class of the error and words its message must hold."""

    options: dict[str, Any]
    words: str
    error: type[Exception] = HyperparameterError


NAN, INF = float("nan"), float("inf")
ERROR_INPUTS = (
    *(
        ErrorInput({name: value}, rf"{name} must be .* got {value}")
        for name in ("lr", "eps", "weight_decay", "strength", "gate_eps", "alpha")
        for value in (-1.0, NAN, INF)
    ),
    ErrorInput({"lr": "0.1"}, "lr must be .* got '0.1'"),
    ErrorInput({"lr": True}, "lr must be .* got True"),
    ErrorInput({"alpha": "auto"}, "alpha must be .*calibrated.* got 'auto'"),
    *(ErrorInput({"rho": value}, f"rho must be .* got {value}") for value in (-0.1, 1.0, NAN)),
    ErrorInput({"betas": (1.0, 0.999)}, r"betas\[0\] must be .* got 1.0"),
    ErrorInput({"betas": (0.9, NAN)}, r"betas\[1\] must be .* got nan"),
    ErrorInput({"betas": 0.9}, "betas must be two numbers .* got 0.9"),
    ErrorInput({"gate": "softt"}, "gate must be one of .* got 'softt'"),
    ErrorInput({"centering": "mean"}, "centering must be one of"),
    ErrorInput({"signal": "x"}, "signal must be one of"),
    ErrorInput({"granularity": "head"}, "granularity must be one of"),
    ErrorInput({"state": "none"}, "state must be one of"),
    ErrorInput({"warmup_steps": -1}, "warmup_steps must be a whole number"),
    ErrorInput({"warmup_steps": 1.5}, "warmup_steps must be a whole number"),
    ErrorInput({"state_dtype": torch.float16}, "state_dtype must be .* got torch.float16"),
    ErrorInput({"state_dtype": {"m": torch.bfloat16}}, "state_dtype must be"),
    ErrorInput({"state": "shared"}, "needs rho = betas"),
    ErrorInput({"state": "shared", "betas": (0.9, 0.9), "rho": 0.9, "centering": "corrected"}, "'paper' only"),
    ErrorInput({"state": "shared", "betas": (0.9, 0.9), "rho": 0.9, "state_dtype": torch.bfloat16}, "cannot resolve"),
    ErrorInput({"fused": True, "foreach": True}, "cannot be `True` together"),
    ErrorInput({"fused": True, "differentiable": True}, "does not support `differentiable`"),
    ErrorInput({"lr": torch.tensor([0.1, 0.2])}, "one element"),
    ErrorInput({"lr": torch.tensor(0.1), "foreach": True}, "capturable=True"),
    ErrorInput({"lr": torch.tensor(-0.1)}, "lr must be"),
    ErrorInput({"variance": "stream"}, "variance must have a method variances"),
)  # fmt: skip
DEVICE_ERRORS = (ErrorInput({"fused": True}, "one device, got cpu, meta", DeviceError),)
