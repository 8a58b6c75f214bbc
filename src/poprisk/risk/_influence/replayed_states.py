"""Optimizer states along a run, computed again from the recorded weights and kept as densely as memory allows."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor

from poprisk.runs import FlatRule

State = tuple[Tensor, ...]


class ReplayedStates:
    """The state that each step of a run found, for any step, cheapest when asked in descending or ascending order.

    The states of every c-th step are kept; those between are computed again, a stretch at a time. c is the smallest
    for which both fit in ``memory``, and √steps where nothing does.

    Args:
        rule: The run's optimizer.
        weights: The recorded weights before step k.
        gradient: The gradient that step k used.
        stop: States are asked for before the steps 0 … stop - 1.
        memory: Bytes.
    """

    def __init__(
        self,
        rule: FlatRule,
        weights: Callable[[int], Float[Tensor, "d"]],
        gradient: Callable[[int], Float[Tensor, "d"]],
        stop: int,
        memory: int,
    ) -> None:
        self._rule, self._weights, self._gradient, self._stop = rule, weights, gradient, stop
        w = weights(0)
        self.every = _spacing(stop, len(rule.state_names) * w.numel() * w.element_size(), memory)
        self._kept: dict[int, State] = {0: rule.initial(w)}
        self._stretch: dict[int, State] = {}

    def before(self, k: int) -> State:
        """The state that step k found."""
        if not self._rule.state_names:
            return ()
        if k in self._kept:
            return self._kept[k]
        if k not in self._stretch:
            self._fill(k)
        return self._stretch[k]

    def _fill(self, k: int) -> None:
        """The stretch that has step k; on the way there for the first time, the states to keep."""
        start = max(at for at in self._kept if at <= k)
        end = min((k // self.every + 1) * self.every, self._stop)
        state = self._kept[start]
        self._stretch = {}
        for j in range(start, end):
            if j % self.every == 0:
                self._kept[j], self._stretch = state, {}
            self._stretch[j] = state
            if j + 1 < end:
                state = self._rule.step(j, self._weights(j), self._gradient(j), state)[1]


def _spacing(steps: int, state_bytes: int, memory: int) -> int:
    """The smallest c with steps/c + c states in memory.

    >>> _spacing(100, 8, 8 * 1000), _spacing(100, 8, 8 * 30), _spacing(100, 8, 8)
    (1, 4, 10)
    """
    for c in range(1, max(2, int(steps**0.5) + 1)):
        if (steps / c + c) * state_bytes <= memory:
            return c
    return max(1, round(steps**0.5))
