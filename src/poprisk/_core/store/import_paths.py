"""Import paths of functions, with JSON arguments, so that another process can call them.

An import path is ``"package.module:function"``, or ``"script.py:function"`` with the script's folder.
"""

import functools
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from poprisk._core.store.script import function_of, is_script, script_of, split_script
from poprisk.errors import DataError


@dataclass(frozen=True)
class Importable:
    """The import path of a function, or the reason why it has none."""

    path: str | None
    """``"package.module:function"`` or ``"script.py:function"``; None if it cannot be imported."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, as JSON values."""
    reason: str | None = None
    """The reason why there is no path."""
    folder: str | None = None
    """Folder of the script; None if the function is in a package."""

    def as_json(self) -> dict[str, Any]:
        """As a JSON value, without the folder, which depends on the machine; see ``located``."""
        return {key: value for key, value in asdict(self).items() if key != "folder"}


def importable(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> Importable:
    """The import path of a function, class, or :func:`functools.partial` with keyword arguments.

    >>> importable(json.dumps, {"indent": 2}).as_json()
    {'path': 'json:dumps', 'arguments': {'indent': 2}, 'reason': None}
    >>> importable(lambda: 0).reason
    "a lambda or nested function ('<lambda>') cannot be imported"
    """
    given = dict(arguments or {})
    while isinstance(function, functools.partial):
        if function.args:
            return Importable(None, {}, "a partial with positional arguments cannot be saved; use keyword arguments")
        function, given = function.func, {**function.keywords, **given}
    reason = _why_not(function)
    script = None if reason else script_of(function.__module__)
    path = None if reason else f"{script.name if script else function.__module__}:{function.__qualname__}"
    try:
        plain = json.loads(json.dumps(given))
    except (TypeError, ValueError) as error:
        return Importable(None, {}, f"the arguments of {path or function!r} are not JSON values ({error})")
    return Importable(path, plain if path else {}, reason, None if script is None else str(script.parent))


def _why_not(function: Any) -> str | None:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or name is None:
        return f"an object of type {type(function).__name__} has no import path"
    if module == "__main__":
        return f"{name!r} is defined in the script that ran (__main__) and cannot be imported"
    if "<" in name:
        return f"a lambda or nested function ({name.split('.')[-1]!r}) cannot be imported"
    try:
        found = resolve(f"{module}:{name}")
    except DataError as error:
        return str(error)
    return None if found is function else f"{module}:{name} is not the object that was used"


def resolve(path: str) -> Any:
    """Import the object at ``"package.module:name"`` or ``"folder/script.py:name"``.

    >>> resolve("json:dumps") is json.dumps
    True
    """
    module, colon, name = path.rpartition(":")
    if not colon or not module or not name:
        raise DataError(
            f'expected an import path "package.module:function" or "script.py:function", got {path!r}: pass one'
        )
    if is_script(path):
        return function_of(*split_script(path))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be imported, got {error}: make it importable, e.g. through PYTHONPATH"
        ) from None
    return found


def described(path: str, arguments: Mapping[str, Any] | None = None) -> Importable:
    """Like :func:`importable`, but for the function at an import path.

    >>> described("json:dumps").path
    'json:dumps'
    """
    if not is_script(path):
        return importable(resolve(path), arguments)
    file, name = split_script(path)
    plain = importable(_stand_in, arguments)  # only for its arguments: the function may be imported from elsewhere
    return Importable(f"{file.name}:{name}" if plain.path else None, plain.arguments, plain.reason, str(file.parent))


def _stand_in() -> None:
    """A function that can be imported."""


def located(source: Mapping[str, Any], old: Path | None, new: Path | None) -> dict[str, Any]:
    """Make the folder of a description's script, relative to the directory ``old``, relative to ``new``.

    A description that is saved in a directory then stays valid if directory and script are moved together. If a
    directory is None, the folder is absolute.

    >>> located({"path": "task.py:make", "folder": "/a/b"}, None, Path("/a/runs/first"))["folder"]
    '../../b'
    >>> located({"path": "task.py:make", "folder": "../../b"}, Path("/a/runs/first"), None)["folder"]
    '/a/b'
    """
    folder = source.get("folder")
    if folder is None:
        return dict(source)
    absolute = os.path.realpath(os.path.join(os.path.realpath(old) if old is not None else "", folder))
    if new is None:
        return {**source, "folder": absolute}
    try:
        return {**source, "folder": Path(os.path.relpath(absolute, os.path.realpath(new))).as_posix()}
    except ValueError:  # another drive
        return {**source, "folder": absolute}
