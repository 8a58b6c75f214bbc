"""Decisions of a person who reviewed labels in a report: read strictly, checked against the targets, applied to them.

The page writes them as JSON, ``{"kind": "poprisk label decisions", "version": 1, "run": …, "data": …, "examples": n,
"targets": "classes", "decisions": [{"example": 3, "given": 0, "suggested": 7, "decided": 7}, …],
"crc32": …}``, or as CSV with the same names in its columns and no checksum, for editing. They are values and nothing
else: nothing in the file is imported or executed.
"""

import csv
import hashlib
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from poprisk._core.store import parsed_json, write_bytes, write_text
from poprisk.errors import DataError
from poprisk.runs import Problem, Run

KIND, VERSION = "poprisk label decisions", 1
_ABOUT = ("version", "run", "data", "examples", "targets")
_ROW = ("example", "given", "suggested", "decided")
_EXPORT = "export it again from the report"


def run_id(run: Run) -> str:
    """What identifies a run in a file of decisions."""
    about = run.manifest
    parts = [about["created"], about["seed"], about["examples"], about["optimizer"]["name"], data_fingerprint(run)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def data_fingerprint(run: Run) -> str:
    """Fingerprint of the data that a run was trained on; empty if its problem was not recorded."""
    problem = run.manifest["problem"]
    return "" if problem is None else problem["fingerprint"]


@dataclass(frozen=True)
class Decision:
    """What was decided about one label."""

    example: int
    given: float
    suggested: float | None
    decided: float

    @property
    def changes(self) -> bool:
        """Whether the given label is replaced."""
        return self.decided != self.given


@dataclass(frozen=True)
class Decisions:
    """All decisions of a review; examples that are not listed were not decided."""

    run: str
    data: str
    examples: int
    targets: str
    """``"classes"`` or ``"regression"``: whether labels or values were decided."""
    rows: tuple[Decision, ...]

    @classmethod
    def load(cls, path: str | Path) -> "Decisions":
        """Read a file that a report exported, ``.json`` or ``.csv``.

        Raises:
            DataError: the file is not one, or a part of it is not as it should be; the message names the part.
            OSError: the file cannot be read.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
            return cls.from_value(_csv(text) if path.suffix == ".csv" else _json(text))
        except (ValueError, csv.Error) as error:
            raise DataError(f"{path} is not a file of decisions: {error}; {_EXPORT}") from None

    @classmethod
    def from_value(cls, value: Any) -> "Decisions":
        """From JSON values.

        Raises:
            DataError: something is missing, unknown, of the wrong type, out of range, or listed twice.
        """
        _require(isinstance(value, Mapping) and value.get("kind") == KIND, f"expected kind {KIND!r}")
        _require(value.get("version") == VERSION, f"expected version {VERSION}, got {value.get('version')!r}")
        _same_names(value, ("kind", *_ABOUT, "decisions"), "the file")
        n, kind = value["examples"], value["targets"]
        _require(_is_whole(n) and n > 0, f"examples must be a positive whole number, got {n!r}")
        _require(kind in ("classes", "regression"), f"targets must be classes or regression, got {kind!r}")
        _require(all(isinstance(value[k], str) for k in ("run", "data")), "run and data must be texts")
        _require(isinstance(value["decisions"], list), "decisions must be a list")
        rows = tuple(_decision(row, n, kind) for row in value["decisions"])
        _require(len({row.example for row in rows}) == len(rows), "an example is listed twice")
        return cls(value["run"], value["data"], n, kind, rows)

    @property
    def changed(self) -> int:
        """Number of labels that are replaced."""
        return sum(row.changes for row in self.rows)

    def check_is_of(self, run: Run) -> None:
        """Check that the decisions were made for this run, or for another one on the same data.

        Raises:
            DataError: they were made for other data.
        """
        same_data = bool(self.data) and self.data == data_fingerprint(run)
        if self.run != run_id(run) and not same_data:
            raise DataError(
                f"the decisions are of run {self.run}, but this is run {run_id(run)}, trained on other data: use the "
                "decisions that its own report exported"
            )

    def apply(self, targets: Tensor) -> Tensor:
        """A copy of the targets with every decided label in its place.

        Args:
            targets: The targets that were trained on.

        Raises:
            DataError: there are more or fewer targets, the label of an example is not the one that the person saw, or
                a decided label is not one of the classes.
        """
        if len(targets) != self.examples:
            raise DataError(f"the decisions are for {self.examples} examples, got {len(targets)} targets")
        one_hot = self.targets == "classes" and targets.dim() == 2 and targets.shape[1] > 1
        labels = targets.argmax(1) if one_hot else targets.reshape(self.examples, -1)[:, 0]
        last = targets.shape[1] - 1 if one_hot else labels.max().item() if self.targets == "classes" else math.inf
        cleaned = targets.clone()
        for row in self.rows:
            seen = labels[row.example].item()
            if seen != row.given:
                raise DataError(f"example {row.example} has label {seen:g}, but the decision is about {row.given:g}")
            if row.decided > last and row.decided != row.suggested:
                raise DataError(f"example {row.example}: {row.decided:g} is not a class, the last one is {last:g}")
            if one_hot:
                cleaned[row.example] = 0
                cleaned[row.example, int(row.decided)] = 1
            elif row.changes:
                cleaned[row.example] = torch.as_tensor(row.decided, dtype=targets.dtype)
        return cleaned


def corrected_targets(path: str | Path, problem: Problem) -> Tensor:
    """A problem's targets with the corrections in a file: decisions that a report exported, or whole corrected targets.

    Args:
        path: ``.json`` or ``.csv`` with decisions, or ``.npy`` or ``.csv`` as ``poprisk audit --apply`` writes them.
        problem: The problem with the targets that were reviewed.

    Raises:
        DataError: the file is none of these, or it is about other data.
        OSError: the file cannot be read.
    """
    path, targets = Path(path), problem.targets.cpu()
    if path.suffix == ".npy":
        try:
            return torch.from_numpy(np.load(path, allow_pickle=False))
        except (ValueError, EOFError, TypeError) as error:
            raise DataError(f"{path} is not a file of targets: {error}") from None
    if path.suffix not in (".json", ".csv"):
        raise DataError(f"corrected labels are read from a .json, .npy or .csv file, got {path.name!r}")
    if path.suffix == ".csv" and (written := _written_targets(path, targets)) is not None:
        return written
    decisions = Decisions.load(path)
    if decisions.data and decisions.data != problem.fingerprint:
        raise DataError(
            f"{path} has decisions about other examples or labels than those of problem {problem.name!r}: use the task "
            "as it was when the reviewed run was trained"
        )
    return decisions.apply(targets)


def _written_targets(path: Path, targets: Tensor) -> Tensor | None:
    """Targets from a table of :func:`write_targets`; None if it is another table."""
    rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
    if not rows or rows[0] != ["example", "given", "corrected"]:
        return None
    try:
        return torch.tensor([json.loads(row[2]) for row in rows[1:]]).to(targets.dtype)
    except (ValueError, IndexError, TypeError) as error:
        raise DataError(f"{path} is not a table of targets: {error}") from None


def check_targets_format(path: Path) -> None:
    """Refuse a file that targets cannot be written to.

    Raises:
        DataError: the name ends in neither .npy nor .csv.
    """
    if path.suffix not in (".npy", ".csv"):
        raise DataError(f"targets are written to a .npy or .csv file, got {path.name!r}")


def write_targets(path: Path, given: Tensor, corrected: Tensor) -> Path:
    """Write corrected targets: an array, or a table with the given ones beside them.

    Raises:
        DataError: the name has another ending.
    """
    check_targets_format(path)
    if path.suffix == ".npy":
        buffer = io.BytesIO()
        np.save(buffer, corrected.numpy(), allow_pickle=False)
        return write_bytes(path, buffer.getvalue())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("example", "given", "corrected"))
    writer.writerows((i, *pair) for i, pair in enumerate(zip(given.tolist(), corrected.tolist(), strict=True)))
    return write_text(path, text.getvalue())


def _decision(row: Any, n: int, kind: str) -> Decision:
    _require(isinstance(row, Mapping), f"a decision must be an object, got {row!r}")
    _same_names(row, _ROW, "a decision")
    example = row["example"]
    _require(_is_whole(example) and 0 <= example < n, f"example must lie in 0 … {n - 1}, got {example!r}")
    for name in ("given", "suggested", "decided"):
        label = row[name]
        whole = _is_whole(label) and label >= 0
        real = isinstance(label, int | float) and not isinstance(label, bool) and math.isfinite(label)
        known = (name == "suggested" and label is None) or (whole if kind == "classes" else real)
        what = "a class" if kind == "classes" else "a finite number"
        _require(known, f"example {example}: {name} must be {what}, got {label!r}")
    return Decision(**row)


def _json(text: str) -> Any:
    """The content of a JSON file; its checksum, which a file written by hand may lack, is of the text before it."""
    value = parsed_json(text, "the file")
    if isinstance(value, dict) and value.pop("crc32", None) is not None:
        body, _, rest = text.rpartition(',\n "crc32": ')
        same = rest == f'"{crc32(body.encode()):08x}"\n}}\n'
        _require(same, "it was changed after the export; remove its entry crc32 if you changed it")
    return value


def _csv(text: str) -> dict[str, Any]:
    """The content of a CSV file in the form of the JSON one."""
    rows = list(csv.DictReader(text.splitlines(), strict=True))
    _require(bool(rows), "it has no rows")
    for row in rows:
        _same_names(row, (*_ABOUT, *_ROW), "a row")
    about = {name: rows[0][name] for name in _ABOUT}
    _require(all(row[name] == about[name] for row in rows for name in _ABOUT), "its rows are of different runs")
    read = lambda word: parsed_json(word, "a cell") if word else None  # noqa: E731
    decisions = [{name: read(row[name]) for name in _ROW} for row in rows]
    numbers = {"version": read(about["version"]), "examples": read(about["examples"])}
    return {"kind": KIND, **about, **numbers, "decisions": decisions}


def _same_names(value: Mapping[str, Any], names: tuple[str, ...], what: str) -> None:
    _require(set(value) == set(names), f"{what} must have {', '.join(names)}, got {', '.join(map(str, value))}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DataError(otherwise)
