"""Readings of the gate between two log lines, shared by every trainer's callback and every logger."""

import math
from typing import Any

from poprisk.errors import HyperparameterError
from poprisk.optim import GateDiagnostics, PopRiskAdamW

PREFIX = "poprisk/"
AVERAGED = ("active_fraction", "mean_gate", "population_rate", "training_rate")


class Readings:
    """Meters taken on the device, averaged and waited for only when a line is logged.

    Single batches give noisy rates, so a log line is the mean of the readings since the last one; the noise scale is
    their harmonic mean (the signal's power is what fluctuates), and ``self_fit`` is that of the mean rates.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = PopRiskAdamW(model.parameters())
        >>> readings = Readings()
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(4, 2)).square().mean().backward()
        ...     readings.take(optimizer)
        ...     optimizer.step()
        >>> sorted(readings.flush())[:2], readings.flush()
        (['poprisk/active_fraction', 'poprisk/mean_gate'], {})
    """

    def __init__(self) -> None:
        self._taken: list[GateDiagnostics] = []

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, optimizer: PopRiskAdamW) -> None:
        """Reads the meters of all groups together; between ``backward()`` and ``step()`` the rates are among them.

        Before the first step there is nothing to read, and nothing is taken.
        """
        if optimizer.state:
            self._taken.append(optimizer.overall_diagnostics())

    def flush(self) -> dict[str, float]:
        """The meters of the log line now due, by their names with ``poprisk/`` in front; readings begin anew.

        What is not a number is left out: rates without fresh gradients, a noise scale where no signal stood out.
        """
        rows = [reading.to_floats() for reading in self._taken]
        self._taken = []
        values = {name: _mean([row[name] for row in rows]) for name in AVERAGED}
        inverse = _mean([1 / row["noise_scale"] if row["noise_scale"] else math.inf for row in rows])
        values["noise_scale"] = 1 / inverse if inverse else math.nan
        rate = values["training_rate"]
        values["self_fit"] = 1 - values["population_rate"] / rate if rate else math.nan
        return {PREFIX + name: value for name, value in values.items() if math.isfinite(value)}


def interval(every: int | None, log_every: int) -> int:
    """How many steps from one reading to the next: as asked, else ten readings to a log line."""
    if every is None:
        return max(1, log_every // 10)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise HyperparameterError(f"every must be a whole number ≥ 1, or None for ten readings per line, got {every!r}")
    return every


def find_poprisk(optimizer: Any) -> PopRiskAdamW | None:
    """The PopRiskAdamW inside the wrappers that trainers put around an optimizer, or None if there is none."""
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen:
        if isinstance(optimizer, PopRiskAdamW):
            return optimizer
        seen.add(id(optimizer))
        inner = getattr(optimizer, "optimizer", None)
        optimizer = inner if inner is not None else getattr(optimizer, "_optimizer", None)
    return None


def _mean(values: list[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return math.fsum(finite) / len(finite) if finite else math.nan
