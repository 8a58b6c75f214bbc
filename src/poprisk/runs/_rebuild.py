"""A run's module built again, as it was when the recording began; or why that is not possible here."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from poprisk.errors import RunError
from poprisk.runs._checkpoint import frozen_fingerprint
from poprisk.runs._layout import Layout
from poprisk.runs._problem import Problem

Modes = bool | list[str]
"""Whether all modules are in training mode; where they differ, the names of those in evaluation mode."""


def modes_of(module: nn.Module) -> Modes:
    """Which parts of a module are in training mode, as a JSON value.

    >>> modes_of(nn.Sequential(nn.Linear(2, 2), nn.Dropout()).eval())
    False
    """
    modes = {name: part.training for name, part in module.named_modules()}
    if len(set(modes.values())) == 1:
        return module.training
    return [name for name, training in modes.items() if not training]


def set_modes(module: nn.Module, modes: Modes) -> None:
    """Put every part of a module into the mode it was in.

    Raises:
        RunError: the module has no part of a recorded name.

    >>> module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    >>> set_modes(module, ["1"])
    >>> module[0].training, module[1].training
    (True, False)
    """
    parts = dict(module.named_modules())
    missing = [name for name in modes if name not in parts] if isinstance(modes, list) else []
    if missing:
        raise RunError(
            f"the run had a module {missing[0]!r} in evaluation mode, and the model built here has none of that name: "
            "pass the problem it was recorded with"
        )
    for name, part in parts.items():  # not by train(…), which a class may have overridden
        part.training = modes if isinstance(modes, bool) else name not in modes


def rebuild_module(problem: Problem, manifest: Mapping[str, Any], layout: Layout) -> nn.Module:
    """The module of a run: the recorded dtype, modes and frozen numbers; its weights are those of the seed.

    A manifest from before modes were recorded leaves them as ``make_model`` sets them.

    Raises:
        RunError: names, shapes, frozen parameters or buffers are not the recorded ones.
    """
    module = problem.module()
    if len(set(layout.dtypes)) == 1:
        module = module.to(layout.dtype)
    named = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    if tuple(named) != layout.names or tuple(named.values()) != layout.shapes:
        raise RunError(
            f"problem {problem.name!r} builds another model than the recorded one: names or shapes differ, "
            f"{_first_difference(layout, named)}; pass the problem it was recorded with"
        )
    if frozen_fingerprint(module) != manifest["frozen_sha256"]:
        raise RunError("the model's frozen parameters or buffers are not those recorded: make_model must rebuild them")
    modes = manifest.get("modes")
    if modes is not None:
        set_modes(module, modes)
    return module


def _first_difference(layout: Layout, named: Mapping[str, tuple[int, ...]]) -> str:
    recorded = list(zip(layout.names, layout.shapes, strict=True))
    here = list(named.items())
    for there, now in zip(recorded, here, strict=False):
        if there != now:
            return f"{there[0]} {list(there[1])} there, {now[0]} {list(now[1])} here"
    return f"{len(recorded)} parameters there, {len(here)} here"
