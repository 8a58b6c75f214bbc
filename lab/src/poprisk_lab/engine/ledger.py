"""Finished rows of a long comparison on disk: after an interruption, only the missing rows are computed."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result, save_result
from poprisk.errors import DataError

KIND = "comparison rows"


class RowLedger:
    """Outcomes of rows, identified by a digest of everything they depend on; each finished stack adds a file.

    Args:
        folder: Folder of the files; ``None`` keeps nothing. A file that cannot be read counts as missing, and its rows
            are computed again.

    >>> ledger = RowLedger(None)
    >>> ledger.add({}, [({"task": "x", "lr": 0.1}, {"value": 1})])
    >>> ledger.find({"lr": 0.1, "task": "x"}), ledger.find({"task": "y"})
    ({'value': 1}, None)
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._found: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("*.json")) if folder is not None else ():
            try:
                self._found |= load_result(path, KIND)["result"]["rows"]
            except (DataError, KeyError, TypeError):
                continue

    def find(self, asked: Mapping[str, Any]) -> dict[str, Any] | None:
        """The outcome of a row; ``None`` if it is not stored."""
        return self._found.get(_digest(asked))

    def add(self, stack: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], dict[str, Any]]]) -> None:
        """Store the rows of a stack: what each depends on, and its outcome.

        Args:
            stack: What the rows have in common, as a note in the file.
            rows: The rows, in any order.
        """
        outcomes = {_digest(asked): outcome for asked, outcome in rows}
        self._found |= outcomes
        if self.folder is not None and outcomes:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_result(self.folder / f"{_digest(sorted(outcomes))}.json", KIND, stack, {"rows": outcomes})


def _digest(asked: Any) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:24]
