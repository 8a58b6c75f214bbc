"""Converts dataclasses to a JSON value and named tensors, and back, without loss."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from poprisk.errors import DataError

_KIND = "#"
"""Marks values that JSON cannot represent: tensors, tuples, mappings, dataclasses."""


def pack(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Convert a value to JSON, with tensors replaced by names, and the tensors.

    It may be None, numbers, strings, lists, tuples, mappings, tensors and dataclasses, nested in any way.

    >>> import torch
    >>> form, tensors = pack({"x": torch.ones(2), 3: (1.5,)})
    >>> form["items"][0], list(tensors)
    (['x', {'#': 'tensor', 'name': '0'}], ['0'])
    >>> unpack(form, tensors, ())
    {'x': tensor([1., 1.]), 3: (1.5,)}
    """
    tensors: dict[str, Tensor] = {}

    def packed(x: Any) -> Any:
        if x is None or isinstance(x, bool | int | float | str):
            return x
        if isinstance(x, Tensor):
            tensors[name := str(len(tensors))] = x.detach().clone()  # tensors in a file must not share memory
            return {_KIND: "tensor", "name": name}
        if isinstance(x, list):
            return [packed(each) for each in x]
        if isinstance(x, tuple):
            return {_KIND: "tuple", "items": [packed(each) for each in x]}
        if isinstance(x, Mapping):
            return {_KIND: "mapping", "items": [[packed(k), packed(v)] for k, v in x.items()]}
        if is_dataclass(x) and not isinstance(x, type):
            return {_KIND: type(x).__name__, "fields": {f.name: packed(getattr(x, f.name)) for f in fields(x)}}
        raise DataError(f"only plain values, tensors and dataclasses of them can be saved, got {type(x).__name__}")

    return packed(value), tensors


def unpack(form: Any, tensors: Mapping[str, Tensor], classes: tuple[type, ...]) -> Any:
    """Restore the value that was given to :func:`pack`."""
    known = {each.__name__: each for each in classes}

    def unpacked(x: Any) -> Any:
        if isinstance(x, list):
            return [unpacked(each) for each in x]
        if not isinstance(x, dict):
            return x
        kind = x[_KIND]
        if kind == "tensor":
            return tensors[x["name"]]
        if kind == "tuple":
            return tuple(unpacked(each) for each in x["items"])
        if kind == "mapping":
            return {unpacked(k): unpacked(v) for k, v in x["items"]}
        if kind not in known:
            raise DataError(f"expected {', '.join(known) or 'no dataclass'}, got a {kind!r}: compute the value again")
        try:
            return check_fields(known[kind](**{name: unpacked(each) for name, each in x["fields"].items()}))
        except TypeError as error:
            raise DataError(f"the {kind} was saved by another version ({error}): compute it again") from None

    try:
        return unpacked(form)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"the value is damaged ({type(error).__name__}: {error}): compute it again") from None


def check_fields(value: Any) -> Any:
    """The dataclass, after checking the types of its fields, which come from a file."""
    for name, hint in _hints(type(value)).items():
        if not fits(getattr(value, name), hint):
            raise DataError(f"{type(value).__name__}.{name} is damaged, it should be {hint}: compute it again")
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an annotation, entries of lists, tuples and mappings included.

    >>> fits({1: [2.0]}, dict[int, list[float]]), fits([None], list[float])
    (True, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or origin in (Union, UnionType):
        return hint is Any or any(fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if origin in (list, tuple):
        count = len(value) if isinstance(value, origin) else -1
        each = inner if origin is tuple and inner[-1] is not Ellipsis else inner[:1] * count
        return len(each) == count and all(map(fits, value, each))
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if hint in (float, int):
        return isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    return isinstance(value, hint)
