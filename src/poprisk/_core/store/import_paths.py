"""Functions as text, so that a later process can call them again: where they are, and JSON arguments.

Where they are is ``"package.module:function"``, or ``"script.py:function"`` with the script's folder.
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
    """How to get at a function later, or why that is not possible."""

    path: str | None
    """``"package.module:function"`` or ``"script.py:function"``; None if it cannot be imported."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, JSON values all."""
    reason: str | None = None
    """Why there is no path, in words."""
    folder: str | None = None
    """Where the script is; None where the function is in a package."""

    def as_json(self) -> dict[str, Any]:
        """As a JSON value, without the folder: that belongs to this machine, see ``located``."""
        return {key: value for key, value in asdict(self).items() if key != "folder"}


def importable(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> Importable:
    """Describe a function (or class, or :func:`functools.partial` with keywords) for a later process.

    >>> importable(json.dumps, {"indent": 2}).as_json()
    {'path': 'json:dumps', 'arguments': {'indent': 2}, 'reason': None}
    >>> importable(lambda: 0).reason
    "a function made on the spot ('<lambda>') cannot be imported"
    """
    given = dict(arguments or {})
    while isinstance(function, functools.partial):
        if function.args:
            return Importable(None, {}, "a partial with positional arguments cannot be written down; use keywords")
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
        return f"{name!r} lives in the script that ran (__main__) and cannot be imported"
    if "<" in name:
        return f"a function made on the spot ({name.split('.')[-1]!r}) cannot be imported"
    try:
        found = resolve(f"{module}:{name}")
    except DataError as error:
        return str(error)
    return None if found is function else f"{module}:{name} is another object than the one used"


def resolve(path: str) -> Any:
    """The object behind ``"package.module:name"`` or ``"folder/script.py:name"``.

    Raises:
        DataError: there is no such module, script or name, or the text is no such path.

    >>> resolve("json:dumps") is json.dumps
    True
    """
    module, colon, name = path.rpartition(":")
    if not colon or not module or not name:
        raise DataError(f'expected an import path "package.module:function" or "script.py:function", got {path!r}')
    if is_script(path):
        return function_of(*split_script(path))
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise DataError(f"{path} cannot be imported ({error}): make it importable, e.g. through PYTHONPATH") from None
    return found


def described(path: str, arguments: Mapping[str, Any] | None = None) -> Importable:
    """The same as :func:`importable`, of the function behind a path; of a script, whatever it has under that name.

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
    """A description whose script's folder, relative to the directory ``old``, is made relative to ``new``.

    So the description, kept in a directory, leads to the script wherever both are moved together. None stands for no
    directory: then the folder is absolute.

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
