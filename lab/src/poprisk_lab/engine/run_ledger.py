"""A result file that grows run by run: an interrupted experiment continues where it stopped."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from poprisk._core.progress_faces import write_line
from poprisk._core.store import load_result, save_result
from poprisk.errors import DataError


class Ledger:
    """Runs by key, written to disk after each run.

    Args:
        path: Result file. A file with runs of another configuration raises an error; it is not overwritten.
        kind: Kind of the result.
        config: Configuration; must contain everything that could change a number.

    Raises:
        DataError: the file contains something else.
    """

    def __init__(self, path: Path, kind: str, config: Mapping[str, Any]) -> None:
        self.path, self.kind = path, kind
        self.config = json.loads(json.dumps(config))  # tuples become lists, as on disk
        self.runs: list[dict[str, Any]] = []
        if path.exists():
            saved = load_result(path, kind)
            if saved["config"] != self.config:
                raise DataError(f"{path} contains runs of another configuration; move it or choose another --output")
            self.runs = saved["result"]["runs"]

    def measure(self, key: Mapping[str, Any], experiment: Callable[[], Mapping[str, Any]]) -> None:
        """Run the experiment for this key unless its outcome is stored; store the outcome and print a line."""
        if self.select(**key):
            return
        start = time.perf_counter()
        outcome = dict(experiment())
        seconds = round(time.perf_counter() - start, 2)
        self.runs.append({**key, **outcome, "seconds": seconds})
        save_result(self.path, self.kind, self.config, {"complete": False, "runs": self.runs})
        words = ", ".join(f"{name} {value}" for name, value in {**key, **outcome}.items())
        write_line(f"{words} ({seconds:.0f} s)")

    def select(self, **key: Any) -> list[dict[str, Any]]:
        """The runs whose entries have these values, in the order of their creation."""
        return [run for run in self.runs if all(run.get(name) == value for name, value in key.items())]

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Add the summary to the file."""
        save_result(self.path, self.kind, self.config, {"complete": True, "runs": self.runs, **summary})
