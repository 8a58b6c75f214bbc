"""The weights of many training runs as one matrix: one row per member, with the named tensors as views."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError

_ALIGNED = 4
"""Large tensors start at multiples of 16 bytes, where matrix products are fastest."""
_LARGE = 1024


@dataclass(frozen=True)
class ParameterLayout:
    """Names and shapes of the tensors of one member, in their order within a row.

    Gaps of up to three zeros precede large tensors and end a large row. They belong to no tensor, have no gradient, and
    stay zero under every rule.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "ParameterLayout":
        """The layout of these tensors.

        >>> ParameterLayout.of({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}).size
        8
        """
        return cls(tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()))

    @property
    def size(self) -> int:
        """Number of weights of a member."""
        return sum(prod(shape) for _, shape in self.shapes)

    @property
    def segments(self) -> tuple[int, ...]:
        """Lengths of the segments of a row, alternately gaps and tensors; a gap may be empty.

        >>> ParameterLayout.of({"bias": torch.zeros(2), "weight": torch.zeros(32, 33)}).segments
        (0, 2, 2, 1056, 0)
        """
        return tuple(self._segments())

    def _segments(self) -> Iterator[int]:
        place = 0
        for size in (prod(shape) for _, shape in self.shapes):
            gap = -place % _ALIGNED if size >= _LARGE else 0
            place += gap + size
            yield gap
            yield size
        yield -place % _ALIGNED if place >= _LARGE else 0

    def row(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, "row"]:
        """One member's tensors as a row.

        Raises:
            DataError: the tensors have other names or shapes.
        """
        if ParameterLayout.of(tensors) != self:
            got = ParameterLayout.of(tensors)
            raise DataError(f"the members of a stack must have the same tensors, expected {self}, got {got}")
        row = torch.zeros(sum(self.segments), dtype=next(iter(tensors.values())).dtype)
        for part, tensor in zip(row.split(self.segments)[1::2], tensors.values(), strict=True):
            part.copy_(tensor.reshape(-1))
        return row

    def views(self, matrix: Float[Tensor, "members row"]) -> dict[str, Float[Tensor, "members *shape"]]:
        """The tensors of all members by name. Gradients flow back into the matrix as a whole."""
        parts = matrix.split(self.segments, dim=1)[1::2]
        return {
            name: part.unflatten(1, shape) if shape else part.squeeze(1)
            for (name, shape), part in zip(self.shapes, parts, strict=True)
        }

    def member(self, row: Float[Tensor, "row"]) -> dict[str, Tensor]:
        """One member's tensors from its row."""
        return {name: tensor.squeeze(0) for name, tensor in self.views(row.unsqueeze(0)).items()}
