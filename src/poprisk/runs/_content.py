"""What the files of a run must hold, checked when they are read: tensors of the right names, types and sizes."""

from functools import partial
from typing import Annotated, Any

import torch
from pydantic import Field, JsonValue
from torch import Tensor
from typing_extensions import TypedDict

from poprisk._core.store import check_schema
from poprisk.errors import DataError
from poprisk.runs._checkpoint import WEIGHTS
from poprisk.runs._layout import Layout
from poprisk.runs._linearize import COLUMNS

Content = tuple[dict[str, Tensor], Any]
_Change = tuple[int, Annotated[int, Field(ge=0)], dict[str, JsonValue]]
_Rows = list[Annotated[list[Any], Field(min_length=3, max_length=3)]]


class _Notes(TypedDict):
    start_options: list[dict[str, JsonValue]]
    options: _Rows


_DENSE = ("weights", "preconditioner", "decay", "buffer")


def check_content(manifest: dict[str, Any], i: int, content: Content, where: str) -> None:
    """Check the content of file i of a run: 0 is the start, i + 1 is segment i.

    Raises:
        DataError: the file does not hold what the manifest says.
    """
    layout = Layout.from_json(manifest["layout"])
    tensors, notes = content
    is_one = partial(_tensor, tensors, where)
    is_one(WEIGHTS, (layout.size,), layout.dtype)
    if i == 0:
        return
    segment, groups = manifest["segments"][i - 1], len(manifest["optimizer"]["groups"])
    steps = segment["stop"] - segment["start"]
    for name in ("factor", "loss_scale", "loss"):
        is_one(name, (steps,), torch.float64)
    counts = is_one("part_count", (steps,), torch.int64)
    sizes = is_one("part_size", (_total(counts, 1, where),), torch.int64)
    index = is_one("index", (_total(sizes, 0, where),), torch.int64)
    if len(index) and not (int(index.min()) >= 0 and int(index.max()) < manifest["examples"]):
        raise DataError(f"{where} names examples outside of 0 … {manifest['examples'] - 1}: restore it from a copy")
    if "example_weight" in tensors:
        is_one("example_weight", (len(index),), torch.float64)
    if manifest["every"] == 1:
        is_one("coefficients", (steps, groups, len(COLUMNS)), torch.float64)
    for name in _DENSE:
        if name in tensors or (name == "weights" and manifest["every"] == 1):
            is_one(name, (steps, layout.size), layout.dtype)
    for name in tensors:
        if name.startswith("source."):
            is_one(name, (layout.size,), layout.dtype)
    _check_notes(notes, segment, manifest["optimizer"], where)


def _check_notes(notes: Any, segment: dict[str, Any], optimizer: dict[str, Any], where: str) -> None:
    from poprisk.runs._schema import OptimizerEntry

    groups = len(optimizer["groups"])
    check_schema(_Notes, notes, where)
    check_schema(list[_Change], [tuple(change) for change in notes["options"]], where)
    inside = all(segment["start"] <= k < segment["stop"] and g < groups for k, g, _ in notes["options"])
    if len(notes["start_options"]) != groups or not inside:
        raise DataError(f"{where} has options of other parameter groups or steps than the run: restore it from a copy")
    now = [dict(group) for group in notes["start_options"]]
    check_schema(OptimizerEntry, {"name": optimizer["name"], "groups": now}, where)
    for _, g, changed in notes["options"]:
        check_schema(OptimizerEntry, {"name": optimizer["name"], "groups": [{**now[g], **changed}]}, where)


def _total(counts: Tensor, least: int, where: str) -> int:
    if len(counts) and int(counts.min()) < least:
        raise DataError(f"{where} is damaged: a step has {int(counts.min())} parts or examples; restore it from a copy")
    return int(counts.double().sum().clamp(max=2**53))


def _tensor(tensors: dict[str, Tensor], where: str, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    found = tensors.get(name)
    if found is None or tuple(found.shape) != shape or found.dtype != dtype:
        got = "none" if found is None else f"{found.dtype} {list(found.shape)}"
        raise DataError(
            f"{where} must hold a tensor {name!r} of {dtype} {list(shape)}, got {got}: restore it from a copy"
        )
    return found
