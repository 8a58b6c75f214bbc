"""Seconds of a call: warm, synchronised, the median of several.

On a CPU they are seconds of processor time, all threads together: a machine may be shared with others.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

# Calls shorter than this are timed several together.
_SHORT = 0.01
_MOST_TOGETHER = 20


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def median_seconds(
    call: Callable[[], Any], device: str, *, repeats: int = 5, limit: float = 0.6
) -> tuple[float, list[float]]:
    """The median and all of them; at least one, and no further one begins after ``limit`` seconds."""
    first = _timed(call, 1, device)  # loads what the first call loads
    if first < limit:
        _timed(call, 1, device)
    once = _timed(call, 1, device)
    together = max(1, min(_MOST_TOGETHER, int(_SHORT / max(once, 1e-9))))
    begin, found = time.perf_counter(), [once] if together == 1 else []
    while not found or (len(found) < repeats and time.perf_counter() - begin + once < limit):
        found.append(_timed(call, together, device))
    return statistics.median(found), found


def _timed(call: Callable[[], Any], times: int, device: str) -> float:
    clock = time.perf_counter if device == "cuda" else time.process_time
    synchronize(device)
    begin = clock()
    for _ in range(times):
        call()
    synchronize(device)
    return (clock() - begin) / times
