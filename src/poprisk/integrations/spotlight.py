"""Show an audit in Renumics Spotlight."""

from collections.abc import Sequence
from typing import Any

from poprisk.errors import DataError, MissingExtraError
from poprisk.risk import AuditTable

_KINDS = {"label": "Category", "bool": "bool", "int": "int", "float": "float"}


def spotlight_inputs(table: AuditTable, **extra: tuple[Sequence[Any], str]) -> tuple[Any, dict[str, str]]:
    """A DataFrame, and its ``dtype`` mapping for ``renumics.spotlight.show``.

    Args:
        table: An audit.
        extra: Further columns by name, each with its values and their Spotlight type, e.g.
            ``image=(list_of_arrays, "Image")`` or ``features=(list(embeddings), "Embedding")``.

    Raises:
        MissingExtraError: pandas is not installed.
        DataError: An extra column has the wrong number of rows.

    >>> import torch
    >>> from functools import partial
    >>> from poprisk import audit
    >>> from poprisk.runs import Problem, train
    >>> problem = Problem(torch.nn.Linear, "cross_entropy", torch.eye(3), torch.arange(3),
    ...                   arguments={"in_features": 3, "out_features": 3})
    >>> table = audit(train(problem, partial(torch.optim.SGD, lr=1.0), 9, progress=False), progress=False)
    >>> frame, kinds = spotlight_inputs(table, features=(problem.inputs.tolist(), "Embedding"))
    >>> kinds["suggested_label"], kinds["is_suspect"], kinds["aum"], kinds["features"]
    ('Category', 'bool', 'float', 'Embedding')
    """
    frame = table.to_pandas()
    kinds = {name: _KINDS[_kind(name, column.dtype)] for name, column in table.columns.items()}
    for name in [name for name, kind in kinds.items() if kind == "Category"]:
        frame[name] = frame[name].astype(str).astype("category")
    for name, (values, kind) in extra.items():
        if len(values) != len(table):
            raise DataError(f"column {name!r} needs one entry for each of the {len(table)} examples, got {len(values)}")
        frame[name] = list(values)
        kinds[name] = kind
    return frame, kinds


def show_in_spotlight(table: AuditTable, **extra: tuple[Sequence[Any], str]) -> Any:
    """Open the audit in Spotlight; arguments as for :func:`spotlight_inputs`.

    Raises:
        MissingExtraError: Spotlight is not installed.
    """
    frame, kinds = spotlight_inputs(table, **extra)
    try:
        from renumics import spotlight
    except ImportError:
        raise MissingExtraError("renumics-spotlight", "spotlight", "the audit in Spotlight") from None
    return spotlight.show(frame, dtype=kinds)


def _kind(name: str, dtype: Any) -> str:
    if name.endswith("_label"):
        return "label"
    if str(dtype) == "torch.bool":
        return "bool"
    return "float" if dtype.is_floating_point else "int"
