"""How a measurement of the scale benchmark keeps its figures, its time and its errors."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store.files import write_json


class Recorder:
    """Figures of one measurement, on disk after each part."""

    def __init__(self, path: Path, seconds: float, smoke: bool) -> None:
        self.path, self.smoke, self.begin = path, smoke, time.monotonic()
        self.end = self.begin + seconds
        self.figures: dict[str, Any] = {}
        self.device = "cpu" if smoke or not torch.cuda.is_available() else "cuda"

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def note(self, **figures: Any) -> None:
        """More figures."""
        self.figures |= figures
        write_json(self.path, self.figures)

    def reached(self, stage: str) -> None:
        """A stage that is over, with the second at which it was: what a kill leaves as evidence."""
        at = round(time.monotonic() - self.begin, 2)
        self.note(progress=[*self.figures.get("progress", []), [at, stage]])

    @contextmanager
    def part(self, name: str, needs: float = 0.0) -> Iterator[None]:
        """One part: an error is recorded, and the next part goes on; left out where too little time is left."""
        if self.left() < needs:
            self.note(**{f"{name}_left_out": f"{self.left():.0f} s left, {needs:.0f} s needed"})
            raise _Skip
        begin = time.monotonic()
        try:
            yield
        except Exception:
            self.note(**{f"{name}_error": traceback.format_exc(limit=-6)})
            if self.device == "cuda":
                with suppress(RuntimeError):  # after an illegal access nothing works: the next part says so itself
                    torch.cuda.empty_cache()
            raise _Skip from None
        self.note(**{f"{name}_wall_seconds": time.monotonic() - begin})


class _Skip(Exception):
    """A part that gave nothing."""


def parts(recorder: Recorder, steps: list[tuple[str, float, Callable[[], None]]]) -> None:
    for name, needs, function in steps:
        try:
            with recorder.part(name, needs):
                function()
        except _Skip:
            continue


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(function: Callable[[], Any], device: str) -> tuple[float, Any]:
    synchronize(device)
    begin = time.perf_counter()
    value = function()
    synchronize(device)
    return time.perf_counter() - begin, value
