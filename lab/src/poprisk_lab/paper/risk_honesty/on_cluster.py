"""Settings of the honesty study as tasks of ``poprisk.cluster``: workers need no folder in common with the client."""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from poprisk._core.cluster import run_tasks
from poprisk._core.store import append_line
from poprisk.errors import JobError

Lines = list[str]


def settings_on_cluster(
    split: str, given: Sequence[tuple[int, Lines]], methods: Sequence[str], end: float, commit: str | None
) -> Iterator[tuple[int, Lines]]:
    """The place of each setting among those given, and the lines that it adds, as they come.

    Args:
        split: Name of the split.
        given: Number of each setting, from 1, with its lines that are stored.
        methods: Names of the methods to ask; none: all there are.
        end: Time (of ``time.time``) at which to stop.
        commit: The commit of the library, where workers have no git.

    Raises:
        JobError: a setting failed; lines of the others are stored.
    """
    shared = (split, list(methods), end, commit)
    for place, found in run_tasks(answer_setting, [(shared, each) for each in given]):
        if isinstance(found, BaseException):
            raise JobError(f"setting {given[place][0]} of {split!r} failed: {found}") from found
        yield place, found


def answer_setting(shared: tuple[str, list[str], float, str | None], given: tuple[int, Lines]) -> Lines:
    """The lines that a setting adds, made by the command: only the main thread of a process can limit its time.

    Raises:
        JobError: the command failed.
    """
    (split, methods, end, commit), (number, before) = shared, given
    if time.time() >= end:
        return []
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / f"{split}.jsonl"
        for line in before:
            append_line(path, line)
        options: list[Any] = ["--split", split, "--folder", place, "--settings", number]
        options += ["--methods", *methods] if methods else []
        options += [] if math.isinf(end) else ["--minutes", (end - time.time()) / 60]
        options += [] if commit is None else ["--commit", commit]
        command = [sys.executable, "-m", "poprisk_lab.paper.risk_honesty.study", *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise JobError(done.stderr.strip().rpartition("\n")[2])
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.dumps(row) for row in map(json.loads, text.splitlines()[len(before) :])]
