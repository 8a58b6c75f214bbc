"""An analysis kept in its run's directory, part by part, so that finished parts are not computed again.

``RUN/analysis/index.json`` lists the parts with the hashes of their files, and identifies the run's manifest, the
problem's data and the options that they were computed from. If any of these differ, the parts are ignored and replaced.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from poprisk._core.estimate import Estimate
from poprisk._core.store import (
    TensorFile,
    fingerprint,
    pack,
    read_tensors,
    unpack,
    writable_directory,
    write_json,
    write_tensors,
)
from poprisk._version import __version__
from poprisk.errors import DataError, RunError
from poprisk.report._analysis.curves import KernelCurve, LossCurves, Memorization
from poprisk.report._analysis.gates import GateCurve
from poprisk.report._analysis.neighbours import Neighbours
from poprisk.report._analysis.operators import CleanTargets, DriftCurve, WindowFacts
from poprisk.risk import AuditTable, Reading, RiskEstimate
from poprisk.runs import Run
from poprisk.theory import ExampleGroups

BUDGET = 30.0
"""Default time budget per part, in seconds on one CPU core."""
FOLDER, INDEX = "analysis", "index.json"
_VERSION = 2
_CLASSES = (
    AuditTable,
    DriftCurve,
    Estimate,
    ExampleGroups,
    GateCurve,
    KernelCurve,
    LossCurves,
    Memorization,
    Neighbours,
    Reading,
    RiskEstimate,
    WindowFacts,
)


@dataclass(frozen=True)
class Part:
    """The outcome for one part: a value, or the reason why there is none."""

    value: Any
    reason: str | None = None


class KeptAnalysis:
    """The parts of one run's analysis on disk, for given options.

    Options that are not given are those of the analysis on disk if it belongs to the run, otherwise the defaults.

    Args:
        run: A run in a directory.
        budget: See :func:`~poprisk.report.analyze`.
        retrain: See :func:`~poprisk.report.analyze`.
        clean: See :func:`~poprisk.report.analyze`.
        writes: Whether to keep newly computed parts; if False, existing ones are only read.

    Raises:
        RunError: The run is in memory.
        OSError: The run's directory is not writable.
    """

    def __init__(
        self,
        run: Run,
        budget: float | None = None,
        retrain: int | None = None,
        clean: CleanTargets | None = None,
        *,
        writes: bool = True,
    ) -> None:
        if run.path is None:
            raise RunError(
                "an analysis is kept with its run, but this run is in memory: save it first with run.save(path)"
            )
        if writes:
            writable_directory(run.path)
        self.folder, self.writes = run.path / FOLDER, writes
        index, identity = _read_index(self.folder), _identity(run)
        there = index if index is not None and index["belongs"]["run"] == identity else None
        usual = {"budget": BUDGET, "retrain": 0, "clean": None} if there is None else there["belongs"]["options"]
        self.budget: float = float(usual["budget"] if budget is None else budget)
        self.retrain: int = usual["retrain"] if retrain is None else retrain
        seen = usual["clean"] if clean is None else fingerprint({"train": clean.train, "test": clean.test})
        options = {"budget": self.budget, "retrain": self.retrain, "clean": seen}
        self._parts: dict[str, Any] = there["parts"] if there is not None and options == usual else {}
        if clean is None and "operators" not in self._parts:
            options["clean"] = None  # without the targets, the operators cannot be computed for them
        self._belongs = {"run": identity, "options": options}

    @property
    def finished(self) -> list[str]:
        """Names of the finished parts."""
        return list(self._parts)

    def get(self, name: str) -> Part | None:
        """A part, if it exists and is intact."""
        entry = self._parts.get(name)
        if entry is None:
            return None
        try:
            tensors, form = read_tensors(self.folder, TensorFile(**entry))
            return Part(unpack(form["value"], tensors, _CLASSES), form["reason"])
        except DataError:  # damaged, or from another version: compute it again
            return None

    def put(self, name: str, part: Part) -> None:
        """Keep a part: write its file first, then the index that lists it."""
        if not self.writes:
            return
        form, tensors = pack(part.value)
        file = write_tensors(self.folder / f"{name}.safetensors", tensors, {"value": form, "reason": part.reason})
        self._parts[name] = asdict(file)
        write_json(self.folder / INDEX, {"kind": "analysis", "belongs": self._belongs, "parts": self._parts})

    def words(self) -> str:
        """What is on disk, for the message after an interrupt; empty if nothing is."""
        there = self.writes and self.finished
        return f"finished parts are kept in {self.folder} and will be used again" if there else ""

    def forget(self) -> None:
        """Ignore all parts on disk, so that everything is computed again."""
        self._parts = {}


def _read_index(folder: Path) -> dict[str, Any] | None:
    """The index of an analysis; None if there is none that can be read."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(index, dict) or index.get("kind") != "analysis":
        return None
    belongs = index.get("belongs")
    options = belongs.get("options") if isinstance(belongs, dict) and "run" in belongs else None
    known = isinstance(options, dict) and options.keys() == {"budget", "retrain", "clean"}
    return index if known and isinstance(index.get("parts"), dict) else None


def _identity(run: Run) -> str:
    """What an analysis depends on besides its options: the record, the current data, the version."""
    try:
        problem = run.problem
        data = [problem.fingerprint, None if problem.test is None else _test_fingerprint(problem.test)]
    except RunError:
        data = [None, None]
    content = [_VERSION, __version__, run.manifest, data]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _test_fingerprint(test: Any) -> str:
    inputs, targets = test
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    return fingerprint({"targets": targets, **{f"inputs {i}": x for i, x in enumerate(parts)}})
