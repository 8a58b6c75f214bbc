"""Means of the weights that an optimizer moves in its own pass over memory, and which of them its last step moved."""

from collections.abc import Callable, Iterable

from torch import Tensor


class StepAverage:
    """Means of weights, offered to :class:`poprisk.PopRiskAdamW`; a fused kernel moves those that it supports.

    Args:
        weights: Parameters; of sharded ones the local part.
        means: Mean of each, in the same layout and in the dtype of the step's arithmetic.
        weight: Called in each step: how far every mean moves toward the weights after this step, in [0, 1].
    """

    def __init__(self, weights: Iterable[Tensor], means: Iterable[Tensor], weight: Callable[[], float]) -> None:
        self._means = {id(x): (x, mean) for x, mean in zip(weights, means, strict=True)}
        self.weight = weight
        self.closed = False
        """Whether the optimizer is to stop moving them."""
        self._moved: set[int] = set()

    def mean_of(self, weights: Tensor) -> Tensor | None:
        """The mean of these weights, if there is one."""
        return self._means.get(id(weights), (None, None))[1]

    def mark(self, weights: Iterable[int]) -> None:
        """Notes the weights (by ``id``) whose means this step has moved."""
        self._moved.update(weights)

    def take_moved(self) -> set[int]:
        """The ``id`` of all weights whose means were moved since the last call; whoever asks moves the others."""
        moved, self._moved = self._moved, set()
        return moved
