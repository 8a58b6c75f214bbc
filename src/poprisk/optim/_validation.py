"""Checks of the options of a parameter group; each error says what was expected, what was given, and what to do."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from poprisk.errors import DeviceError, HyperparameterError
from poprisk.optim._gate import GATE_CHOICES, check_gate_options, checked_number
from poprisk.optim._shards import is_sharded

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in STATE_DTYPES}
"""Dtypes by their names in state dicts and in options given as text."""
FUSED_DEVICES = ("cpu", "cuda")
CHOICES: dict[str, tuple[Any, ...]] = {
    **GATE_CHOICES,
    "state": ("full", "shared"),
    **dict.fromkeys(("skip_nonfinite", "maximize", "capturable", "differentiable"), (True, False)),
    **dict.fromkeys(("foreach", "fused"), (True, False, None)),
}


def check_group(group: dict[str, Any]) -> None:
    """Checks the options of a parameter group, one by one and together, and brings them into one form, in place."""
    _check_lr(group)
    for name in ("eps", "weight_decay"):
        group[name] = checked_number(name, group[name], "a finite number ≥ 0", lambda x: x >= 0)
    group["betas"] = _check_betas(group["betas"])
    check_gate_options(group)
    for name, allowed in CHOICES.items():
        if group[name] not in allowed:
            raise HyperparameterError(f"{name} must be one of {allowed}, got {group[name]!r}")
    group["state_dtype"] = check_state_dtype(group["state_dtype"])
    _check_shared(group)
    _check_modes(group)


def check_state_dtype(value: Any) -> dict[str, torch.dtype] | None:
    """``None``, one dtype for v and s, or a mapping with keys among 'v' and 's' -> the mapping, or None."""
    if value is None:
        return None
    wanted: dict[Any, Any] = dict(value) if isinstance(value, Mapping) else {"v": value, "s": value}
    wanted = {letter: DTYPE_NAMES.get(d, d) if isinstance(d, str) else d for letter, d in wanted.items()}
    if not set(wanted) <= {"v", "s"} or any(d not in STATE_DTYPES for d in wanted.values()):
        raise HyperparameterError(
            "state_dtype must be a dtype for v and s, or a mapping such as {'s': torch.bfloat16}, with dtypes among "
            f"{[str(d) for d in STATE_DTYPES]}, got {value!r}"
        )
    return wanted


def check_one_device(devices: set[torch.device]) -> None:
    """A fused optimizer supports one device, of a type that has a kernel."""
    names = ", ".join(sorted(str(d) for d in devices))
    if len(devices) > 1:
        raise DeviceError(
            f"fused=True needs all parameters on one device, got {names}: use one optimizer per device, or fused=None"
        )
    if any(d.type not in FUSED_DEVICES for d in devices):
        raise DeviceError(f"fused=True supports the devices {FUSED_DEVICES}, got {names}: use fused=None")


def _check_lr(group: dict[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise HyperparameterError(f"a Tensor lr must have one element, got shape {tuple(lr.shape)}")
        if group["foreach"] and not group["capturable"]:
            raise HyperparameterError(
                "a Tensor lr with foreach=True needs capturable=True: pass a float, or fused=True"
            )
        if lr.device.type == "cpu":
            checked_number("lr", lr.item(), "a finite number ≥ 0", lambda x: x >= 0)
        return
    group["lr"] = checked_number("lr", lr, "a finite number ≥ 0", lambda x: x >= 0)


def _check_betas(betas: Any) -> tuple[float, float]:
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise HyperparameterError(f"betas must be two numbers in [0, 1), got {betas!r}") from None
    pair = tuple(b.item() if isinstance(b, Tensor) and b.numel() == 1 else b for b in (beta1, beta2))
    for index, beta in enumerate(pair):
        checked_number(f"betas[{index}]", beta, "a number in [0, 1)", lambda x: 0 <= x < 1)
    return float(pair[0]), float(pair[1])


def _check_shared(group: dict[str, Any]) -> None:
    """Rejects options under which s cannot be derived from m and v."""
    if group["state"] != "shared" or group["gate"] is None:
        return
    beta1, beta2 = group["betas"]
    if not beta1 == beta2 == group["rho"] or beta1 == 0:
        raise HyperparameterError(
            "state='shared' derives s from m and v, which needs rho = betas[0] = betas[1] > 0, got "
            f"rho={group['rho']}, betas={group['betas']}: pass betas=(0.95, 0.95) and gate=Gate(…, rho=0.95), or "
            "state='full'"
        )
    if group["centering"] != "paper":
        raise HyperparameterError("state='shared' holds for centering='paper' only, got centering='corrected'")
    if group["state_dtype"] is not None and group["state_dtype"].get("v", torch.float32) == torch.bfloat16:
        raise HyperparameterError(
            "state='shared' takes the difference v - m², which a bfloat16 v cannot resolve: use state_dtype=None"
        )


def _check_modes(group: dict[str, Any]) -> None:
    if group["state_dtype"] is not None and any(p.is_complex() for p in group["params"]):
        raise HyperparameterError("state_dtype does not support complex parameters: use state_dtype=None for them")
    if group["fused"] and group["foreach"]:
        raise HyperparameterError("`fused` and `foreach` cannot be `True` together: choose one, or leave both None")
    for mode in ("fused", "foreach"):
        if group[mode] and group["differentiable"]:
            raise HyperparameterError(f"`{mode}` does not support `differentiable`: use {mode}=None")
    if group["differentiable"] and any(is_sharded(p) for p in group["params"]):
        raise HyperparameterError("`differentiable` does not support sharded parameters (DTensor): gather them first")
    if group["granularity"] != "element" and any(getattr(p, "_fsdp_flattened", False) for p in group["params"]):
        raise HyperparameterError(
            f"granularity={group['granularity']!r} pools over whole tensors, "
            "got the flattened parts of FullyShardedDataParallel (FSDP1): use fully_shard (FSDP2), or gates by element"
        )
    if group["fused"]:
        check_one_device({p.device for p in group["params"]})
        for p in group["params"]:
            if not (p.is_floating_point() or p.is_complex()):
                raise DeviceError(f"fused=True supports floating-point parameters, got {p.dtype}: use fused=None")
