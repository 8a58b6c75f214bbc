"""Files that processes on several machines agree by: made by exactly one of them, marked in place, appended to.

These are the only files that are not replaced as a whole. None of them holds a result.
"""

import os
import secrets
from pathlib import Path


def create_exclusively(path: str | Path, content: bytes) -> bool:
    """Make a file that was not there, with its content, and say whether it was us who made it.

    The content is written aside and linked to the name, which is atomic on local and on network file systems; the
    number of links decides, because on a network the answer to a link that succeeded may be lost. Where a file system
    knows no links, the file is opened exclusively, and may be seen empty for a moment.

    Raises:
        OSError: the directory cannot be made or written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     create_exclusively(f"{folder}/x", b"mine"), create_exclusively(f"{folder}/x", b"yours")
    (True, False)
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        aside.write_bytes(content)
        os.link(aside, target)
    except FileExistsError:
        return aside.stat().st_nlink == 2
    except (NotImplementedError, OSError):
        if aside.exists() and aside.stat().st_nlink == 2:
            return True
        return _open_exclusively(target, content)
    finally:
        aside.unlink(missing_ok=True)
    return True


def _open_exclusively(target: Path, content: bytes) -> bool:
    try:
        with open(target, "xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def overwrite_in_place(path: str | Path, content: bytes) -> None:
    """Write the first bytes of a file that is there, without replacing it.

    A renamed file can stay invisible for a while to a network client that knows the old one by name; a change in place
    is seen by whoever opens the file after it was closed here.

    Raises:
        OSError: the file is not there, or cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


def append_line(path: str | Path, line: str) -> None:
    """Add a line at the end, in one write, so that it is there whole or not at all.

    Raises:
        OSError: the directory cannot be made or written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(descriptor, f"{line}\n".encode())
    finally:
        os.close(descriptor)
