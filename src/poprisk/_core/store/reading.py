"""Reads files that anyone may have made: regular files only, no link followed, sizes checked before memory is used."""

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from poprisk.errors import DataError

_DEPTH, _JSON_BYTES = 64, 2**28


def member(folder: str | Path, name: str) -> Path:
    """The path of a file directly in a folder; a DataError if the name leads elsewhere."""
    if not name or name != os.path.basename(name) or name in (".", "..") or "\\" in name or "\0" in name:
        raise DataError(f"{folder} names the file {name!r}, which is not one of its own: do not use it")
    return Path(folder) / name


def own_folder(folder: str | Path, name: str) -> Path:
    """The path of a folder directly in another one, there or not; a DataError if it is a link or a file."""
    found = member(folder, name)
    if found.is_symlink() or (found.exists() and not found.is_dir()):
        raise DataError(f"{found} must be a folder, but is a link or a file: remove it")
    return found


def regular_size(path: str | Path) -> int:
    """Size of a regular file; a DataError if it is a link, a pipe, a device or a folder."""
    status = os.lstat(path)
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no regular file"
        raise DataError(f"{path} is {kind}: only regular files are read, put the file itself there")
    return status.st_size


def read_regular(path: str | Path, *, most: int | None = None) -> bytes:
    """Read a regular file, never a link, a pipe or a device, if it has at most that many bytes.

    Raises:
        DataError: it is something else, or larger.
        FileNotFoundError: there is no such file.
    """
    regular_size(path)  # a clear error where the system would only say "too many levels of links"
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with os.fdopen(os.open(path, flags), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{path} is no regular file: only regular files are read, put the file itself there")
        check_memory(status.st_size, path, most)
        return file.read(status.st_size)


def check_memory(size: int, what: object, most: int | None = None) -> None:
    """Refuse what has more bytes than that, or by default than the machine's memory."""
    largest = _memory() if most is None else most
    if size > largest:
        raise DataError(f"{what} has {size} bytes, more than the {largest} that are read at once")


def refuse_links(folder: str | Path) -> None:
    """Refuse a folder, if it is there, that contains anything but folders and regular files, at any depth."""
    waiting = [os.fspath(folder)] if os.path.isdir(folder) else []
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    raise DataError(f"{entry.path} is a link or no regular file: put the file itself there")


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 2**40


def parsed_json(content: bytes | str, where: object) -> Any:
    """A JSON value of bounded depth; a DataError if it is not JSON, or nested too deeply."""
    try:
        value = json.loads(content)
    except RecursionError:
        raise DataError(f"{where} is damaged: its JSON is nested too deeply; restore it from a copy") from None
    except ValueError as error:
        raise DataError(f"{where} is damaged: it is not JSON ({error}); restore it from a copy") from None
    level = [value] if _nests(value) else []
    for _ in range(_DEPTH):
        if not level:
            return value
        level = [x for each in level for x in (each.values() if isinstance(each, dict) else each) if _nests(x)]
    raise DataError(f"{where} is damaged: its JSON is nested more than {_DEPTH} deep; restore it from a copy")


def _nests(x: Any) -> bool:
    return isinstance(x, dict | list)


def read_json(path: str | Path) -> Any:
    """The JSON value in a regular file, checked as by :func:`read_regular` and :func:`parsed_json`."""
    return parsed_json(read_regular(path, most=_JSON_BYTES), path)


def json_digest(value: dict[str, Any]) -> str:
    """SHA-256 of a JSON object without its own ``sha256``."""
    bare = {key: each for key, each in value.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()


def is_private(folder: str | Path) -> bool:
    """Whether a folder belongs to this user and nobody else may write into it, or into the folder of a link to it.

    A relative path is not private: it names another folder in every directory that someone sends.
    """
    if not os.path.isabs(folder):
        return False
    if not hasattr(os, "getuid"):
        return os.path.isdir(folder)
    status = os.stat(folder)
    linked = os.path.islink(folder) and not is_private(os.path.dirname(folder))
    return status.st_uid == os.getuid() and not status.st_mode & 0o022 and not linked
