r"""Which worker does which job, coordinated by files alone, without a server or synchronized clocks.

A claim is a file ``claims/KEY.GENERATION`` that exactly one worker succeeds in creating. While it works, it increments
a counter in the file every few seconds. Workers that wait for the job watch the counter *by their own clocks*: a
counter that has not moved for a whole lease belongs to a dead worker, and the next generation of the claim may be
created, again by exactly one worker. Claims are never removed while jobs run, so no file is created twice: a
worker whose view of the results is outdated learns from the claim that the job is taken.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Literal

from poprisk._core.store import create_exclusively, overwrite_in_place

State = Literal["working", "done", "failed", "released", "unreadable"]

# Bytes of a claim; every mark overwrites the previous one completely.
_LENGTH = 512
# Number of counter increments per lease. A worker may miss several before it counts as dead.
_BEATS_IN_A_LEASE = 10


@dataclass(frozen=True)
class JobClaim:
    """The right to do a job."""

    folder: Path
    key: str
    generation: int
    """0 for the first worker; each takeover adds one."""
    worker: str

    @property
    def path(self) -> Path:
        """File of the claim."""
        return claim_path(self.folder, self.key, self.generation)

    def mark(self, state: State, counter: int = 0, reason: str = "") -> None:
        """Record the state of the work.

        Raises:
            OSError: the claim's file cannot be written.
        """
        overwrite_in_place(self.path, _record(self.worker, state, counter, reason))


@dataclass(frozen=True)
class Mark:
    """Content of a claim."""

    worker: str
    state: State
    counter: int
    reason: str


def claim_path(folder: Path, key: str, generation: int) -> Path:
    """File of a claim."""
    return folder / "claims" / key[:2] / f"{key}.{generation}"


def try_claim(folder: Path, key: str, generation: int, worker: str) -> JobClaim | None:
    """The claim, or None if another worker has that generation of it."""
    claim = JobClaim(folder, key, generation, worker)
    return claim if create_exclusively(claim.path, _record(worker, "working", 0, "")) else None


def last_generation(folder: Path, key: str, known: int = 0) -> int:
    """The highest generation claimed so far, searched from a known one; -1 if there is none."""
    if not claim_path(folder, key, known).exists():
        return -1
    while claim_path(folder, key, known + 1).exists():
        known += 1
    return known


def read_mark(folder: Path, key: str, generation: int) -> Mark:
    """The current content of a claim; unreadable if its worker has not written it yet."""
    try:
        read = json.loads(claim_path(folder, key, generation).read_bytes())
        return Mark(read["worker"], read["state"], read["counter"], read["reason"])
    except (OSError, ValueError, LookupError, TypeError):
        return Mark("", "unreadable", 0, "")


@contextmanager
def beating(claim: JobClaim, lease: float) -> Iterator[None]:
    """Increments the counter of a claim in a thread while the block runs."""
    stop = Event()

    def beat() -> None:
        counter = 0
        while not stop.wait(lease / _BEATS_IN_A_LEASE):
            counter += 1
            with suppress(OSError):  # a file system that fails now may work again at the next beat
                claim.mark("working", counter)

    thread = Thread(target=beat, daemon=True, name=f"beat of {claim.key[:8]}")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Watch:
    """Watches the claim of another worker, and tells when that worker must be dead.

    Args:
        folder: Directory of the jobs.
        key: Key of the job.
        lease: Seconds without a beat after which a worker is dead.
        clock: Clock of this process; only differences matter.
    """

    def __init__(self, folder: Path, key: str, lease: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._key, self._lease, self._clock = folder, key, lease, clock
        self.generation = max(0, last_generation(folder, key))
        self._seen: Mark | None = None
        self._since = clock()

    def look(self) -> tuple[Mark, bool]:
        """The newest claim, and whether its counter has not moved for a lease while we watched."""
        newest = max(self.generation, last_generation(self._folder, self._key, self.generation))
        mark = read_mark(self._folder, self._key, newest)
        if mark != self._seen or newest != self.generation:
            self.generation, self._seen, self._since = newest, mark, self._clock()
        return mark, self._clock() - self._since >= self._lease


def _record(worker: str, state: State, counter: int, reason: str) -> bytes:
    for kept in (reason, reason[:64], ""):
        text = json.dumps({"worker": worker, "state": state, "counter": counter, "reason": kept}).encode()
        if len(text) <= _LENGTH:
            return text.ljust(_LENGTH)
    return text[:_LENGTH]
