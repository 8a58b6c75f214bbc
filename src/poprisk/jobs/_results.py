"""The file of a finished job: whole or not there, and never believed without its checksum."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from poprisk._core.store import fingerprint, write_tensors
from poprisk.errors import DataError

_NOTES = "poprisk"


def result_path(folder: str | Path, key: str) -> Path:
    """Where the result of a job lies; two letters of the key make a folder, so that none grows too long."""
    return Path(folder) / "results" / key[:2] / f"{key}.safetensors"


def write_result(folder: str | Path, key: str, tensors: Mapping[str, Tensor], notes: Mapping[str, Any]) -> Path:
    """Write a result aside and rename it, with a hash over names, dtypes, shapes and bytes inside.

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
    """The tensors of a finished job, after the whole file was checked.

    Raises:
        DataError: the file is missing, torn, changed, or another job's.
    """
    from safetensors.torch import load

    path = result_path(folder, key)
    try:
        content = path.read_bytes()
        tensors = dict(sorted(load(content).items()))
        notes = _notes(content[8 : 8 + int.from_bytes(content[:8], "little")])
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the job is not done; let workers do it") from None
    except OSError:
        raise
    except Exception as error:  # safetensors has an exception of its own for every kind of damage
        raise DataError(f"{path} is damaged ({error}): let a worker do it again, with verify") from None
    if notes.get("key") != key or notes.get("sha256") != fingerprint(tensors):
        raise DataError(f"{path} is damaged: it does not have the SHA-256 it names; let a worker do it again, verify")
    return tensors


def result_notes(folder: str | Path, key: str) -> dict[str, Any] | None:
    """What a result says about itself, if the file is there with all its bytes; the bytes are not read."""
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
