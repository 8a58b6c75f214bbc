"""Which code named in a file may be imported: only a call that the person at this machine has made or allowed before.

A run names the function that makes its problem, with arguments. That is a program, and the run may come from anyone. So
what a file names is imported only if this user has made the same call here: the same function of the same file or
installed package, with the same arguments. Calls are remembered by their hash, in the process and in a file of the
user's state directory that nobody else may write. A run that was moved is opened by the calls it makes; a script that
was moved with it is another file, and has to be allowed again, as in editors. What was only allowed, and not made for a
training of one's own, is remembered by the process: other files may lie at the same place tomorrow.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from poprisk._core.store.import_paths import Importable
from poprisk._core.store.reading import is_private, read_regular
from poprisk._core.store.script import is_script, split_script
from poprisk.errors import DataError, UntrustedError

_MADE: set[str] = set()
"""Calls of this process."""
_FILE, _LARGEST = "trusted-calls", 2**26
_INSTALLED = tuple(os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib"))


def state_directory() -> Path:
    """``$POPRISK_STATE_DIR``, else the user's folder for the state of programs."""
    if given := os.environ.get("POPRISK_STATE_DIR"):
        return Path(given)
    home = os.environ.get("XDG_STATE_HOME") or os.environ.get("LOCALAPPDATA")
    return Path(home or os.path.join(os.path.expanduser("~"), ".local", "state")) / "poprisk"


def shown_call(call: Importable) -> str:
    """The call as a line of text, with nothing in it that a terminal could obey.

    >>> shown_call(Importable("os:system", {"command": "rm -r ~"}))
    "os:system(command='rm -r ~')"
    """
    arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
    place = "" if call.folder is None else f" in {call.folder}"
    text = f"{call.path}({arguments}){place}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def remember(call: Importable, *, lasting: bool) -> None:
    """Remember a call that the person made: in this process, and for later ones if it is to be lasting.

    Nothing is raised if the state directory cannot be written: then later processes have to be told.
    """
    digest = _digest(call)
    _MADE.add(digest)
    if not lasting or digest in _kept()[0] or not os.path.isabs(state_directory()):
        return
    file, flags = state_directory() / _FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(file, flags, 0o600)
    except OSError:
        return
    with os.fdopen(descriptor, "ab", buffering=0) as opened:
        opened.write(f"{digest}\n".encode())


def require_known(call: Importable, what: str) -> None:
    """The gate: pass a call that was made here before."""
    kept, problem = _kept()
    if _digest(call) in _MADE | kept:
        return
    found = is_script(call.path or "") or _origin(call.path or "")
    raise UntrustedError(
        f"{what} names code that you have not run on this machine, so it was not imported: {shown_call(call)}; "
        f"{'' if found else 'its module is not found from here: add its folder to PYTHONPATH; '}if you "
        "know the task, pass it with problem=… (--problem FUNCTION); if you trust all of this, use trust=True (--trust)"
        f"{problem}",
        call,
    )


def _kept() -> tuple[set[str], str]:
    """The calls of earlier processes, and why there are none if the file cannot be used."""
    folder = state_directory()
    try:
        if not os.path.isabs(folder):
            return set(), f"; {folder} is not an absolute path, so it was not read: set POPRISK_STATE_DIR to one"
        if not is_private(folder):
            return set(), f"; {folder} belongs to another user or can be written by others, so it was not read"
        text = read_regular(folder / _FILE, most=_LARGEST).decode("ascii", "replace")
    except FileNotFoundError:
        writable = next((os.access(p, os.W_OK) for p in (folder, *folder.parents) if p.exists()), False)
        hint = f"; nothing can be remembered in {folder}: set POPRISK_STATE_DIR to a folder that you can write"
        return set(), "" if writable else hint
    except (OSError, DataError) as error:
        return set(), f"; {folder / _FILE} cannot be read ({error})"
    return set(text.split()), ""


def _digest(call: Importable) -> str:
    """Hash of a call: the function, where its code lies, the arguments, and the files that these are paths of."""
    path = call.path or ""
    if is_script(path):
        file, name = split_script(str(Path(call.folder or "") / path))
        place: Any = [str(file), name]
    else:
        place = [path, _origin(path)]
    files = [os.path.realpath(text) for text in _texts(call.arguments) if os.path.lexists(text)]
    return hashlib.sha256(json.dumps([place, call.arguments, files], sort_keys=True).encode()).hexdigest()


def _origin(path: str) -> Any:
    """Where the top package of an import path lies, found without importing it; the same for all installed ones."""
    try:
        spec = find_spec(path.partition(":")[0].partition(".")[0])
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    real = [os.path.realpath(place) if os.path.isabs(place) else place for place in places]
    return "installed" if real and all(place.startswith(_INSTALLED) for place in real) else real


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(each)
