"""What a run says about itself: versions, numerics, problem, and what stands in the way of exact analyses."""

import json
from datetime import UTC, datetime
from functools import cache
from typing import Any

import torch
from torch import nn

from poprisk._core.autodiff import ExampleLoss
from poprisk._core.store import environment, importable
from poprisk.errors import RunError
from poprisk.runs._checkpoint import frozen_fingerprint
from poprisk.runs._formats import FORMAT_VERSION
from poprisk.runs._gradients import randomness_of
from poprisk.runs._layout import Layout
from poprisk.runs._problem import Problem
from poprisk.runs._rebuild import modes_of


def describe_training(module: nn.Module, problem: Problem | None, loss: str | ExampleLoss) -> dict[str, Any]:
    """The part of a manifest that does not depend on how it is recorded."""
    return {
        "format_version": FORMAT_VERSION,
        "kind": "run",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": _environment(),
        "numerics": numerics(next(module.parameters()).device),
        "problem": None if problem is None else problem.description,
        "loss": {"name": loss} if isinstance(loss, str) else importable(loss).as_json(),
        "frozen_sha256": frozen_fingerprint(module),
        "modes": modes_of(module),
    }


def numerics(device: torch.device) -> dict[str, Any]:
    """What decides on bits beside versions."""
    return {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch_seed": torch.initial_seed(),
    }


def obstacles(module: nn.Module, layout: Layout, augmentation: str | None) -> list[str]:
    """Why no exact analysis will be possible, in words."""
    found = [randomness_of(module)]
    low = sorted({d for d in layout.dtypes if d not in ("torch.float32", "torch.float64")})
    if low:
        found.append(f"the weights are {low[0]}, too coarse for exact work: train in float32 or float64")
    if augmentation == "unseeded":
        found.append("inputs were changed at random without a seed: use problem.augment with step.generator")
    return [text for text in found if text is not None]


def check_same_run(manifest: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuses to go on with a run that was set up otherwise.

    Raises:
        RunError: with the first thing that differs.
    """
    problem = manifest["problem"] and manifest["problem"]["fingerprint"]
    there = {**manifest, "optimizer": manifest["optimizer"]["name"], "problem": problem}
    for what, value in here.items():
        if there[what] != value:
            shown = "they differ" if what in ("layout", "problem") else f"{there[what]} there, {value} here"
            raise RunError(f"the directory holds another run ({what}: {shown}): record into another one")


def plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value))


@cache
def _environment() -> dict[str, Any]:
    """Asked once per process: it looks for the commit."""
    return environment()
