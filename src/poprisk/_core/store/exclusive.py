"""Files by which processes on several machines coordinate: created by exactly one, changed in place, appended to.

These are the only files that are not replaced as a whole. None of them holds a result.
"""

import os
import secrets
from pathlib import Path


def create_exclusively(path: str | Path, content: bytes) -> bool:
    """Create a file with its content if it does not exist, and return whether this call created it.

    The content is written to a temporary file and linked to the name, which is atomic on local and on network file
    systems; the number of links decides, because on a network the answer to a link that succeeded may be lost. On file
    systems without links, the file is opened exclusively and may be seen empty for a moment.

    Raises:
        OSError: the directory cannot be created or written.

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
    """Overwrite the first bytes of an existing file, without replacing it.

    A renamed file can stay invisible for a while to a network client that has cached the old one; a change in place is
    seen by every process that opens the file after it was closed here.

    Raises:
        OSError: the file does not exist, or cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


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
