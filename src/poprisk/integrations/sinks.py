"""Where readings are written: TensorBoard, Weights & Biases, or a file of JSON lines."""

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
    """Anything with these two methods can receive readings. The histograms of a line come before its scalars."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write the values of one log line, all finite."""
        ...

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Write a sample of one tensor's entries: at least one number, all finite, on the CPU."""
        ...


def as_sink(writer: Any) -> Sink:
    """The sink for a TensorBoard writer or a W&B run; a sink is returned unchanged."""
    if isinstance(writer, Sink) and not isinstance(writer, type):
        return writer
    if hasattr(writer, "add_scalar") and hasattr(writer, "add_histogram"):
        return TensorBoardSink(writer)
    if _is_wandb_run(writer):
        return WandbSink(writer)
    if isinstance(writer, ModuleType) and writer.__name__ == "wandb":
        if writer.run is None:
            raise HyperparameterError("wandb has no run yet: call wandb.init(…) first, or use WandbSink(mode=…)")
        return WandbSink(writer.run)
    raise HyperparameterError(
        "writer must be a TensorBoard SummaryWriter, a wandb run, or a Sink with scalars(values, step) and "
        f"histogram(name, values, step), got {writer!r}; to write to a file, use JsonLinesSink(path)"
    )


class TensorBoardSink:
    """Write to TensorBoard.

    Args:
        target: Directory of the event file, or an existing ``SummaryWriter``.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, target: Any) -> None:
        self.writer = _summary_writer(target) if isinstance(target, str | os.PathLike) else target

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write one curve per name."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Write one slice of the distribution of that name."""
        self.writer.add_histogram(name, values, step)

    def close(self) -> None:
        """Close the writer and its event file."""
        self.writer.close()


class WandbSink:
    """Write to Weights & Biases; ``WandbSink(mode="offline")`` needs no network.

    The curves have their own axis, ``poprisk/step``, so they do not depend on what else is logged to the run.

    Args:
        run: An existing run; without it, a new one is started.
        init: Arguments for ``wandb.init``, if a new run is started.

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
                f"WandbSink takes a wandb run or arguments for a new one, got {type(run).__name__} and {init}"
            )
        self.run = wandb.init(**init) if run is None else run
        self.run.define_metric(f"{PREFIX}step", hidden=True)
        self._histogram = wandb.Histogram
        self._waiting: dict[str, Any] = {}
        self._axes: set[str] = set()

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write one line of the run's history, with its histograms."""
        line = {**self._waiting, **values}
        self._waiting = {}
        for name in line.keys() - self._axes:  # by name: with other prefixes there is no common pattern
            self.run.define_metric(name, step_metric=f"{PREFIX}step")
            self._axes.add(name)
        self.run.log({**line, f"{PREFIX}step": step})

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Keep a histogram for the next line, since W&B counts every call as a step."""
        self._waiting[name] = self._histogram(np_histogram=_counted(values))

    def close(self) -> None:
        """Finish the run."""
        self.run.finish()


class JsonLinesSink:
    """Append one line of JSON per log line to a file; needs no other package.

    Each line is completely on disk before training continues. An incomplete line left by a killed process is removed
    when the file is opened again, and ignored by :meth:`read`.

    Args:
        path: The file. Existing log lines are kept; a file with other contents gives an error.

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
                raise DataError(f"{path} does not contain log lines of JsonLinesSink: choose a new file")
            if whole:
                _parsed(whole.split(b"\n")[0], f"line 1 of {path}")
            os.truncate(self.path, content.rfind(b"\n") + 1)
        self._waiting: dict[str, Any] = {}

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Write one line: the step, the values, and the histograms under ``histograms``."""
        finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
        line = {"step": step, **finite, **({"histograms": self._waiting} if self._waiting else {})}
        self._waiting = {}
        _append(self.path, json.dumps(line, ensure_ascii=False, allow_nan=False).encode() + b"\n")

    def histogram(self, name: str, values: Tensor, step: int) -> None:
        """Keep a histogram for the next line, as counts between edges."""
        counts, edges = _counted(values)
        self._waiting[name] = {"counts": counts.tolist(), "edges": edges.tolist()}

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Read the lines of such a file, in the order of their steps.

        An incomplete last line is ignored. If a run was resumed from an earlier step, later lines of the first run are
        dropped.

        Raises:
            DataError: A complete line is not a log line.
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
    """Append a line; if the disk is full, leave the file unchanged."""
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
        raise DataError(
            f"{place} must be a JSON object with a step, got {text[:60]!r}: is this a log of JsonLinesSink?"
        )
    return line
