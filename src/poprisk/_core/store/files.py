"""Atomic files: written to a temporary file, flushed to disk, then renamed."""

import io
import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable


@runtime_checkable
class Figure(Protocol):
    """Interface of a figure, as in matplotlib."""

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        """Draw into a file-like object."""
        ...


def write_text(path: str | Path, text: str) -> Path:
    """Write UTF-8 text with Unix line endings."""
    return write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> Path:
    """Write a JSON document, lists of numbers on one line; NaN and infinity become null."""
    return write_text(path, _json(value, "") + "\n")


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write bytes atomically: other processes see the old content or the new, never a part."""
    with atomic_file(path) as file:
        file.write(content)
    return Path(path)


def write_figure(path: str | Path, figure: Figure, dpi: int = 200) -> Path:
    """Write a figure in the format given by the file's suffix; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    kind = Path(path).suffix.removeprefix(".") or "png"
    undated: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(buffer, format=kind, dpi=dpi, metadata=undated.get(kind))
    return write_bytes(path, buffer.getvalue())


def append_line(path: str | Path, line: str) -> None:
    """Append a line in a single write, so that it is complete or absent.

    Raises:
        OSError: the directory cannot be created or written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to that replaces ``path`` when the block ends, and is removed if the block fails.

    The parent directory is created if it does not exist. A symbolic link is replaced, not followed: anyone may have put
    it there, and it may lead anywhere.

    Raises:
        OSError: the directory cannot be created or written; the path is a directory or a device; the disk is full.
    """
    target = _replaceable(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(aside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, target)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    _flush_directory(target.parent)


def writable_directory(path: str | Path) -> Path:
    """Create the directory if it does not exist, and check that files can be written to it."""
    directory = Path(path)
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"the output directory must be a folder, but {path} is a file; choose another name")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / f".{secrets.token_hex(6)}.tmp"
        probe.touch(exist_ok=False)
        probe.unlink(missing_ok=True)  # the writer of a run removes what it takes for a dead one's
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(f"cannot write to the output directory {path}: {reason}; choose another one") from None
    return directory


def writable_file(path: str | Path) -> None:
    """Check that a file can be written, before anything slow; its directory is created if it does not exist.

    Raises:
        OSError: the path is a directory, a pipe, a device or a file of a run, or its directory cannot be written.
    """
    target = _replaceable(path)
    if target.exists() and target.suffix in {".json", ".safetensors"} and (target.parent / "manifest.json").is_file():
        raise FileExistsError(f"the output would replace {path}, a file of a recorded run; choose another name")
    writable_directory(target.parent)


def _replaceable(path: str | Path) -> Path:
    """The path, if a file may take its place."""
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"the output must be a file, but {path} is a directory; name a file, e.g. in it")
    if target.exists() and not (target.is_file() or target.is_symlink()):
        raise FileExistsError(f"the output must be a file, but {path} is a pipe or a device; choose another name")
    return target


def _json(value: Any, indent: str) -> str:
    inner = indent + " "
    if isinstance(value, dict) and value:
        items = (f"{inner}{json.dumps(str(key), ensure_ascii=False)}: {_json(x, inner)}" for key, x in value.items())
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and any(isinstance(x, list | tuple | dict) for x in value):
        return "[\n" + ",\n".join(inner + _json(x, inner) for x in value) + f"\n{indent}]"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_json(x, inner) for x in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return "null"
    return json.dumps(value, ensure_ascii=False)


def _flush_directory(directory: Path) -> None:
    """Flush the rename itself to disk, where the system supports it."""
    with suppress(OSError, AttributeError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
