"""What each worker did, line by line: from it one can count that nothing was done twice."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poprisk._core.store import append_line


class WorkerLog:
    """The append-only log of one worker, ``log/NAME.jsonl``; times are this machine's and only for people."""

    def __init__(self, folder: str | Path, worker: str) -> None:
        self._path = Path(folder) / "log" / f"{worker}.jsonl"

    def add(self, event: str, **what: Any) -> None:
        """One line: joined, start, done, failed, left."""
        append_line(self._path, json.dumps({"event": event, "time": round(time.time(), 3), **what}))


def read_logs(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Every line of every worker, with the worker's name; a line that a killed worker did not finish is left out."""
    for path in sorted((Path(folder) / "log").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                read = json.loads(line)
            except ValueError:
                continue
            yield {"worker": path.stem, **read}
