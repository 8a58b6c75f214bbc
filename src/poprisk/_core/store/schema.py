"""Checks JSON values against a schema, and says in one line what is wrong."""

from functools import cache
from typing import Any

from poprisk.errors import DataError


@cache
def _adapter(schema: Any) -> Any:
    from pydantic import TypeAdapter  # here, because most programs read no file

    return TypeAdapter(schema)


def check_schema(schema: Any, value: Any, where: object) -> None:
    """Check a JSON value against a type with annotations, as pydantic reads them, without conversions.

    >>> try:
    ...     check_schema(dict[str, int], {"steps": "many"}, "run/manifest.json")
    ... except DataError as error:
    ...     print(error)
    run/manifest.json is not valid at steps: Input should be a valid integer, got 'many'; restore it from a copy
    """
    from pydantic import ValidationError

    try:
        _adapter(schema).validate_python(value, strict=True)
    except ValidationError as error:
        first: dict[str, Any] = dict(error.errors(include_url=False)[0])
        nested = first.get("ctx", {}).get("error")
        if isinstance(nested, ValidationError):  # of an entry whose schema depends on another one
            first |= {**nested.errors(include_url=False)[0], "loc": (*first["loc"], *nested.errors()[0]["loc"])}
        place = ".".join(str(part) for part in first["loc"]) or "its top"
        shown = repr(first["input"])
        shown = shown if len(shown) <= 60 else f"{shown[:57]}…"
        got = "" if first["type"] == "value_error" else f", got {shown}"
        said = first["msg"].removeprefix("Value error, ")
        raise DataError(f"{where} is not valid at {place}: {said}{got}; restore it from a copy") from None
