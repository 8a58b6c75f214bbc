"""Locks that the system releases with their process, and that say who holds them."""

import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from poprisk.errors import JobError, RunError

LOCK = ".writer.lock"
_HELD: dict[str, "WriterLock"] = {}
"""Locks of this process, by directory: the system does not lock a process out of its own files."""


class WriterLock:
    """An exclusive lock on a directory, held until :meth:`release`, or until the process ends, however it ends.

    On a network file system it holds across machines if the system's own file locks do; Windows has no such locks.

    Args:
        folder: The directory, which must exist.
        take_over: Whether to take the lock from a recorder of this process that was left behind, e.g. in a notebook;
            it then refuses to write.

    Raises:
        RunError: somebody else holds the lock; the message says who.
    """

    def __init__(self, folder: str | Path, *, take_over: bool = False) -> None:
        self._folder, self._path = Path(folder), Path(folder) / LOCK
        self._key, self._descriptor = os.path.realpath(folder), -1
        before = _HELD.get(self._key)
        if before is not None and not take_over:
            raise RunError(f"{folder} is being written by a recorder of this process: close it first")
        if before is not None:
            self._descriptor, before._descriptor = before._descriptor, -1
        while not self.is_held:
            self._try()
        _HELD[self._key] = self

    @property
    def is_held(self) -> bool:
        """Whether this lock still holds."""
        return self._descriptor >= 0

    def require(self) -> None:
        """Check that this lock still holds."""
        if not self.is_held:
            raise RunError(
                f"{self._folder} is being written by another recorder of this process, so this one stopped: use that "
                "one, or close it and record with resume=True"
            )

    def release(self) -> None:
        """Let others write; the file of the lock is removed."""
        if self.is_held:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1
            del _HELD[self._key]

    def __enter__(self) -> "WriterLock":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

    def _try(self) -> None:
        descriptor = open_own(self._path)
        try:
            _lock(descriptor)
            with suppress(FileNotFoundError):  # its holder has just removed it: once more
                if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                    since = datetime.now(UTC).isoformat(timespec="seconds")
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, json.dumps([os.getpid(), socket.gethostname(), since]).encode())
                    self._descriptor = descriptor
        except (BlockingIOError, PermissionError):  # what systems say
            who = _holder(descriptor)
            raise RunError(f"{self._folder} is being written by {who}: wait until it ends, or stop it") from None
        finally:
            if not self.is_held:
                os.close(descriptor)


@contextmanager
def locked(path: str | Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock on a file, which the operating system releases if the process dies.

    The file is created, holds the name of the holder, and stays.
    """
    import fcntl

    with open(path, "r+", encoding="utf-8", opener=open_own) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            holder = file.read(200).strip() or "another process"
            raise JobError(f"{holder} has {path}: wait until it ends, or pass wait=True (--wait)") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def open_own(path: str | Path, _: int = 0) -> int:
    """Open a file that is to be overwritten, or create it: never through a link, nor a file that has another name."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    with suppress(OSError):
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise RunError(f"{path} must be a file of its own, but is a link or no regular file: remove it")
    return os.open(path, flags, 0o666)


def _lock(descriptor: int) -> None:
    """Lock a file without waiting: released with the process, and not inherited by those that it forks."""
    try:
        import fcntl
    except ImportError:
        return
    fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _holder(descriptor: int) -> str:
    try:
        pid, host, since = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(pid)} on {str(host)[:80]} since {str(since)[:40]}"
    except (OSError, ValueError, TypeError):
        return "another process"
