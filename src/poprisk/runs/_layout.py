"""The position of each parameter in the flat weight vector, and its parameter group in the optimizer."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk.errors import RunError


@dataclass(frozen=True)
class Layout:
    """The trainable parameters in the order of ``Module.named_parameters``; shared parameters appear once."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    groups: tuple[int, ...]
    """Index of each parameter's group in the optimizer."""

    @cached_property
    def sizes(self) -> list[int]:
        """Number of entries of each parameter."""
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def size(self) -> int:
        """d, the length of the flat vector."""
        return sum(self.sizes)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Data type of the flat vector: the widest one of the parameters."""
        dtypes = [getattr(torch, name.removeprefix("torch.")) for name in self.dtypes]
        widest = dtypes[0]
        for dtype in dtypes[1:]:
            widest = torch.promote_types(widest, dtype)
        return widest

    def flatten(self, pieces: Sequence[Tensor]) -> Float[Tensor, "d"]:
        """Concatenate pieces into a new flat vector, in the layout's dtype."""
        return torch.cat([piece.detach().reshape(-1).to(self.dtype) for piece in pieces])

    def split(self, flat: Float[Tensor, "d"]) -> list[Tensor]:
        """Split a flat vector into pieces with the parameters' shapes."""
        pieces = flat.split(self.sizes)
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def spread(self, values: Sequence[float]) -> float | Float[Tensor, "d"]:
        """Expand one number per group to one per weight; a float if all are equal."""
        if len(set(values)) == 1:
            return float(values[0])
        per_parameter = torch.tensor([values[g] for g in self.groups], dtype=self.dtype)
        return per_parameter.repeat_interleave(torch.tensor(self.sizes))

    def indices(self, names: Collection[str]) -> Int[Tensor, "k"]:
        """Positions of the weights of these parameters in the flat vector."""
        pieces = torch.arange(self.size).split(self.sizes)
        return torch.cat([piece for name, piece in zip(self.names, pieces, strict=True) if name in names])

    def part(self, names: Collection[str]) -> "Layout":
        """The layout of these parameters alone, in the same order."""
        kept = [i for i, name in enumerate(self.names) if name in names]
        rows = (self.names, self.shapes, self.dtypes, self.groups)
        return Layout(*(tuple(row[i] for i in kept) for row in rows))  # type: ignore[arg-type]

    def as_json(self) -> dict[str, Any]:
        """The layout as a JSON value."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Layout":
        """The layout that was saved."""
        shapes = tuple(tuple(shape) for shape in value["shapes"])
        return cls(tuple(value["names"]), shapes, tuple(value["dtypes"]), tuple(value["groups"]))


def layout_of(module: nn.Module, optimizer: Optimizer) -> tuple[Layout, list[nn.Parameter]]:
    """The layout, and the parameters in its order.

    Raises:
        RunError: the optimizer has a parameter that is not in the module, or lacks a trainable one.
    """
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    own = {id(p) for p in named.values()}
    strangers = sum(key not in own for key in group_of)
    if strangers:
        raise RunError(
            f"{strangers} of the optimizer's {len(group_of)} parameters are not trainable parameters of the model: "
            "build the optimizer from the recorded model's parameters"
        )
    missing = next((name for name, p in named.items() if id(p) not in group_of), None)
    if missing is not None:
        raise RunError(
            f"parameter {missing!r} is trainable but not in the optimizer: add it, or freeze it with "
            "requires_grad_(False)"
        )
    strange = next((name for name, p in named.items() if not p.is_floating_point()), None)
    if strange is not None:
        raise RunError(
            f"parameter {strange!r} is {named[strange].dtype}: only real floating-point weights can be recorded"
        )
    if not named:
        raise RunError("the model has no trainable parameters: set requires_grad_(True) on those to train")
    parameters = list(named.values())
    shapes, dtypes = (tuple(p.shape) for p in parameters), (str(p.dtype) for p in parameters)
    return Layout(tuple(named), tuple(shapes), tuple(dtypes), tuple(group_of[id(p)] for p in parameters)), parameters
