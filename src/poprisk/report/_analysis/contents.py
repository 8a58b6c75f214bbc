"""The contents of an example for the page: a thumbnail or a text, made from its problem."""

import base64
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import UInt8
from torch import Tensor

from poprisk.runs import Problem

_FEWEST_SIDE = 8
_LARGE, _LARGE_SIDE = 400, 128
"""How many of the first examples are shown in full, and the side of their pictures, large enough to zoom in."""
_SMALLER = (48, 32, 24, 16, 8)
"""Sides of the other pictures: the first with which all of them fit."""
_TEXT, _SHORT_TEXT = 20_000, 300
"""Most characters of a text, and of those after the first where the page would otherwise be too large."""
_BYTES = 20_000_000


@dataclass
class Contents:
    """Pictures as base64 PNG files and texts, by example."""

    pictures: dict[int, str] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    note: str = ""


def example_contents(problem: Problem, examples: Iterable[int], most_bytes: int = _BYTES) -> Contents:
    """Pictures or texts of some examples, in order, as long as they fit into the page.

    Uses what ``problem.show(i)`` returns if it is a text or a picture (an array with two axes, or with three axes of
    which one has 1 or 3 entries), otherwise the inputs if they have the shape of pictures.

    Args:
        problem: The problem.
        examples: Which examples, the most important first.
        most_bytes: Maximum size of all contents.

    >>> x, one = torch.tensor([[0.0], [1.0]]), {"in_features": 1, "out_features": 1}
    >>> problem = Problem(torch.nn.Linear, "squared", x, x, arguments=one, show=lambda i: f"row {i}")
    >>> example_contents(problem, [1, 0]).texts
    {1: 'row 1', 0: 'row 0'}
    """
    found, used, wanted, side = Contents(), 0, list(examples), 0
    pixels = _input_pictures(problem)
    for place, i in enumerate(wanted):
        shown, room = problem.show(i), (most_bytes - used) / (len(wanted) - place)
        if isinstance(shown, str) and not shown.startswith(f"example {i}: input "):
            most = _TEXT if place < _LARGE else min(_TEXT, max(_SHORT_TEXT, int(room)))
            found.texts[i] = shown if len(shown) <= most else shown[: most - 1] + "…"
            used += len(found.texts[i].encode())
        else:
            picture = _picture(shown)
            picture = picture if picture is not None else None if pixels is None else pixels[i]
            if picture is None:
                return found
            if place < _LARGE and used < most_bytes / 2:
                found.pictures[i] = _encoded(picture, _LARGE_SIDE)
            else:
                side = side or _side(picture, room)
                found.pictures[i] = _encoded(picture, side)
            used += len(found.pictures[i])
        if used > most_bytes:
            break
    kept = len(found.texts) + len(found.pictures)
    notes = [f"contents are shown for the first {kept} of {len(wanted)} examples"] if kept < len(wanted) else []
    if found.pictures and pixels is not None and isinstance(problem.inputs, Tensor) and problem.inputs.dim() == 2:
        side = pixels.shape[1]
        notes.append(f"inputs of {side * side} numbers between 0 and 1 are drawn as {side} × {side} pixels")
    found.note = "; ".join(notes)
    return found


def _encoded(picture: Tensor, side: int) -> str:
    return base64.b64encode(png(_bytes(picture, side))).decode()


def _side(picture: Tensor, room: float) -> int:
    """The largest side with which a picture like this one takes no more bytes than there are."""
    return next((side for side in _SMALLER if 1.2 * len(_encoded(picture, side)) <= room), _SMALLER[-1])


def png(pixels: UInt8[Tensor, "height width channels"]) -> bytes:
    r"""A PNG file of 8-bit pixels, grey (1 channel) or red, green and blue (3).

    >>> png(torch.zeros(2, 3, 1, dtype=torch.uint8))[:8]
    b'\x89PNG\r\n\x1a\n'
    """
    height, width, channels = pixels.shape
    rows = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), pixels.reshape(height, -1)], dim=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    body = zlib.compress(rows.numpy().tobytes(), 9)
    parts = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _input_pictures(problem: Problem) -> Tensor | None:
    """The inputs, if they look like pictures."""
    x = problem.inputs
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64, torch.uint8):
        return None
    if x.dim() == 4 and _picture(x[0]) is not None:
        return x
    if x.dim() == 3 and min(x.shape[1:]) >= _FEWEST_SIDE and x.is_floating_point() and _in_unit(x):
        return x
    if x.dim() == 2 and x.is_floating_point():
        side = round(x.shape[1] ** 0.5)
        if side >= _FEWEST_SIDE and side * side == x.shape[1] and _in_unit(x):
            return x.reshape(-1, side, side)
    return None


def _in_unit(x: Tensor) -> bool:
    return bool(x.min() >= 0) and bool(x.max() <= 1)


def _picture(shown: Any) -> Tensor | None:
    """The value as a tensor, if it has the shape of a picture."""
    try:
        x = shown if isinstance(shown, Tensor) else torch.as_tensor(shown)
    except (TypeError, ValueError, RuntimeError):
        return None
    if x.dim() == 2 and min(x.shape) > 1:
        return x
    return x if x.dim() == 3 and (x.shape[0] in (1, 3) or x.shape[2] in (1, 3)) and max(x.shape) > 3 else None


def _bytes(x: Tensor, side: int) -> Tensor:
    """A thumbnail with 8-bit values: rows, columns, channels."""
    x = x.detach().cpu()
    x = x[None] if x.dim() == 2 else x if x.shape[0] in (1, 3) else x.movedim(2, 0)
    values = x.double() / (1 if x.is_floating_point() else 255)
    if x.is_floating_point() and not _in_unit(values):  # normalized inputs: stretch them to the full range
        low, high = values.min(), values.max()
        values = (values - low) / (high - low).clamp(min=1e-12)
    height, width = values.shape[1:]
    if max(height, width) > side:
        ratio = side / max(height, width)
        size = (max(1, round(height * ratio)), max(1, round(width * ratio)))
        values = torch.nn.functional.adaptive_avg_pool2d(values, size)
    return (values.nan_to_num(nan=0.0).clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, 2)
