r"""A task whose gradient comes in two parts: the batch's, and its second half's share in it.

The engine differentiates one loss by one row of weights. To get two gradients out of it every tensor w is given a
*shadow* z of the same shape, which starts and stays at zero, and the loss of the two halves A and B of a batch is
written as

.. math:: \tfrac12 L_A(w) + \tfrac12 L_B(w + z - \mathrm{stop}(z)),

whose value is that of the whole batch. Its derivative by w is the batch's gradient g, by z it is :math:`g_B/2`, and
the first half's is :math:`g_A = 2(g - g_B/2)`. A row of weights is then (w, z), two parts of equal length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.task import Cohort, StackedBatch, StackedTask, StackedWeights, TaskMetric

BATCHES = ("batch_size", "batch", "interior_batch", "sensor_batch", "boundary_batch")
"""Fields that tasks keep the sizes of their batches in."""
_SHADOW, _FILLER = "shadow.", "filler"
_ALIGNED = 4  # of a parameter layout: the two parts have the same gaps if the first ends at such a place


@dataclass(frozen=True)
class HalvesTask:
    """Another task, its batches in halves; same data, starts, batches and measurements.

    Attributes:
        whole: The task itself.

    Raises:
        HyperparameterError: a batch of it has an odd size.

    >>> from poprisk_lab.paper.teacher.study import TeacherTask
    >>> HalvesTask(TeacherTask(noise=0.4)).name
    'teacher_40_halves'
    """

    whole: StackedTask

    def __post_init__(self) -> None:
        odd = [size for _, size in self.whole.streams.values() if size % 2]
        if odd:
            raise HyperparameterError(f"a batch in halves needs an even size, got {odd[0]}: choose another batch size")

    @property
    def name(self) -> str:
        """The task's, with a mark."""
        return f"{self.whole.name}_halves"

    @property
    def description(self) -> str:
        """The task's."""
        return self.whole.description

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """The task's."""
        return self.whole.metrics

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """The task's: whole batches, which are cut here."""
        return self.whole.streams

    @property
    def steps(self) -> int:
        """The task's."""
        return self.whole.steps

    @property
    def evaluations(self) -> int:
        """The task's."""
        return self.whole.evaluations

    def initial(self, seed: int) -> dict[str, Tensor]:
        """The task's start and its shadow, filled up to places where a large tensor may begin."""
        start = self.whole.initial(seed)
        missing = -_ends_at(start) % _ALIGNED
        if missing:
            start = {**start, _FILLER: torch.zeros(missing)}
        return {**start, **{_SHADOW + name: torch.zeros_like(tensor) for name, tensor in start.items()}}

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "HalvesCohort":
        """The members of the task with half of each batch at a time."""
        return HalvesCohort(half_task(self.whole).cohort(seeds, device))


class HalvesCohort:
    """A cohort that sees its batches in halves.

    Args:
        half: The cohort of the task with batches of half the size.
    """

    def __init__(self, half: Cohort) -> None:
        self._half = half

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """The whole batch's; see the module."""
        first = {name: index[:, : index.shape[1] // 2] for name, index in batch.items()}
        second = {name: index[:, index.shape[1] // 2 :] for name, index in batch.items()}
        here = _without_shadow(weights)
        beside = {name: w + (weights[_SHADOW + name] - weights[_SHADOW + name].detach()) for name, w in here.items()}
        return (self._half.losses(here, first) + self._half.losses(beside, second)) / 2

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """The task's measurements."""
        return self._half.measure(_without_shadow(weights))


def half_task(task: Any) -> Any:
    """The same task with batches of half the size.

    >>> from poprisk_lab.paper.teacher.study import TeacherTask
    >>> half_task(TeacherTask(batch_size=100)).batch_size
    50
    """
    return replace(task, **{name: getattr(task, name) // 2 for name in BATCHES if hasattr(task, name)})


def _without_shadow(weights: StackedWeights) -> dict[str, Tensor]:
    return {name: w for name, w in weights.items() if not name.startswith(_SHADOW) and name != _FILLER}


def _ends_at(tensors: Mapping[str, Tensor]) -> int:
    """Where a row of these tensors ends, gaps before large ones included and the one at the end left out."""
    from poprisk_lab.engine.parameter_layout import ParameterLayout

    return sum(ParameterLayout.of(tensors).segments[:-1])
