"""Finished parts of a long comparison on disk: interrupt it, start it again, and only what is missing is computed."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from poprisk.errors import DataError
from poprisk.store import load_result, save_result

KIND = "comparison part"


class PartLedger:
    """Outcomes of parts, each in a file named by a digest of what was asked for.

    Args:
        folder: Where they are kept; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def part(
        self,
        asked: Mapping[str, Any],
        compute: Callable[[], dict[str, Any]],
        skipped: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """The outcome of this part: read if it is there, else computed and written whole.

        Args:
            asked: All that the outcome depends on, as plain values; part of the file.
            compute: Makes the outcome.
            skipped: Called where nothing had to be computed, for a progress bar.

        >>> PartLedger(None).part({"task": "x"}, lambda: {"value": 1})
        {'value': 1}
        """
        if self.folder is None:
            return compute()
        text = json.dumps(asked, sort_keys=True)
        path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:20]}.json"
        found = self._read(path)
        if found is None or found["config"] != json.loads(text):
            outcome = compute()
            self.folder.mkdir(parents=True, exist_ok=True)
            save_result(path, KIND, asked, outcome)
            found = load_result(path, KIND)
        elif skipped is not None:
            skipped()
        return found["result"]

    def _read(self, path: Path) -> dict[str, Any] | None:
        """What is stored there; a file of an older format counts as missing, it will be made again."""
        try:
            return load_result(path, KIND) if path.exists() else None
        except DataError:
            return None
