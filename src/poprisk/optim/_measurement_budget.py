"""When to measure: as often as a share of the training's work allows, closer together where the curve bends."""

from typing import Any

from poprisk.errors import StateDictError

_FORWARD = 1 / 3
"""A forward pass costs about a third of a training step on the same examples."""
_OVERHEAD = 0.15
"""What swapping weights in and out costs, in training steps."""
_BANKED = 6.0
"""Measurements that may be saved up for the stretch where the curve bends."""
_SPACING = 0.01
"""Least distance of two measurements, as a share of the steps so far: closer averages hardly differ."""
_ASSUMED = 32
"""Examples of a step where none were counted."""


class MeasurementBudget:
    """Counts the examples of training steps, and says when the next measurement is due.

    Work is counted in examples, not in seconds: the same training measures the same moments on any machine.
    """

    def __init__(self, cost: float, examples: int, averages: int) -> None:
        self._cost, self._examples, self._averages = cost, examples, averages
        self.batch: float | None = None
        """Mean number of examples of a step, as all processes agreed on it; None before the first step."""
        self._seen = self._largest = self._steps = self._last = self._since = 0
        self._credit = 0.0

    def count(self, examples: int) -> None:
        """Count the examples of one forward pass in training."""
        self._seen += examples
        self._since += examples
        self._largest = max(self._largest, examples)

    @property
    def counted(self) -> float:
        """Mean number of examples of a step in this process, with all passes of gradient accumulation."""
        return self._seen / max(self._steps, 1)

    @property
    def left_over(self) -> int:
        """Examples trained on since the last step, where they are more than three steps use; otherwise 0."""
        usual = (self._seen - self._since) / max(self._steps, 1)
        return self._since if self._since > 3 * usual else 0

    @property
    def batch_size(self) -> int:
        """Examples of a forward pass in a measurement, which needs less memory than one in training."""
        return min(2 * self._largest or _ASSUMED, self._examples)

    @property
    def work(self) -> float:
        """One measurement of one average, in training examples."""
        return self._examples * _FORWARD

    def end_step(self) -> None:
        """One more training step was taken."""
        self._steps += 1
        self._since = 0

    def is_due(self, bending: bool) -> bool:
        """Whether to measure after this step; if so, the price is paid."""
        passes = self._examples / (self.batch or _ASSUMED)
        price = self._averages * (max(passes, 1.0) * _FORWARD + _OVERHEAD)
        self._credit = min(self._credit + self._cost, _BANKED * price)
        if self._credit < (price if bending else 2 * price) or self._steps < (1 + _SPACING) * self._last:
            return False
        self._credit -= price
        self._last = self._steps
        return True

    def state(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "examples": self._examples,
            "batch": self.batch,
            "seen": self._seen,
            "largest": self._largest,
            "steps": self._steps,
            "last": self._last,
            "credit": self._credit,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`, which must be of as many held-back examples."""
        saved = state.get("examples", self._examples)
        if saved != self._examples:
            found = f"has {self._examples} held-back examples, and the state was saved with {saved}"
            raise StateDictError(f"this KeepBest {found}: hold the same examples back as before (same seed and share)")
        self.batch, self._credit = state["batch"], state["credit"]
        self._seen, self._largest = state["seen"], state["largest"]
        self._steps, self._last = state["steps"], state["last"]
