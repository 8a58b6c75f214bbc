"""Checkpoints: weights and optimizer state as named tensors, and the module they belong to.

Resumed runs and replays start from a checkpoint.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk._core.store import fingerprint
from poprisk.errors import RunError
from poprisk.runs._layout import Layout
from poprisk.runs._linearize import OPTIMIZERS, flat_buffer
from poprisk.runs._problem import Problem

WEIGHTS, _STATE, MODULE_BUFFER = "checkpoint.weights", "checkpoint.state.", "checkpoint.module."


def capture(layout: Layout, parameters: Sequence[Tensor], optimizer: Optimizer) -> dict[str, Tensor]:
    """Copies of the flat weights and of all state tensors, the latter by entry and parameter name."""
    tensors = {WEIGHTS: layout.flatten(parameters)}
    for name, p in zip(layout.names, parameters, strict=True):
        for key, value in optimizer.state[p].items() if p in optimizer.state else ():
            if isinstance(value, Tensor):
                tensors[f"{_STATE}{key}.{name}"] = value.detach().clone()
    return tensors


def capture_buffers(module: nn.Module, known: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Copies of the module's buffers that differ from the known ones."""
    now = dict(module.named_buffers())
    changed = (name for name, b in now.items() if (old := known.get(name)) is None or not torch.equal(b, old))
    return {MODULE_BUFFER + name: now[name].detach().clone() for name in changed}


def frozen_fingerprint(module: nn.Module) -> str:
    """SHA-256 of the frozen parameters and the buffers."""
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    return fingerprint({**frozen, **dict(module.named_buffers())})


def weights_of(tensors: Mapping[str, Tensor]) -> Tensor:
    """The flat weights of a checkpoint."""
    return tensors[WEIGHTS].clone()


def buffer_of(tensors: Mapping[str, Tensor], layout: Layout) -> Tensor:
    """The momentum buffer of a checkpoint, zero if there is none."""
    pieces = layout.split(tensors[WEIGHTS])
    buffer = flat_buffer(layout, [_state_of(tensors, name) for name in layout.names], pieces)
    return torch.zeros_like(tensors[WEIGHTS]) if buffer is None else buffer


def restore(
    tensors: Mapping[str, Tensor],
    layout: Layout,
    module: nn.Module,
    parameters: Sequence[Tensor],
    optimizer: Optimizer,
    options: Sequence[Mapping[str, Any]],
) -> None:
    """Restore module and optimizer from a checkpoint."""
    with torch.no_grad():
        for p, piece in zip(parameters, layout.split(tensors[WEIGHTS]), strict=True):
            p.copy_(piece)
        for name, buffer in module.named_buffers():
            if MODULE_BUFFER + name in tensors:
                buffer.copy_(tensors[MODULE_BUFFER + name])
    states = {id(p): _state_of(tensors, name) for name, p in zip(layout.names, parameters, strict=True)}
    state_dict = optimizer.state_dict()
    order = [p for group in optimizer.param_groups for p in group["params"]]
    state_dict["state"] = {i: states[id(p)] for i, p in enumerate(order) if states[id(p)]}
    optimizer.load_state_dict(state_dict)
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        set_options(group, saved)


def rebuild_optimizer(
    name: str, options: Sequence[Mapping[str, Any]], layout: Layout, parameters: Sequence[Tensor]
) -> Optimizer:
    """A new optimizer of the recorded kind over these parameters, with the recorded groups and options."""
    kind: Any = OPTIMIZERS[name]
    groups = [
        {**{key: _parsed(value) for key, value in saved.items()}, "params": members}
        for g, saved in enumerate(options)
        if (members := [p for p, group in zip(parameters, layout.groups, strict=True) if group == g])
    ]
    if len(groups) != len(options):
        raise RunError("the recorded optimizer had an empty parameter group: record with an optimizer without one")
    return kind(groups)


def plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group's options as JSON values."""
    return {key: _plain(value) for key, value in group.items() if key not in ("params", "param_names")}


def set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Set recorded options in a parameter group; an option that is a tensor is changed in place."""
    for key, value in options.items():
        if isinstance(group.get(key), Tensor):
            group[key].fill_(value)
        else:
            group[key] = _parsed(value)


def _state_of(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    found = {}
    for key, tensor in tensors.items():
        entry, _, owner = key.removeprefix(_STATE).partition(".")
        if key.startswith(_STATE) and owner == name:
            found[entry] = tensor.clone()
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("torch."):
        found = getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(found, torch.dtype):
            raise RunError(
                f"the recorded option {value!r:.60} is not a data type of torch: restore the run from a copy"
            )
        return found
    if isinstance(value, Mapping):
        return {key: _parsed(entry) for key, entry in value.items()}
    return tuple(_parsed(entry) for entry in value) if isinstance(value, list) else value


Modes = bool | list[str]
"""Whether all submodules are in training mode; if they differ, the names of those in evaluation mode."""


def modes_of(module: nn.Module) -> Modes:
    """Which submodules are in training mode, as a JSON value.

    >>> modes_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval())
    False
    """
    modes = {name: part.training for name, part in module.named_modules()}
    if len(set(modes.values())) == 1:
        return module.training
    return [name for name, training in modes.items() if not training]


def set_modes(module: nn.Module, modes: Modes) -> None:
    """Set the recorded mode of every submodule.

    Raises:
        RunError: a recorded submodule is missing.

    >>> module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> set_modes(module, ["1"])
    >>> module[0].training, module[1].training
    (True, False)
    """
    parts = dict(module.named_modules())
    missing = [name for name in modes if name not in parts] if isinstance(modes, list) else []
    if missing:
        raise RunError(
            f"the run had a submodule {missing[0]!r} in evaluation mode, but the model built here has none of that "
            "name: pass the problem that was recorded"
        )
    for name, part in parts.items():  # not by train(…), which a class may have overridden
        part.training = modes if isinstance(modes, bool) else name not in modes


def rebuild_module(problem: Problem, manifest: Mapping[str, Any], layout: Layout) -> nn.Module:
    """The module of a run, with the recorded dtype and modes and the problem's initial weights.

    If the manifest has no modes (an early version did not record them), they stay as ``make_model`` sets them.

    Raises:
        RunError: names, shapes, frozen parameters or buffers differ from the recorded ones.
    """
    module = problem.module()
    if len(set(layout.dtypes)) == 1:
        module = module.to(layout.dtype)
    named = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    if tuple(named) != layout.names or tuple(named.values()) != layout.shapes:
        raise RunError(
            f"problem {problem.name!r} builds a model that differs from the recorded one in names or shapes: "
            f"{_first_difference(layout, named)}; pass the problem that was recorded"
        )
    if frozen_fingerprint(module) != manifest["frozen_sha256"]:
        raise RunError(
            "the model's frozen parameters or buffers differ from the recorded ones: make_model must build the same"
        )
    modes = manifest.get("modes")
    if modes is not None:
        set_modes(module, modes)
    return module


def _first_difference(layout: Layout, named: Mapping[str, tuple[int, ...]]) -> str:
    recorded = list(zip(layout.names, layout.shapes, strict=True))
    here = list(named.items())
    for there, now in zip(recorded, here, strict=False):
        if there != now:
            return f"{there[0]} {list(there[1])} was recorded, {now[0]} {list(now[1])} was built"
    return f"{len(recorded)} parameters were recorded, {len(here)} were built"
