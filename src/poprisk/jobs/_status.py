"""How many jobs of a directory are done, claimed and failed."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from poprisk._core.notebook import duration
from poprisk.jobs._claims import last_generation, read_mark
from poprisk.jobs._manifest import Manifest
from poprisk.jobs._results import read_logs, result_notes


@dataclass(frozen=True)
class Status:
    """State of the jobs of a directory."""

    groups: dict[str, tuple[int, int]]
    """Number of jobs done and in total, by group."""
    claimed: int
    """Number of unfinished jobs claimed by a worker, including those of dead workers until others take over."""
    failed: dict[str, str]
    """Jobs whose last attempt failed, with the reason."""
    computed: dict[str, int]
    """Number of jobs each worker finished, from the logs."""
    seconds_left: float | None
    """Estimate from the mean time of a job and the number of claims; None if unknown."""

    @property
    def done(self) -> int:
        """Number of jobs done."""
        return sum(done for done, _ in self.groups.values())

    @property
    def total(self) -> int:
        """Number of jobs."""
        return sum(total for _, total in self.groups.values())

    def lines(self) -> list[str]:
        """The state as lines of text."""
        found = [f"{name}: {done} of {total} done" for name, (done, total) in self.groups.items()]
        left = "" if self.seconds_left is None else f", about {duration(self.seconds_left)} left"
        found.append(f"in all: {self.done} of {self.total} done, {self.claimed} claimed{left}")
        found += [f"{worker} finished {count}" for worker, count in sorted(self.computed.items())]
        found += [f"failed: {key[:12]}, {reason}" for key, reason in self.failed.items()]
        return found


def job_status(folder: str | Path) -> Status:
    """Report the state of a directory of jobs; nothing is changed, and no result is read.

    Raises:
        DataError: there are no jobs.

    >>> import tempfile
    >>> from poprisk.jobs._manifest import JobGroup
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Manifest((JobGroup("squares", "package.module:Squares", {}, [[0], [1]]),)).save(folder)
    ...     job_status(folder).lines()
    ['squares: 0 of 2 done', 'in all: 0 of 2 done, 0 claimed']
    """
    manifest, where = Manifest.load(folder), Path(folder)
    done = {key for group in manifest.groups for key in group.keys if result_notes(where, key) is not None}
    open_keys = [key for group in manifest.groups for key in group.keys if key not in done]
    claimed, failed = 0, {}
    for key in open_keys:
        generation = last_generation(where, key)
        mark = read_mark(where, key, generation) if generation >= 0 else None
        claimed += mark is not None and mark.state in ("working", "unreadable")
        if mark is not None and mark.state == "failed":
            failed[key] = mark.reason
    finished = [line for line in read_logs(where) if line["event"] == "done"]
    seconds = None
    if finished and open_keys:
        mean = sum(line["seconds"] for line in finished) / len(finished)
        seconds = mean * len(open_keys) / max(1, claimed)
    return Status(
        {group.name: (sum(key in done for key in group.keys), len(group.keys)) for group in manifest.groups},
        claimed,
        failed,
        dict(Counter(line["worker"] for line in finished)),
        seconds,
    )
