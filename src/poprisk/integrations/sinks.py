"""Places that readings can be written to: TensorBoard, Weights & Biases, a file of JSON lines."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from poprisk._core.store import writable_directory
from poprisk.errors import DataError, HyperparameterError, MissingExtraError
from poprisk.integrations._readings import PREFIX

BINS = 32


@runtime_checkable
class Sink(Protocol):
    """Where readings go; anything with these two methods will do. A line's histograms come before its scalars."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Take the meters of one log line, all finite."""
        ...

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Take a sample of one tensor's coordinates: at least one number, all finite, on the CPU."""
        ...


def as_sink(writer: Any) -> Sink:
    """The sink that writes to a TensorBoard writer or a W&B run; a sink is returned as it is."""
    if isinstance(writer, Sink) and not isinstance(writer, type):
        return writer
    if hasattr(writer, "add_scalar") and hasattr(writer, "add_histogram"):
        return TensorBoardSink(writer)
    if _is_wandb_run(writer):
        return WandbSink(writer)
    if isinstance(writer, ModuleType) and writer.__name__ == "wandb":
        if writer.run is None:
            raise HyperparameterError("wandb has no run yet: call wandb.init(...) first, or give WandbSink(mode=…)")
        return WandbSink(writer.run)
    raise HyperparameterError(
        f"writer must be a SummaryWriter of TensorBoard, a run of wandb, or a Sink (scalars(values, step) and "
        f"histogram(name, values, step)), got {writer!r}: for a plain file give JsonLinesSink(path)"
    )


class TensorBoardSink:
    """Writes to TensorBoard.

    Args:
        target: The directory of the event file, or a ``SummaryWriter`` to share.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, target: Any) -> None:
        self.writer = _summary_writer(target) if isinstance(target, str | os.PathLike) else target

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One curve for each name."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """One slice of the distribution of that name."""
        self.writer.add_histogram(name, values, step)

    def close(self) -> None:
        """Closes the writer, and with it the event file."""
        self.writer.close()


class WandbSink:
    """Writes to Weights & Biases, also without a network: ``WandbSink(mode="offline")``.

    The curves have an axis of their own, ``poprisk/step``, so that they do not depend on how else the run is logged to.

    Args:
        run: A run to share; without it one is begun.
        init: For ``wandb.init``, where a run is begun.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, run: Any = None, **init: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("wandb", "wandb", "logging to Weights & Biases") from error
        if run is not None and (init or not _is_wandb_run(run)):
            raise HyperparameterError(
                f"WandbSink takes a run of wandb, or arguments for a new one, got {type(run).__name__} and {init}"
            )
        self.run = wandb.init(**init) if run is None else run
        self.run.define_metric(f"{PREFIX}step", hidden=True)
        self._histogram = wandb.Histogram
        self._waiting: dict[str, Any] = {}
        self._axes: set[str] = set()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One line of the run's history, with the histograms that came for it."""
        line = {**self._waiting, **values}
        self._waiting = {}
        for name in line.keys() - self._axes:  # by name: with other prefixes there is no common pattern
            self.run.define_metric(name, step_metric=f"{PREFIX}step")
            self._axes.add(name)
        self.run.log({**line, f"{PREFIX}step": step})

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Kept for the line of scalars: W&B counts every call as a step of its own."""
        self._waiting[name] = self._histogram(np_histogram=_counted(values))

    def close(self) -> None:
        """Finishes the run."""
        self.run.finish()


class JsonLinesSink:
    """Appends one line of JSON per log line to a file, and needs nothing but this package.

    Each line is whole on the disk before training goes on. A line that a killed process left unfinished is removed when
    the file is opened again, and not read by :meth:`read`.

    Args:
        path: The file; our lines in it are kept, a file with anything else is refused.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "meters.jsonl"
        >>> JsonLinesSink(path).scalars({"poprisk/mean_gate": 0.5}, step=10)
        >>> JsonLinesSink.read(path)
        [{'step': 10, 'poprisk/mean_gate': 0.5}]
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        writable_directory(self.path.parent)
        if self.path.exists():
            content = self.path.read_bytes()
            whole, _, tail = content.rpartition(b"\n")
            if tail and not whole and not tail.startswith(b'{"step": '):
                raise DataError(f"{path} holds something else than our log lines: give the name of a new file")
            if whole:
                _parsed(whole.split(b"\n")[0], f"line 1 of {path}")
            os.truncate(self.path, content.rfind(b"\n") + 1)
        self._waiting: dict[str, Any] = {}

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """One line: the step, the meters, and under ``histograms`` what came for it."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, **finite, **({"histograms": self._waiting} if self._waiting else {})}
        self._waiting = {}
        _append(self.path, json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Kept for the line of scalars, as counts between edges."""
        counts, edges = _counted(values)
        self._waiting[name] = {"counts": counts.tolist(), "edges": edges.tolist()}

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """The lines of such a file, in the order of their steps.

        An unfinished last line is left out. Where a run was resumed from an earlier step, the lines from there on are
        those of the resumed run.

        Raises:
            DataError: a finished line is not one of ours.
        """
        whole = Path(path).read_bytes().rpartition(b"\n")[0]
        lines: list[dict[str, Any]] = []
        for count, text in enumerate(whole.split(b"\n") if whole else [], start=1):
            line = _parsed(text, f"line {count} of {path}")
            while lines and lines[-1]["step"] >= line["step"]:
                lines.pop()
            lines.append(line)
        return lines


def _counted(values: Tensor) -> tuple[Any, Any]:
    return np.histogram(values.numpy().astype(np.float64), bins=BINS)


def _is_wandb_run(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "wandb" and hasattr(x, "define_metric")


def _summary_writer(directory: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("tensorboard", "tensorboard", "logging to TensorBoard") from error
    return SummaryWriter(os.fspath(directory))


def _append(path: Path, line: bytes) -> None:
    """Adds a line, or, where the disk is full, leaves the file as it was."""
    with open(path, "ab") as file:
        before = file.tell()
        try:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def _parsed(text: bytes, place: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int):
        raise DataError(f"{place} must be a JSON object with a step, got {text[:60]!r}: is this a file of meters?")
    return line
