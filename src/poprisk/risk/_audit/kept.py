"""Parts of an analysis, kept in the directory of their run, so that finished ones are not computed again.

``RUN/analysis/index.json`` lists the parts with the hashes of their files, and identifies the run's manifest, the
problem's data and the options that they were computed from. If any of these differ, the parts are ignored and replaced.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from typing_extensions import TypedDict

from poprisk._core.estimate import Estimate
from poprisk._core.store import (
    TensorFile,
    check_fields,
    check_schema,
    fingerprint,
    fits,
    json_digest,
    own_folder,
    pack,
    read_json,
    read_tensors,
    unpack,
    writable_directory,
    write_json,
    write_tensors,
)
from poprisk._version import __version__
from poprisk.errors import DataError, RunError
from poprisk.risk._audit.table import AuditTable
from poprisk.runs import MANIFEST, Run

BUDGET = 30.0
"""Default time budget per part, in seconds on one CPU core."""
FOLDER, INDEX = "analysis", "index.json"
_VERSION = 2


class _File(TypedDict):
    name: str
    size: int
    sha256: str


class _Options(TypedDict):
    budget: float
    retrain: int
    clean: str | None


class _Belongs(TypedDict):
    run: str
    data: list[str | None] | None
    options: _Options


class _Index(TypedDict):
    kind: Literal["analysis"]
    belongs: _Belongs
    parts: dict[str, _File]
    sha256: str


@dataclass(frozen=True)
class Part:
    """The outcome for one part: a value, or the reason why there is none."""

    value: Any
    reason: str | None = None


class KeptParts:
    """The parts of one run's analysis on disk, for given options; here those that this room knows.

    Options (see ``analyze``) that are not given are those of the analysis on disk if it belongs to the run, otherwise
    the defaults. With ``writes=False`` existing parts are only read; otherwise the run's directory must be writable.
    """

    TYPES: ClassVar[dict[str, Any]] = {"examples": AuditTable}
    """What each part is."""
    CLASSES: ClassVar[tuple[type, ...]] = (AuditTable, Estimate)

    def __init__(
        self,
        run: Run,
        budget: float | None = None,
        retrain: int | None = None,
        clean: Any = None,
        *,
        writes: bool = True,
    ) -> None:
        if run.path is None:
            raise RunError("an analysis is kept with its run, but this one is in memory: save it with run.save(path)")
        self._run = run
        if writes:
            self._check_there()
            writable_directory(run.path)
        self.folder, self.writes = own_folder(run.path, FOLDER), writes
        index, identity, data = _read_index(self.folder), _identity(run), _data(run)
        there = index if index is not None and index["belongs"]["run"] == identity else None
        if there is not None and data is not None and there["belongs"]["data"] != data:
            there = None
        usual = {"budget": BUDGET, "retrain": 0, "clean": None} if there is None else there["belongs"]["options"]
        self.budget: float = float(usual["budget"] if budget is None else budget)
        self.retrain: int = usual["retrain"] if retrain is None else retrain
        seen = usual["clean"] if clean is None else fingerprint({"train": clean.train, "test": clean.test})
        options = {"budget": self.budget, "retrain": self.retrain, "clean": seen}
        same = usual | {"budget": self.budget} if data is None else usual  # without a problem, no time computes more
        self._parts: dict[str, Any] = there["parts"] if there is not None and options == same else {}
        if clean is None and "operators" not in self._parts:
            options["clean"] = None  # without the targets, the operators cannot be computed for them
        shown = there["belongs"]["data"] if there is not None and data is None else data
        self._belongs = {"run": identity, "data": shown, "options": options}

    @classmethod
    def of(cls, run: Run, *options: Any, writes: bool = True) -> Self:
        """The analysis kept with a run; read-only if the run's directory cannot be written to."""
        try:
            return cls(run, *options, writes=writes)
        except OSError:
            return cls(run, *options, writes=False)

    @property
    def finished(self) -> list[str]:
        """Names of the finished parts."""
        return list(self._parts)

    def get(self, name: str) -> Part | None:
        """A part, if it exists and is intact."""
        entry = self._parts.get(name)
        if entry is None or name not in self.TYPES:
            return None
        try:
            tensors, form = read_tensors(self.folder, TensorFile(**entry))
            found = check_fields(Part(unpack(form["value"], tensors, self.CLASSES), form["reason"]))
        except (DataError, KeyError, TypeError):  # damaged, or from another version: compute it again
            return None
        is_whole = fits(found.value, self.TYPES[name]) if found.reason is None else found.value is None
        return found if is_whole else None

    def put(self, name: str, part: Part) -> None:
        """Keep a part: write its file first, then the index that lists it."""
        if not self.writes:
            return
        self._check_there()
        form, tensors = pack(part.value)
        file = write_tensors(self.folder / f"{name}.safetensors", tensors, {"value": form, "reason": part.reason})
        self._parts[name] = asdict(file)
        index = {"kind": "analysis", "belongs": self._belongs, "parts": self._parts}
        write_json(self.folder / INDEX, {**index, "sha256": json_digest(index)})

    def _check_there(self) -> None:
        """Refuse to write an analysis where the run was removed, which would look like a damaged run."""
        if not (Path(self._run.path or "") / MANIFEST).is_file():
            raise DataError(f"{self._run.path} was removed while it was read: restore it from a copy, or train again")

    def words(self) -> str:
        """What is on disk, for the message after an interrupt; empty if nothing is."""
        there = self.writes and self.finished
        return f"finished parts are kept in {self.folder} and will be used again" if there else ""

    def forget(self) -> None:
        """Ignore all parts on disk, so that everything is computed again."""
        self._parts = {}


def _read_index(folder: Path) -> dict[str, Any] | None:
    """The index of an analysis; None if there is none that is intact."""
    try:
        index = read_json(folder / INDEX)
        check_schema(_Index, index, folder)
    except (OSError, DataError):
        return None
    return index if index["sha256"] == json_digest(index) else None


def _identity(run: Run) -> str:
    """What an analysis depends on besides the data and its options: the record, the version."""
    content = [_VERSION, __version__, run.manifest]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _data(run: Run) -> list[str | None] | None:
    """Fingerprints of the data; None if the problem is not available, e.g. because the run was sent by someone."""
    try:
        problem = run.problem
    except RunError:
        return None
    return [problem.fingerprint, None if problem.test is None else _test_fingerprint(problem.test)]


def _test_fingerprint(test: Any) -> str:
    inputs, targets = test
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    return fingerprint({"targets": targets, **{f"inputs {i}": x for i, x in enumerate(parts)}})


def kept_audit(run: Run) -> AuditTable | None:
    """The audit kept with a run whose problem is not available here; None if the problem is, or there is no audit."""
    try:
        _ = run.problem
    except RunError:
        kept = None if run.path is None else KeptParts(run, writes=False)
        part = None if kept is None else kept.get("examples")
        if kept is not None and part is not None and part.value is not None:
            note = f"this audit was computed where the run was trained, and is kept in {kept.folder}"
            return replace(part.value, notes=(*part.value.notes, note))
    return None
