"""Refuse arguments of the wrong type at the doors of a room, as the annotations of its public functions say."""

import inspect
import operator
import re
import reprlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from functools import cache, wraps
from types import UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

import numpy as np
from torch import Tensor

from poprisk._core.text import one_line
from poprisk.errors import DataError, HyperparameterError

P = ParamSpec("P")
R = TypeVar("R")
_HOW = {"run": "open a run with Run.load(path), and ", "problem": "pass the one that was trained or Problem.build(…); "}
_NO_NUMBERS = (bool, np.bool_, str, bytes)


def guard(facade: dict[str, Any], names: Sequence[str]) -> None:
    """Check the calls of public functions, and of the methods of public classes; results are made without a check."""
    for name in names:
        found = facade[name]
        if inspect.isclass(found):
            own = [each for each, value in vars(found).items() if inspect.isfunction(value) and each[0] != "_"]
            for each in own if is_dataclass(found) else ["__init__", *own]:
                setattr(found, each, checked(getattr(found, each)))
        else:
            facade[name] = made = checked(found)
            setattr(sys.modules[found.__module__], name, made)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check each call by the function's annotations; shapes and ranges are left to the function.

    Raises:
        HyperparameterError: an argument has the wrong type, or is a whole number beyond 64 bits.
        DataError: the same, where a run or a tensor is expected.

    >>> @checked
    ... def count(folds: int | None): ...
    >>> count("3")
    Traceback (most recent call last):
    poprisk.errors.HyperparameterError: folds must be int or None, got '3': see help(count)
    """
    signature, kinds = inspect.signature(function), cache(lambda: _kinds(function))

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # Python says what is missing, or not known
            return function(*args, **kwargs)
        for name, value in (given | given.get("options", {})).items():
            if name in kinds() and not _is_a(value, kinds()[name]):
                raise _error(name, value, kinds()[name], function.__qualname__.removesuffix(".__init__"))
        return function(*args, **kwargs)

    return call


def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of a function's arguments, with those of the options that it passes on."""
    kinds = get_type_hints(function)
    options = kinds.pop("options", None)
    return kinds | (get_type_hints(get_args(options)[0]) if get_origin(options) is Unpack else {})


def _is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; numbers of NumPy and of tensors are numbers, and True is none."""
    parts, kind = get_args(kind), get_origin(kind) or getattr(kind, "array_type", kind)
    if kind in (Union, UnionType):
        return any(_is_a(value, part) for part in parts)
    if kind in (Sequence, tuple):
        value = value.tolist() if isinstance(value, np.ndarray) else value
        several = bool(value) if kind is tuple else not isinstance(value, str | bytes)
        return isinstance(value, kind) and several and all(_is_a(each, parts[0]) for each in value)
    if kind in (int, float):
        return _is_number(value, kind)
    if kind in (Literal, Callable):
        return callable(value) if kind is Callable else isinstance(value, str) and value in parts
    if isinstance(value, str) and "\0" in value:
        return False
    usual = not isinstance(kind, type) or kind == Any or getattr(kind, "_is_protocol", False)
    return usual or isinstance(value, kind) or (kind is bool and isinstance(value, np.bool_ | int) and value in (0, 1))


def _is_number(value: Any, kind: type) -> bool:
    try:
        number = operator.index(value) if kind is int else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False
    return not isinstance(value, _NO_NUMBERS) and (kind is float or abs(number) < 2**63)


def _words(kind: Any) -> str:
    """What a kind is in words.

    >>> _words(Sequence[int] | None), _words(Literal["a", "b", "c"])
    ('Sequence[int] or None', '"a", "b" or "c"')
    """
    parts, several = get_args(kind), get_origin(kind) in (Union, UnionType)
    if several or get_origin(kind) is Literal:
        words = [_words(part) if several else f'"{part}"' for part in parts]
        return f"{', '.join(words[:-1])} or {words[-1]}"
    plain = kind.__name__.replace("NoneType", "None") if isinstance(kind, type) and not parts else str(kind)
    return re.sub(r"[\w.]+\.(?=\w)", "", plain)


def _error(name: str, value: Any, kind: Any, place: str) -> HyperparameterError | DataError:
    expected = _words(kind) + (" below 2**63" if type(value) is int and kind is int else "")
    plain = value is None or isinstance(value, str | int | float | complex | bytes | list | tuple | dict)
    got = reprlib.repr(value) if plain else type(value).__name__
    data = re.search(r"\b(Run|Tensor|Unrolled|Problem)\b", expected)
    got += f" of {value.dtype} with shape {list(value.shape)}" if isinstance(value, Tensor | np.ndarray) else ""
    how = _HOW.get(name, "") + f"see help({place})"
    return (DataError if data else HyperparameterError)(one_line(f"{name} must be {expected}, got {got}: {how}"))
