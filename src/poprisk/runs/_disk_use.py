"""Estimates of the disk space that a recording needs, announced before anything is written."""

import logging
import math
import shutil
import warnings
from pathlib import Path

from torch import nn
from torch.optim import SGD, Optimizer

from poprisk.errors import PopRiskWarning, RunError
from poprisk.runs._layout import Layout, layout_of

_LOG = logging.getLogger("poprisk.runs")
_SEGMENT_BYTES, _SEGMENT_STEPS, _LARGE = 32 * 2**20, 256, 2**30
_DENSE, _MOST_CHECKPOINTS = 2**30, 50


def usual_segment(layout: Layout) -> int:
    """Number of steps per file of a dense run: about 32 MiB, at most 256 steps."""
    step = 3 * layout.size * layout.dtype.itemsize
    return max(1, min(_SEGMENT_STEPS, _SEGMENT_BYTES // step))


def bytes_per_step(optimizer: Optimizer, layout: Layout, every: int, segment_steps: int) -> float:
    """Bytes of weights, preconditioner and buffer of one step, and a share of the checkpoint at the end of the file."""
    groups = optimizer.param_groups
    if isinstance(optimizer, SGD):
        momentum = any(group["momentum"] for group in groups)
        vectors, state = 1 + momentum, int(momentum)
    else:
        vectors = 3 + any(group.get("gated_decay", False) for group in groups)
        third = any(g.get("amsgrad") or (g.get("gate") and g.get("state") != "shared") for g in groups)
        state = 2 + third
    dense = vectors if every == 1 else 0
    return layout.size * layout.dtype.itemsize * (dense + (1 + state) / segment_steps)


def usual_interval(module: nn.Module, optimizer: Optimizer, steps: int | None) -> int:
    """1 if the weights of all steps fit into a gibibyte, otherwise the interval with which checkpoints do."""
    layout, _ = layout_of(module, optimizer)
    steps = steps or 1000
    if bytes_per_step(optimizer, layout, 1, usual_segment(layout)) * steps <= _DENSE:
        return 1
    checkpoint = bytes_per_step(optimizer, layout, 2, 1)
    return math.ceil(steps / max(1, min(_MOST_CHECKPOINTS, int(_DENSE // checkpoint))))


def announce(path: Path, total: int, steps: int | None) -> None:
    """Log the estimate, and warn if it is over a gibibyte.

    Raises:
        RunError: the planned steps do not fit on the disk.
    """
    planned = f"{steps} steps" if steps else "1000 steps (steps= was not given)"
    text = f"recording into {path}: about {readable_size(total)} for {planned}"
    _LOG.info(text)
    if total > _LARGE:
        warnings.warn(f"{text}; a larger every= needs less", PopRiskWarning, stacklevel=2)
    there = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    if steps and total > free:
        raise RunError(
            f"recording {planned} needs about {readable_size(total)}, but {path} has {readable_size(free)} free: use a "
            "larger every="
        )


def readable_size(count: int | float) -> str:
    """Format a number of bytes in a readable unit.

    >>> readable_size(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
