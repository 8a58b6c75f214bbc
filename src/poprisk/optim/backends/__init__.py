"""Implementations of a step, all with the same result; chooses one for each parameter group, as torch does."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _default_to_fused_or_foreach

from poprisk.errors import BackendWarning
from poprisk.optim._shards import PLAIN, coordinates
from poprisk.optim._updates import SCALE, GroupUpdate, ParamUpdate
from poprisk.optim.backends import _foreach as foreach
from poprisk.optim.backends import _forloop as forloop
from poprisk.optim.backends import _torch_adamw as torch_adamw


def run(update: GroupUpdate) -> None:
    """Performs the step of one parameter group."""
    if not update.params:
        return
    last = update.memory.launch
    if last is not None and last.update is update:
        _kernels(update).repeat(update, last)
        _over_processes(update, update.params)
        return
    update.memory.launch = None
    adamw = torch_adamw.can_serve(update)
    in_pass = bool(update.group["fused"]) and any(p.mean is not None for p in update.params)
    if adamw and not in_pass:  # AdamW bit for bit; whoever keeps the means moves them after the step
        torch_adamw.step(update)
    elif _may_fuse(update):
        _run_fused(update, torch_adamw.step if adamw else _run_unfused)
    elif adamw:  # fused=True, and differentiable
        torch_adamw.step(update)
    else:
        _run_unfused(update)


def _may_fuse(update: GroupUpdate) -> bool:
    """Whether a single-pass kernel is wanted: if the user says so, and by default on the CPU for plain tensors."""
    group = update.group
    if group["differentiable"] or group["fused"] is not None or group["foreach"] is not None:
        return bool(group["fused"]) and not group["differentiable"]
    devices = {p.local.device for p in update.params}
    plain = all(type(p.local) in PLAIN and type(p.grad) in PLAIN for p in update.params)
    # on CUDA only with fused=True, until the kernels of normalized gates and averages have been tested on a GPU
    return plain and devices == {torch.device("cpu")}


def _run_unfused(update: GroupUpdate) -> None:
    if _use_foreach(update.group, [w.local for w in update.params]):
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


def _kernels(update: GroupUpdate) -> Any:
    """The backend for the device of the parameters, imported here: a third of the package's import time."""
    if update.params[0].local.device.type == "cpu":
        from poprisk.optim.backends import _cpu as kernels
    else:
        from poprisk.optim.backends import _cuda as kernels
    return kernels


def _run_fused(update: GroupUpdate, otherwise: Callable[[GroupUpdate], None]) -> None:
    """Uses the single-pass kernel for the parameters it supports, and another path for the others.

    Warns about the slower path if the user has asked for this one.
    """
    from poprisk.optim.backends._compiler import BuildError
    from poprisk.optim.backends._launch import mean_fits, one_pass

    gated, kernels = otherwise is _run_unfused, _kernels(update)
    reason, served = kernels.unavailable(), []
    if reason:
        otherwise = foreach.step if gated and update.params[0].local.is_cuda else otherwise
    else:
        served = [p for p in update.params if one_pass(update, p, kernels.WEIGHTS)]
        if len(served) < len(update.params):
            reason, served = f"the fused kernel does not support {describe(update)}", served if gated else []
    if served:
        for p in served:
            p.mean = p.mean if update.found_inf is None and mean_fits(p) else None
        try:
            kernels.step(update, served)
        except BuildError:  # raised before any state is touched
            reason, served = kernels.unavailable(), []
    if reason and gated and update.group["fused"]:
        fall_back(reason)
    chosen = {id(p) for p in served}
    left = [p for p in update.params if id(p) not in chosen]
    if left:
        otherwise(replace(update, params=left))
    _over_processes(update, served)


def _over_processes(update: GroupUpdate, params: list[ParamUpdate]) -> None:
    """Turns the means that a kernel took over the local parts of sharded tensors into means over the whole ones."""
    if not update.hyper.in_adamw_units or all(p.shard is None for p in params):
        return
    means = foreach.Means()
    for p in params:
        if p.shard is not None:
            scale = p.state[SCALE].clone()
            scale[0] *= coordinates(p.local)
            means.waiting.append((p, scale))
    means.write()


def describe(update: GroupUpdate) -> str:
    """The reason why the single-pass kernel does not support this group."""
    if update.hyper.granularity != "element":
        return f"granularity={update.hyper.granularity!r}, which needs two passes"
    return "this combination of dtypes or memory layouts"


@cache
def fall_back(reason: str) -> None:
    """Warns once per reason that a slower path with the same result is used."""
    warnings.warn(f"{reason}; a slower path with the same result is used", BackendWarning, stacklevel=2)
