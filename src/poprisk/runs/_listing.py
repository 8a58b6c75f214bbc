"""A list of the recorded runs below a folder, read from their manifests; nothing that a run names is executed."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poprisk._core.store import read_json
from poprisk.errors import DataError, PopRiskError
from poprisk.optim import KeptRisk
from poprisk.runs._run import Run
from poprisk.runs._storage import MANIFEST


@dataclass(frozen=True)
class RunSummary:
    """What is known about a recorded run without its problem."""

    path: Path
    problem: str = ""
    """Name of the problem; empty if none was recorded."""
    optimizer: str = ""
    lr: float = math.nan
    """Learning rate of the first step, in the first parameter group."""
    created: str = ""
    steps: int = 0
    examples: int = 0
    weights: int = 0
    finished: bool = False
    """Whether the recording was closed; otherwise it is going on, or was interrupted."""
    loss: float = math.nan
    """Mean loss of the batches in the last eighth of the steps; NaN if not recorded."""
    risk: KeptRisk | None = None
    """Held-back risk of the kept weights, if examples were held back."""
    bytes: int = 0
    error: str = ""
    """Why the run cannot be opened."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        risk = None if self.risk is None else self.risk.to_dict() | {"step": self.risk.step}
        numbers = {name: None if math.isnan(v := getattr(self, name)) else v for name in ("lr", "loss")}
        return {**vars(self), "path": self.path.as_posix(), "risk": risk, **numbers}


def list_runs(folder: str | Path) -> list[RunSummary]:
    """List the recorded runs in a folder and its subfolders, the oldest first.

    Only manifests, losses and held-back risks are read; no problem is rebuilt.

    Args:
        folder: The folder; it may be a run itself.

    Returns:
        A summary of each run. Runs that cannot be opened are listed with ``error``.

    Raises:
        DataError: there is no such folder.

    >>> list_runs(".") == list_runs(Path())
    True
    """
    if not Path(folder).is_dir():
        raise DataError(f"{folder} is not a folder: pass the one that holds your runs")
    return sorted((_summary(path) for path in _runs_in(Path(folder))), key=lambda run: (run.created, run.path))


def _runs_in(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if MANIFEST in files and _is_run(Path(where) / MANIFEST):
            yield Path(where)


def _is_run(manifest: Path) -> bool:
    """Whether a manifest is that of a run, or damaged."""
    try:
        content = read_json(manifest)
    except (OSError, DataError):
        return True
    return isinstance(content, dict) and content.get("kind") == "run"


def _summary(path: Path) -> RunSummary:
    try:
        run = Run.load(path)
        about = run.manifest
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        return RunSummary(
            path=path,
            problem=(about["problem"] or {}).get("name", ""),
            optimizer=about["optimizer"]["name"].rpartition(".")[2],
            lr=float(about["optimizer"]["groups"][0].get("lr", math.nan)),
            created=about["created"],
            steps=run.num_steps,
            examples=run.num_examples,
            weights=run.num_weights,
            finished=bool(about["closed"]),
            loss=run.last_losses(max(1, run.num_steps // 8)).mean().item() if run.num_steps else math.nan,
            risk=None if run.kept is None else run.kept.risk,
            bytes=size,
        )
    except (PopRiskError, OSError, KeyError, TypeError, ValueError) as error:
        return RunSummary(path, error=str(error).splitlines()[0] if str(error) else type(error).__name__)
