"""The weights of many trainings as one matrix: a row a member, and the named tensors as views into it."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError


@dataclass(frozen=True)
class ParameterLayout:
    """Names and shapes of one member's tensors, in the order in which a row holds them."""

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "ParameterLayout":
        """The layout of these tensors.

        >>> ParameterLayout.of({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)}).size
        8
        """
        return cls(tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()))

    @property
    def sizes(self) -> list[int]:
        """How many numbers each tensor has."""
        return [prod(shape) for _, shape in self.shapes]

    @property
    def size(self) -> int:
        """How many numbers a member has."""
        return sum(self.sizes)

    def row(self, tensors: Mapping[str, Tensor]) -> Float[Tensor, "d"]:
        """One member's tensors as a row.

        Raises:
            DataError: they have other names or shapes.
        """
        if ParameterLayout.of(tensors) != self:
            raise DataError(f"members of one stack need equal tensors, got {ParameterLayout.of(tensors)} beside {self}")
        return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])

    def views(self, matrix: Float[Tensor, "members d"]) -> dict[str, Float[Tensor, "members *shape"]]:
        """Every member's tensors by name. Gradients flow back into the matrix in one piece."""
        parts = matrix.split(self.sizes, dim=1)
        return {
            name: part.unflatten(1, shape) if shape else part.squeeze(1)
            for (name, shape), part in zip(self.shapes, parts, strict=True)
        }

    def member(self, row: Float[Tensor, "d"]) -> dict[str, Tensor]:
        """One member's tensors from its row."""
        return {name: tensor.squeeze(0) for name, tensor in self.views(row.unsqueeze(0)).items()}
