"""What workers write: the result of each job, used only after its checksum was verified, and a log."""

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from poprisk._core.store import append_line, fingerprint, write_tensors
from poprisk.errors import DataError

_NOTES = "poprisk"


def result_path(folder: str | Path, key: str) -> Path:
    """File of a job's result; results are spread over folders named by two letters of the key."""
    return Path(folder) / "results" / key[:2] / f"{key}.safetensors"


def write_result(folder: str | Path, key: str, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> Path:
    """Write a result to a temporary file and rename it; it contains a hash of names, dtypes, shapes and bytes.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = write_result(folder, "ab12", {"x": torch.arange(2)}, {"worker": "one"})
    ...     read_result(folder, "ab12")["x"], result_notes(folder, "ab12")["worker"]
    (tensor([0, 1]), 'one')
    """
    path, ordered = result_path(folder, key), dict(sorted(tensors.items()))
    write_tensors(path, ordered, {**notes, "key": key, "sha256": fingerprint(ordered)})
    return path


def read_result(folder: str | Path, key: str) -> dict[str, Tensor]:
    """The tensors of a finished job; the whole file is verified.

    Raises:
        DataError: the file is missing, damaged, or belongs to another job.
    """
    from safetensors.torch import load

    path = result_path(folder, key)
    try:
        content = path.read_bytes()
        tensors = dict(sorted(load(content).items()))
        notes = _notes(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the job is not done; start a worker") from None
    except OSError:
        raise
    except Exception as error:  # safetensors raises its own exceptions for damaged files
        raise DataError(f"{path} is damaged ({error}): start a worker with verify to compute it again") from None
    if notes.get("key") != key or notes.get("sha256") != fingerprint(tensors):
        raise DataError(f"{path} is damaged: wrong SHA-256; start a worker with verify to compute it again")
    return tensors


def result_notes(folder: str | Path, key: str) -> dict[str, Any] | None:
    """The notes stored with a result if the file is complete, else None; the tensors are not read."""
    try:
        with open(result_path(folder, key), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            header = file.read(length) if length < size else b""
            ends = [part["data_offsets"][1] for name, part in json.loads(header).items() if name != "__metadata__"]
            notes = _notes(header)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return notes if notes.get("key") == key and size == 8 + length + max(ends, default=0) else None


def _notes(header: bytes) -> dict[str, Any]:
    return json.loads(json.loads(header)["__metadata__"][_NOTES])


class WorkerLog:
    """The append-only log of one worker, ``log/NAME.jsonl``; times are local and informative only."""

    def __init__(self, folder: str | Path, worker: str) -> None:
        self._path = Path(folder) / "log" / f"{worker}.jsonl"

    def add(self, event: str, **what: Any) -> None:
        """Appends one event: joined, start, done, failed, released or left."""
        append_line(self._path, json.dumps({"event": event, "time": round(time.time(), 3), **what}))


def read_logs(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Every line of every worker, with the worker's name; lines that a killed worker left incomplete are skipped."""
    for path in sorted((Path(folder) / "log").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                read = json.loads(line)
            except ValueError:
                continue
            yield {"worker": path.stem, **read}
