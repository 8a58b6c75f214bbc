"""What a task gives to the engine: weights to start from, losses of many members at once, and what is measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

StackedWeights = Mapping[str, Float[Tensor, "members *shape"]]
"""Every member's weights by name: views of one matrix [members, parameters], contiguous within a member only."""

StackedBatch = Mapping[str, Int[Tensor, "members batch"]]
"""Indices of the examples each member sees in this step, for each stream of the task."""


@dataclass(frozen=True)
class TaskMetric:
    """One number measured of each member.

    Attributes:
        name: Key of the curve in the stored result, and its words on a figure.
        higher_is_better: Direction.
        target: The value whose first step is the time to target; None where there is no such question.
        spec: How a value is written, as in ``format``.
    """

    name: str
    higher_is_better: bool
    target: float | None = None
    spec: str = ".3f"

    def better(self, a: float, b: float) -> bool:
        """Whether a is better than b.

        >>> TaskMetric("test accuracy", True).better(0.9, 0.8), TaskMetric("error", False).better(0.9, 0.8)
        (True, False)
        """
        return a > b if self.higher_is_better else a < b


class Cohort(Protocol):
    """The members of one stacked training: their data on the device, their losses, their measurements."""

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """Each member's mean loss on its batch. Members do not mix: the sum's gradient is each member's own.

        Captured in a CUDA graph: static shapes, no synchronisation with the host, no random numbers of its own.
        """
        ...

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """Every metric of the task, one value a member. Called without gradients and outside any graph."""
        ...


class StackedTask(Protocol):
    """A problem to train on, at one size: a frozen dataclass of plain values, so that it can be stored and compared."""

    @property
    def name(self) -> str:
        """Fit for a file's name; unique among the tasks of a result."""
        ...

    @property
    def description(self) -> str:
        """One plain sentence: data, noise, network, loss."""
        ...

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """What is measured; the first is what settings are chosen by."""
        ...

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """(number of examples, batch size) of each stream of indices; an epoch draws each example at most once."""
        ...

    @property
    def steps(self) -> int:
        """Optimizer steps of a training."""
        ...

    @property
    def evaluations(self) -> int:
        """At how many evenly spaced steps :meth:`Cohort.measure` is called, the last step among them."""
        ...

    def initial(self, seed: int) -> dict[str, Tensor]:
        """One member's weights at the start, float32 on the CPU: a function of the seed alone."""
        ...

    def cohort(self, seeds: Sequence[int], device: torch.device) -> Cohort:
        """The members with these seeds (one each, repeated where configurations share a seed), data loaded."""
        ...


@runtime_checkable
class Portrayed(Protocol):
    """A task whose trained members can be pictured: fields, images, trajectories."""

    def portrait(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, Any]:
        """What a figure needs of one trained member (no leading axis), as plain lists and numbers."""
        ...
