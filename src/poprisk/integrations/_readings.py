"""Readings of the gate between two log lines, shared by all callbacks and loggers."""

import math
from pathlib import Path
from typing import Any

from poprisk._core.store import write_json
from poprisk.errors import HyperparameterError
from poprisk.optim import GateDiagnostics, KeepBest, PopRiskAdamW

PREFIX = "poprisk/"
METERS_FILE = "poprisk_meters.json"
AVERAGED = ("active_fraction", "mean_gate", "population_rate", "training_rate")


class Readings:
    """Gate diagnostics that stay on the device, and are averaged only when a line is logged.

    Rates of single batches are noisy, so a log line is the mean of the readings since the last one; the noise scale is
    their harmonic mean (the signal's power is what fluctuates), and ``self_fit`` is computed from the mean rates.

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
        """Read the diagnostics of all groups together; between ``backward()`` and ``step()`` they include the rates.

        Before the first step there is nothing to read.
        """
        if optimizer.state:
            self.add(optimizer.overall_diagnostics())

    def add(self, reading: GateDiagnostics) -> None:
        """Take diagnostics that were computed elsewhere."""
        self._taken.append(reading)

    def flush(self) -> dict[str, float]:
        """The values of the next log line, with names that start with ``poprisk/``; clears the readings.

        Values that are not finite are left out: rates without new gradients, a noise scale without any signal.
        """
        rows = [reading.to_floats() for reading in self._taken]
        self._taken = []
        values = {name: _mean([row[name] for row in rows]) for name in AVERAGED}
        inverse = _mean([1 / row["noise_scale"] if row["noise_scale"] else math.inf for row in rows])
        values["noise_scale"] = 1 / inverse if inverse else math.nan
        rate = values["training_rate"]
        values["self_fit"] = 1 - values["population_rate"] / rate if rate else math.nan
        return {PREFIX + name: value for name, value in values.items() if math.isfinite(value)}


def held_back_readings(keeper: KeepBest) -> dict[str, float]:
    """The last measurement of a keeper, as named numbers for a log line."""
    last, kept = keeper.curve.moments[-1], keeper.kept_step
    found = {"held_back_loss": float(last.losses.double().mean()), "kept_step": float(kept or 0)}
    if last.scores is not last.losses and bool(((last.scores == 0) | (last.scores == 1)).all()):
        found["held_back_accuracy"] = float(1 - last.scores.double().mean())
    return {PREFIX + name: value for name, value in found.items() if math.isfinite(value)}


def add_to_line(values: dict[str, float], logs: dict[str, Any], state: Any) -> None:
    """Add values to a log line of a Hugging Face trainer, and to the history that is saved with the run."""
    logs.update(values)
    if state.log_history and state.log_history[-1].get("step") == state.global_step:
        state.log_history[-1].update(values)


def write_readings(folder: str | Path, lines: list[dict[str, Any]]) -> None:
    """Write the readings of a run, one entry per log line, to its directory."""
    write_json(Path(folder) / METERS_FILE, {"format_version": 1, "readings": lines})


def interval(every: int | None, log_every: int) -> int:
    """Steps between two readings: as given, otherwise ten readings per log line."""
    if every is None:
        return max(1, log_every // 10)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise HyperparameterError(f"every must be an integer ≥ 1, or None for ten readings per line, got {every!r}")
    return every


def find_poprisk(optimizer: Any) -> PopRiskAdamW | None:
    """The PopRiskAdamW inside the wrappers of a trainer, or None."""
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
