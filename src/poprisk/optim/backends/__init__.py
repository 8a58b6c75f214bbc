"""Implementations of a step, all with the same result; chooses one for each parameter group, as torch does."""

import warnings
from functools import cache
from typing import Any

from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from poprisk.errors import BackendWarning
from poprisk.optim._updates import GroupUpdate
from poprisk.optim.backends import _foreach as foreach
from poprisk.optim.backends import _forloop as forloop
from poprisk.optim.backends import _torch_adamw as torch_adamw


def run(update: GroupUpdate) -> None:
    """Performs the step of one parameter group."""
    if not update.params:
        return
    if torch_adamw.can_serve(update):
        torch_adamw.step(update)
        return
    group = update.group
    if group["fused"] and not group["differentiable"]:
        _run_fused(update)
    elif _use_foreach(group, [w.local for w in update.params]):
        foreach.step(update)
    else:
        forloop.step(update)


def _use_foreach(group: dict[str, Any], params: list[Tensor]) -> bool:
    """Torch's rule: the user's choice, otherwise foreach where all parameters are on a device that benefits from it."""
    if group["foreach"] is not None:
        return bool(group["foreach"])
    if group["fused"] is not None:
        return False
    _, default = _default_to_fused_or_foreach(params, group["differentiable"], use_fused=False)
    return default and not (isinstance(group["lr"], Tensor) and not group["capturable"])


def _run_fused(update: GroupUpdate) -> None:
    """Uses the single-pass kernel for the parameters it supports, and the rule for the others."""
    from poprisk.optim.backends import _cpu as cpu  # a third of the package's import time, for those who ask for it
    from poprisk.optim.backends import _cuda as cuda
    from poprisk.optim.backends._compiler import BuildError
    from poprisk.optim.backends._launch import LaunchCache, one_pass

    device = update.params[0].local.device.type
    backend = cpu if device == "cpu" else cuda
    if device == "cuda" and not cuda.available():
        fall_back("the fused CUDA kernel needs Triton, which is not installed")
        foreach.step(update)
        return
    last = LaunchCache.of(update)
    if last is not None:
        backend.repeat(update, last)
        return
    served = [w for w in update.params if one_pass(update, w, backend.WEIGHTS)]
    if len(served) < len(update.params):
        fall_back(f"the fused kernel does not support {describe(update)}")
        chosen = {id(w) for w in served}
        for param in update.params:
            if id(param) not in chosen:
                forloop.step_one(update, param)
    if not served:
        return
    try:
        backend.step(update, served)
    except BuildError as error:  # raised before any state is touched
        fall_back(f"the fused CPU kernel cannot be built ({error})")
        for param in served:
            forloop.step_one(update, param)


def describe(update: GroupUpdate) -> str:
    """The reason why the single-pass kernel does not support this group."""
    if update.hyper.granularity != "element":
        return f"granularity={update.hyper.granularity!r}, which needs two passes"
    if update.hyper.normalize_gate:
        return "normalize_gate=True, which needs two passes"
    return "this combination of dtypes or memory layouts"


@cache
def fall_back(reason: str) -> None:
    """Warns once per reason that a slower path with the same result is used."""
    warnings.warn(f"{reason}; a slower path with the same result is used", BackendWarning, stacklevel=2)
