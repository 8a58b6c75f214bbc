"""A stretch of steps as tensors: written one step at a time, read back step by step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk.runs._layout import Layout
from poprisk.runs._linearize import affine_map
from poprisk.runs._step import AffineStep, StepRecord, check_range


@dataclass
class SegmentWriter:
    """Collects the steps from ``start`` on; tensors stay on their device until :meth:`tensors` is called."""

    start: int
    examples: int
    start_options: list[dict[str, Any]]
    """Options of each parameter group before the first of these steps."""
    records: list[StepRecord] = field(default_factory=list)
    options: list[Any] = field(default_factory=list)
    """[step, group, {option: value}] for each change of options from one step to the next."""

    def tensors(self) -> dict[str, Tensor]:
        """The collected steps as tensors, by their names on disk.

        Raises:
            DataError: an index is out of range (indices on the CPU may have been checked before).
        """
        records = self.records
        parts = [part for record in records for part in record.parts]
        indices = [part[0].cpu() for part in parts]
        for index in indices:
            check_range(index, self.examples)
        out = {
            "index": torch.cat(indices),
            "part_size": torch.tensor([len(index) for index in indices]),
            "part_count": torch.tensor([len(record.parts) for record in records]),
            "factor": _numbers([r.factor for r in records]),
            "loss_scale": _numbers([r.loss_scale for r in records]),
            "loss": _numbers([_loss(r.loss) for r in records]),
        }
        if any(weights is not None for _, weights in parts):
            nan = [torch.full((len(index),), math.nan, dtype=torch.float64) for index in indices]
            pairs = zip(parts, nan, strict=True)
            out["example_weight"] = torch.cat([blank if w is None else w.cpu().double() for (_, w), blank in pairs])
        return out | self._dense()

    def _dense(self) -> dict[str, Tensor]:
        linear = [r.linear for r in self.records if r.linear is not None]
        if len(linear) != len(self.records):
            return {}
        vectors = {name: [x.get(name) for x in linear] for name in ("preconditioner", "decay", "buffer")}
        vectors["weights"] = [r.weights for r in self.records]
        out = {"coefficients": torch.stack([x["coefficients"] for x in linear])}
        out |= {name: _stacked(v) for name, v in vectors.items() if any(x is not None for x in v)}
        sources = ((k, r.source) for k, r in enumerate(self.records))
        return out | {f"source.{k}": source.cpu() for k, source in sources if source is not None}


class SegmentReader:
    """The steps ``start`` … ``stop - 1`` of a run, as they were written."""

    def __init__(self, start: int, tensors: dict[str, Tensor], notes: Any, layout: Layout, examples: int) -> None:
        self.start, self._notes = start, notes
        self._tensors, self._layout, self._examples = tensors, layout, examples
        self.stop = start + len(tensors["part_count"])
        part_ends = tensors["part_count"].cumsum(0).tolist()
        self._part_range = list(zip([0, *part_ends[:-1]], part_ends, strict=True))
        entry_ends = tensors["part_size"].cumsum(0).tolist()
        self._entry_range = list(zip([0, *entry_ends[:-1]], entry_ends, strict=True))

    @property
    def is_dense(self) -> bool:
        """Whether weights and linearization of every step were recorded."""
        return "weights" in self._tensors

    @property
    def losses(self) -> Float[Tensor, "steps"]:
        """Loss of each step; NaN if it was not set."""
        return self._tensors["loss"]

    def parts(self, k: int) -> list[tuple[Tensor, Tensor | None]]:
        """The micro-batches of step k: indices, and weights of the examples if they were given."""
        found = []
        for part in range(*self._part_range[k - self.start]):
            rows = slice(*self._entry_range[part])
            weights = self._tensors["example_weight"][rows] if "example_weight" in self._tensors else None
            given = weights is not None and not bool(weights.isnan().any())
            found.append((self._tensors["index"][rows], weights if given else None))
        return found

    def batch(self, k: int) -> Int[Tensor, "b"]:
        """Indices of the examples in step k's batch."""
        return torch.cat([index for index, _ in self.parts(k)])

    def selection(self, k: int) -> Float[Tensor, "b"]:
        r"""The diagonal of S: n times the weight of each example's loss in the gradient."""
        parts = self.parts(k)
        weights = [
            torch.full((len(index),), 1 / (len(parts) * len(index)), dtype=torch.float64) if w is None else w
            for index, w in parts
        ]
        factor, scale = self.factor(k)
        return (torch.cat(weights) * (self._examples * factor * scale)).to(self._layout.dtype)

    def factor(self, k: int) -> tuple[float, float]:
        """Factors of the gradient after backward() and of the loss before it."""
        i = k - self.start
        return self._tensors["factor"][i].item(), self._tensors["loss_scale"][i].item()

    def options(self, k: int) -> list[dict[str, Any]]:
        """Each parameter group's options at step k."""
        groups = [dict(group) for group in self._notes["start_options"]]
        for step, g, changed in self._notes["options"]:
            if step <= k:
                groups[g].update(changed)
        return groups

    def weights(self, k: int) -> Float[Tensor, "d"]:
        """The flat weights before step k."""
        return self._tensors["weights"][k - self.start].clone()

    def buffer_after(self, k: int) -> Float[Tensor, "d"]:
        """The momentum buffer after step k; zero without momentum."""
        buffer = self._vector("buffer", k)
        return torch.zeros(self._layout.size, dtype=self._layout.dtype) if buffer is None else buffer

    def step(self, k: int) -> AffineStep:
        """Step k as an affine map of its gradient."""
        names = ("preconditioner", "decay", "source")
        vectors = {name: vector for name in names if (vector := self._vector(name, k)) is not None}
        values = affine_map(self._layout, {"coefficients": self._tensors["coefficients"][k - self.start], **vectors})
        if "preconditioner" not in vectors:
            ones = torch.ones(self._layout.size, dtype=self._layout.dtype)
            vectors["preconditioner"] = ones * values["preconditioner"]
        return AffineStep(self.batch(k), self.selection(k), **{**values, **vectors})

    def _vector(self, name: str, k: int) -> Float[Tensor, "d"] | None:
        i = k - self.start
        if name == "source":
            found = self._tensors.get(f"source.{i}")
            return None if found is None else found.clone()
        if name not in self._tensors or bool(self._tensors[name][i].isnan().all()):
            return None
        return self._tensors[name][i].clone()


def _loss(loss: Tensor | float | None) -> float:
    return math.nan if loss is None else float(loss)


def _numbers(values: Sequence[float]) -> Float[Tensor, "steps"]:
    return torch.tensor(values, dtype=torch.float64)


def _stacked(vectors: Sequence[Tensor | None]) -> Float[Tensor, "steps d"]:
    """One row per step, NaN for steps without the vector: options may change in the middle of a segment."""
    like = next(x for x in vectors if x is not None)
    return torch.stack([torch.full_like(like, math.nan) if x is None else x for x in vectors]).cpu()
