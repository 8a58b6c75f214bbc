"""Functions as text: ``"package.module:function"`` and JSON arguments, so that a later process can call them again."""

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from poprisk.errors import DataError


@dataclass(frozen=True)
class Importable:
    """How to get at a function later, or why that is not possible."""

    path: str | None
    """``"package.module:function"``; None if it cannot be imported."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, JSON values all."""
    reason: str | None = None
    """Why there is no path, in words."""

    def as_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return asdict(self)


def importable(function: Callable[..., Any], arguments: Mapping[str, Any] | None = None) -> Importable:
    """Describe a function (or class, or :func:`functools.partial` with keywords) for a later process.

    >>> importable(json.dumps, {"indent": 2})
    Importable(path='json:dumps', arguments={'indent': 2}, reason=None)
    >>> importable(lambda: 0).reason
    "a function made on the spot ('<lambda>') cannot be imported"
    """
    given = dict(arguments or {})
    while isinstance(function, functools.partial):
        if function.args:
            return Importable(None, {}, "a partial with positional arguments cannot be written down; use keywords")
        function, given = function.func, {**function.keywords, **given}
    reason = _why_not(function)
    path = None if reason else f"{function.__module__}:{function.__qualname__}"
    try:
        plain = json.loads(json.dumps(given))
    except (TypeError, ValueError) as error:
        return Importable(None, {}, f"the arguments of {path or function!r} are not JSON values ({error})")
    return Importable(path, plain if path else {}, reason)


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
    """The object behind ``"package.module:name"``.

    Raises:
        DataError: there is no such module or name, or the text is no such path.

    >>> resolve("json:dumps") is json.dumps
    True
    """
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise DataError(f'expected an import path "package.module:function", got {path!r}')
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise DataError(f"{path} cannot be imported ({error}): make it importable, e.g. through PYTHONPATH") from None
    return found
