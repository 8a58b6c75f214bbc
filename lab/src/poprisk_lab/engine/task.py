"""What a task provides to the engine: initial weights, the losses of many members at once, and metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

StackedWeights = Mapping[str, Float[Tensor, "members *shape"]]
"""Every member's weights by name: views of one matrix [members, parameters], contiguous within a member only."""

StackedBatch = Mapping[str, Int[Tensor, "members batch"]]
"""Indices of the examples that each member uses in this step, for each stream of the task."""


@dataclass(frozen=True)
class TaskMetric:
    """A number that is measured for each member.

    Attributes:
        name: Key of the curve in the stored result, and its label in figures.
        higher_is_better: Whether larger values are better.
        target: Target value; the first step that reaches it is the time to target. ``None`` for no target.
        spec: Format specification for values, as in ``format``.
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
        """The mean loss of each member on its batch. Members do not mix: the gradient of the sum is each member's own.

        Captured in a CUDA graph: static shapes, no synchronisation with the host, no random numbers.
        """
        ...

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """Every metric of the task, one value per member. Called without gradients and outside any CUDA graph."""
        ...


@runtime_checkable
class ErrorCounting(Protocol):
    """A cohort of a classification task, which can count errors on training examples."""

    def errors(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """The share of the given labels of each member's batch that it does not predict."""
        ...


@runtime_checkable
class FirstMetric(Protocol):
    """A cohort that can measure the first metric of its task alone, at a lower cost than all of them."""

    def measure_first(self, weights: StackedWeights) -> Float[Tensor, "members"]:
        """The first metric of the task, as :meth:`Cohort.measure` measures it."""
        ...


class StackedTask(Protocol):
    """A problem to train on, at one size: a frozen dataclass of plain values, so that it can be stored and compared."""

    @property
    def name(self) -> str:
        """Name that is unique among the tasks of a result and can be part of a file name."""
        ...

    @property
    def description(self) -> str:
        """Data, noise, network and loss in one sentence."""
        ...

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """The metrics; settings are chosen by the first."""
        ...

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """(number of examples, batch size) of each stream of indices; an epoch draws each example at most once.

        A task whose streams contain each example several times, such as mirrored images, has an attribute ``copies``:
        of n examples, index i + n is another copy of the example with index i.
        """
        ...

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        ...

    @property
    def evaluations(self) -> int:
        """Number of evenly spaced steps at which :meth:`Cohort.measure` is called, including the last step."""
        ...

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Initial weights of one member, float32 on the CPU: a function of the seed alone."""
        ...

    def cohort(self, seeds: Sequence[int], device: torch.device) -> Cohort:
        """The members with these seeds, with their data loaded; a seed is repeated if several configurations use it."""
        ...


@runtime_checkable
class Portrayed(Protocol):
    """A task whose trained members can be drawn: fields, images, trajectories."""

    def portrait(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, Any]:
        """What a figure shows of one trained member (no leading axis), as plain lists and numbers."""
        ...
