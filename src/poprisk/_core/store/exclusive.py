"""Files by which processes coordinate: a lock that the system releases, and lines that several processes append."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from poprisk._core.store.lock import open_own
from poprisk.errors import JobError


@contextmanager
def locked(path: str | Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a lock on a file, which the operating system releases if the process dies.

    Args:
        path: The file; it is created, holds the name of the holder, and stays.
        wait: Wait for another process that has it.
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
