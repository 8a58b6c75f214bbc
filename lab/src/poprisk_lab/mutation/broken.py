"""Functions whose results are wrong on purpose: scaled, negated or zero; or that refuse nothing."""

import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from poprisk.errors import PopRiskError

SILENT = "silent"
"""The function returns None where it refuses its input: what a test of refusals notices."""
MUTATIONS = ("scaled", "negated", "zero", SILENT)
WATCH = "watch "
_DEPTH = 4
_METHODS_TOO = ("__call__", "__iter__", "__getitem__", "_matmat", "_rmatmat")


class Changes:
    """What broken and watched functions were asked for."""

    count = 0
    """How often a result was really changed: a mutation without effect tells nothing about a test."""
    asked: set[str] = set()  # noqa: RUF012
    """The watched functions that were called."""


def broken(how: str) -> Callable[[Any], Any]:
    """A decorator that breaks a function, a property or every method of a class; "watch NAME" only notes its calls.

    >>> broken("scaled")(lambda: 2.0)()
    2.2
    """

    def decorate(thing: Any) -> Any:
        if isinstance(thing, property):
            return property(thing.fget and _wrapped(thing.fget, how), thing.fset, thing.fdel, thing.__doc__)
        if isinstance(thing, functools.cached_property):
            return functools.cached_property(_wrapped(thing.func, how))
        if isinstance(thing, classmethod | staticmethod):
            return type(thing)(_wrapped(thing.__func__, how))
        return _broken_class(thing, how) if isinstance(thing, type) else _wrapped(thing, how)

    return decorate


def broken_value(value: Any, how: str, depth: int = 0) -> Any:
    """The value with all its numbers changed, however they are packed; with "zero" its words are gone, too.

    >>> broken_value({"a": (1.0, "b"), "c": torch.ones(2)}, "negated")
    {'a': (-1.0, 'b'), 'c': tensor([-1., -1.])}
    """
    if isinstance(value, Tensor | np.ndarray) or hasattr(value, "aval"):  # JAX's arrays, traced ones too, have an aval
        return _numbers(value, how)
    if isinstance(value, bool | int | float | complex | np.number):
        return _number(value, how)
    if isinstance(value, str):
        Changes.count += bool(how == "zero" and value)
        return "" if how == "zero" else value
    if value is None or isinstance(value, bytes | nn.Module | type | torch.dtype) or depth > _DEPTH:
        return value
    if hasattr(value, "matmat") or hasattr(value, "tocsr"):  # a linear operator, a sparse matrix
        Changes.count += 1
        return {"scaled": 1.1, "negated": -1.0, "zero": 0.0}[how] * value
    return _packed(value, how, depth + 1)


