"""Run an experiment made of studies: one after another, with progress, resumable, stored as one result."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store import save_result
from poprisk.errors import HyperparameterError
from poprisk_lab.engine.ledger import RowLedger
from poprisk_lab.engine.study import Study, run_study

Progress = Callable[[int, int, str], None]
"""Called with the number of measurements done, the maximum number, and what is being trained ("" at the end)."""


@dataclass(frozen=True)
class ComparisonResult:
    """All studies of an experiment, by the name of their task, ready to be stored."""

    kind: str
    config: Mapping[str, Any]
    studies: Mapping[str, Any]

    def save(self, path: str | Path) -> Path:
        """Write the result and its environment as JSON."""
        return save_result(path, self.kind, self.config, {"studies": dict(self.studies)})


def run_comparison(
    kind: str,
    config: Any,
    studies: Sequence[Study],
    report: Progress | None = None,
    ledger: Path | None = None,
    device: torch.device | None = None,
) -> ComparisonResult:
    """Run every study.

    Args:
        kind: Kind of the result.
        config: Configuration of the experiment, a dataclass that is stored with the result.
        studies: Studies to run; their tasks must have different names.
        report: Progress callback.
        ledger: Folder for finished rows, from which a later run of the experiment continues; ``None`` keeps nothing.
        device: Device to compute on; by default a GPU if there is one.

    Raises:
        HyperparameterError: two tasks have the same name.
    """
    names = [study.task.name for study in studies]
    if len(set(names)) != len(names) or not names:
        raise HyperparameterError(f"expected at least one study, each with a different task name, got {names}")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total, done = sum(study.measurements() for study in studies), 0

    def look(words: str) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(min(done, total - 1), total, words)

    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    finished: dict[str, Any] = {}
    kept = RowLedger(ledger)
    upcoming = 0
    try:
        for study in studies:
            finished[study.task.name] = run_study(study, device, look, kept)
            upcoming += study.measurements()
            done = upcoming  # an arm may have chosen fewer trials than it could have
    finally:
        torch.set_float32_matmul_precision(before)
    if report is not None:
        report(total, total, "")
    return ComparisonResult(kind, asdict(config), finished)
