"""One writer for a directory: a lock that the system releases with its process, and that says who holds it."""

import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from poprisk._core.store.reading import is_same_file
from poprisk.errors import RunError

LOCK = ".writer.lock"
_HELD: dict[str, "WriterLock"] = {}
"""Locks of this process, by directory: the system does not lock a process out of its own files."""


class WriterLock:
    """An exclusive lock on a directory, held until :meth:`release`, or until the process ends, however it ends.

    On a network file system the lock holds across machines if the system's own file locks do.

    Args:
        folder: The directory, which must exist.
        take_over: Whether to take the lock from a recorder of this process that was left behind, e.g. in a notebook;
            it then refuses to write.

    Raises:
        RunError: somebody else holds the lock; the message says who.
        OSError: the directory cannot be written.
    """

    def __init__(self, folder: str | Path, *, take_over: bool = False) -> None:
        self._folder, self._path = Path(folder), Path(folder) / LOCK
        self._key, self._descriptor = os.path.realpath(folder), -1
        before = _HELD.get(self._key)
        if before is not None and not take_over:
            raise RunError(f"{folder} is being written by a recorder of this process: close it first")
        if before is not None:
            self._descriptor, before._descriptor = before._descriptor, -1
        else:
            self._acquire()
        _HELD[self._key] = self

    @property
    def is_held(self) -> bool:
        """Whether this lock still holds."""
        return self._descriptor >= 0

    def require(self) -> None:
        """Check that this lock still holds.

        Raises:
            RunError: it was released, or another recorder of this process took over.
        """
        if not self.is_held:
            raise RunError(
                f"{self._folder} is being written by another recorder of this process, so this one stopped: use that "
                "one, or close it and record with resume=True"
            )

    def release(self) -> None:
        """Let others write; the file of the lock is removed."""
        if self._descriptor >= 0:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)
            self._descriptor = -1
            del _HELD[self._key]

    def __enter__(self) -> "WriterLock":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.release()

    def _acquire(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        while True:
            descriptor = os.open(self._path, flags, 0o666)
            try:
                _lock(descriptor)
                if is_same_file(descriptor, self._path):  # not one that its holder has just removed
                    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": _now()}
                    os.truncate(descriptor, 0)
                    os.write(descriptor, json.dumps(about).encode())
                    self._descriptor = descriptor
                    return
            except BlockingIOError:
                raise RunError(
                    f"{self._folder} is being written by {_holder(descriptor)}: wait until it ends, or stop it"
                ) from None
            finally:
                if self._descriptor != descriptor:
                    os.close(descriptor)


def _lock(descriptor: int) -> None:
    """Lock a file without waiting; released with the process, and not inherited by those that it forks.

    Raises:
        BlockingIOError: another process has locked it.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError:
            raise BlockingIOError from None
        return
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except PermissionError:  # what some systems say instead
        raise BlockingIOError from None


def _holder(descriptor: int) -> str:
    try:
        about = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(about['pid'])} on {str(about['host'])[:80]} since {str(about['since'])[:40]}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "another process"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