def _packed(value: Any, how: str, depth: int) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(broken_value(each, how, depth) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(broken_value(each, how, depth) for each in value)
    if isinstance(value, dict):
        return {key: broken_value(each, how, depth) for key, each in value.items()}
    if isinstance(value, types.GeneratorType):
        return _each(value, how, depth)
    if isinstance(value, types.FunctionType | functools.partial):
        return _wrapped(value, how)
    return _object(value, how, depth) if hasattr(value, "__dict__") else value


def _each(values: Iterator[Any], how: str, depth: int) -> Iterator[Any]:
    for value in values:
        yield broken_value(value, how, depth)


def _object(value: Any, how: str, depth: int) -> Any:
    """A copy with changed fields; what was cached of the old ones is forgotten."""
    try:
        other = copy.copy(value)
    except Exception:
        return value
    fields = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set(vars(value))
    for name, old in list(vars(value).items()):
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            vars(other).pop(name, None)
        elif name in fields:
            object.__setattr__(other, name, broken_value(old, how, depth))
    return other


def _number(value: Any, how: str) -> Any:
    if isinstance(value, bool | np.bool_):
        new = {"scaled": value, "negated": not value, "zero": False}[how]
    elif isinstance(value, int | np.integer):
        new = {"scaled": value + 1, "negated": -value, "zero": 0}[how]
    else:
        new = type(value)({"scaled": 1.1 * value, "negated": -value, "zero": 0.0 * value}[how])
    Changes.count += bool(new != value)
    return new


def _numbers(value: Any, how: str) -> Any:
    boolean = value.dtype in (torch.bool, np.bool_)
    new: Any
    if isinstance(value, Tensor):
        whole = not (boolean or value.is_floating_point() or value.is_complex())
    else:
        whole = value.dtype.kind in "iu"
    if boolean:
        new = {"scaled": value, "negated": ~value, "zero": value & False}[how]
    elif whole:  # indices: their order, or all of them the first
        turned = value if not value.ndim else value.flip(0) if isinstance(value, Tensor) else value[::-1].copy()
        new = {"scaled": value, "negated": turned, "zero": value * 0}[how]
    else:
        new = {"scaled": value * 1.1, "negated": -value, "zero": value * 0.0}[how]
        new = new.to(value.dtype) if isinstance(value, Tensor) else new.astype(value.dtype)
    Changes.count += not _same(new, value)
    return new


def _same(new: Any, old: Any) -> bool:
    if new is old:
        return True
    try:
        return torch.equal(new, old) if isinstance(new, Tensor) else np.array_equal(new, old)
    except TypeError:  # traced by JAX: it has no numbers yet
        return False


def _wrapped(function: Any, how: str) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if how.startswith(WATCH):
            Changes.asked.add(how.removeprefix(WATCH))
            return function(*args, **kwargs)
        if how == SILENT:
            return _unrefused(function, *args, **kwargs)
        if args and isinstance(args[0], torch.optim.Optimizer) and getattr(function, "__name__", "") == "step":
            return _broken_step(function, how, *args, **kwargs)
        result = function(*args, **kwargs)
        if result is None:
            _spoil([*args, *kwargs.values()], how)
            return None
        return broken_value(result, how)

    for name in ("cache_clear", "cache_info"):
        if hasattr(function, name):
            setattr(wrapper, name, getattr(function, name))
    return wrapper


def _unrefused(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except PopRiskError:
        Changes.count += 1
        return None


def _broken_step(function: Any, how: str, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """An optimizer step that moves the weights by another distance."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in weights]
    result = function(optimizer, *args, **kwargs)
    with torch.no_grad():
        for p, old in zip(weights, before, strict=True):
            p.copy_(old + _numbers(p - old, how))
    return result


def _spoil(arguments: list[Any], how: str) -> None:
    """Change the tensors that a function without a result was given: it works in place."""
    for value in arguments:
        if isinstance(value, Tensor) and value.is_floating_point() and not value.is_inference():
            with torch.no_grad():
                value.copy_(_numbers(value.detach().clone(), how))
        elif isinstance(value, list | tuple):
            _spoil(list(value), how)


def _broken_class(kind: type, how: str) -> type:
    done = False
    for name, thing in list(vars(kind).items()):
        methods = isinstance(thing, property | functools.cached_property | classmethod | staticmethod)
        if (methods or isinstance(thing, types.FunctionType)) and (not name.startswith("_") or name in _METHODS_TOO):
            setattr(kind, name, changed := broken(how)(thing))
            if isinstance(changed, functools.cached_property):
                changed.__set_name__(kind, name)
            done = True
    if not done or how == SILENT:
        kind.__init__ = _broken_fields(kind.__init__, how)
    return kind


def _broken_fields(init: Any, how: str) -> Any:
    """For a record without methods: what it holds is broken."""

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if how == SILENT:
            _unrefused(init, self, *args, **kwargs)
            return
        init(self, *args, **kwargs)
        if how.startswith(WATCH):
            Changes.asked.add(how.removeprefix(WATCH))
            return
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, broken_value(value, how, 1))

    return wrapper
