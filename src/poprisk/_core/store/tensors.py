"""Tensor files in the safetensors format, verified by a size and SHA-256 that are kept elsewhere."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, uint8

from poprisk._core.store.files import write_bytes
from poprisk._core.store.reading import member, parsed_json, read_regular, regular_size
from poprisk.errors import DataError

# One key only: safetensors writes several keys in an order that changes from process to process.
_NOTES = "poprisk"


@dataclass(frozen=True)
class TensorFile:
    """Name, size and hash of a file."""

    name: str
    size: int
    sha256: str


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], notes: Any = None) -> TensorFile:
    """Write named tensors and a JSON value; the same content gives the same bytes.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = write_tensors(f"{folder}/x.safetensors", {"x": torch.arange(3)}, {"step": 7})
    ...     tensors, notes = read_tensors(folder, file)
    >>> tensors["x"], notes
    (tensor([0, 1, 2]), {'step': 7})
    """
    from safetensors.torch import save

    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = save(plain, {_NOTES: json.dumps(notes)})
    write_bytes(path, content)
    return TensorFile(Path(path).name, len(content), hashlib.sha256(content).hexdigest())


def check_size(folder: str | Path, file: TensorFile) -> Path:
    """The file's path, after checking that it exists and has the expected size."""
    path = member(folder, file.name)
    try:
        size = regular_size(path)
    except OSError:
        raise _missing(path) from None
    if size != file.size:
        raise DataError(f"{path} is damaged: expected {file.size} bytes, got {size}; restore it from a copy")
    return path


def _missing(path: Path) -> DataError:
    return DataError(f"{path} is missing: restore it from a copy, or create it again")


def read_tensors(folder: str | Path, file: TensorFile) -> tuple[dict[str, Tensor], Any]:
    """Read tensors (on the CPU) and notes from a file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = check_size(folder, file)
    try:
        content = read_regular(path)
    except FileNotFoundError:  # removed since
        raise _missing(path) from None
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataError(f"{path} is damaged: its content does not have the recorded SHA-256; restore it from a copy")
    try:
        tensors = load(content)
        header = parsed_json(content[8 : 8 + int.from_bytes(content[:8], "little")], path)
        return tensors, parsed_json(header["__metadata__"][_NOTES], path)
    except (SafetensorError, KeyError, TypeError) as error:
        raise _strange(path, error) from None


def _strange(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is not a file of tensors as poprisk writes it ({error}): create it again")


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes: the same on every device, different if any bit differs.

    >>> import torch
    >>> x = torch.zeros(2)
    >>> fingerprint({"x": x}) == fingerprint({"x": x.clone()}), fingerprint({"x": x}) == fingerprint({"x": -x})
    (True, False)
    """
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(plain.reshape(-1).view(uint8).numpy().data)
    return digest.hexdigest()
