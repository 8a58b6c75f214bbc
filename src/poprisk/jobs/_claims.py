r"""Who works on which job, agreed upon through files alone: no server, no clock that two machines must share.

A claim is a file ``claims/KEY.GENERATION`` that exactly one worker succeeds in making. While it works, it changes a
counter in the file every few seconds. Whoever waits for the job watches the counter *by its own clock*: a counter that
has not moved for a whole lease belongs to a dead worker, and the next generation of the claim may be made, again by
exactly one. Claims are never removed while jobs are done, so a name is never made twice: a worker that believes a job
free, because its view of the results is old, is told otherwise by the claim.
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

# Bytes of a claim: every mark overwrites all of the one before.
_LENGTH = 512
# Of a lease: how often the counter moves. A worker may miss some beats before it is taken for dead.
_BEATS_IN_A_LEASE = 10


@dataclass(frozen=True)
class Claim:
    """The right to do a job."""

    folder: Path
    key: str
    generation: int
    """0 for the first worker; each takeover adds one."""
    worker: str

    @property
    def path(self) -> Path:
        """Its file."""
        return claim_path(self.folder, self.key, self.generation)

    def mark(self, state: State, counter: int = 0, reason: str = "") -> None:
        """Say where the work stands.

        Raises:
            OSError: the claim's file cannot be written.
        """
        overwrite_in_place(self.path, _record(self.worker, state, counter, reason))


@dataclass(frozen=True)
class Mark:
    """What a claim says."""

    worker: str
    state: State
    counter: int
    reason: str


def claim_path(folder: Path, key: str, generation: int) -> Path:
    """Where a claim lies."""
    return folder / "claims" / key[:2] / f"{key}.{generation}"


def try_claim(folder: Path, key: str, generation: int, worker: str) -> Claim | None:
    """The claim, if nobody has that generation of it."""
    claim = Claim(folder, key, generation, worker)
    return claim if create_exclusively(claim.path, _record(worker, "working", 0, "")) else None


def last_generation(folder: Path, key: str, known: int = 0) -> int:
    """The highest generation that was claimed, from one that is known to be; -1 if there is none."""
    if not claim_path(folder, key, known).exists():
        return -1
    while claim_path(folder, key, known + 1).exists():
        known += 1
    return known


def read_mark(folder: Path, key: str, generation: int) -> Mark:
    """What a claim says now; unreadable where its maker has not got as far as writing it."""
    try:
        read = json.loads(claim_path(folder, key, generation).read_bytes())
        return Mark(read["worker"], read["state"], read["counter"], read["reason"])
    except (OSError, ValueError, LookupError, TypeError):
        return Mark("", "unreadable", 0, "")


@contextmanager
def beating(claim: Claim, lease: float) -> Iterator[None]:
    """Moves the claim's counter while the block runs, from a thread of its own."""
    stop = Event()

    def beat() -> None:
        counter = 0
        while not stop.wait(lease / _BEATS_IN_A_LEASE):
            counter += 1
            with suppress(OSError):  # a file system that fails now may be back at the next beat
                claim.mark("working", counter)

    thread = Thread(target=beat, daemon=True, name=f"beat of {claim.key[:8]}")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


class Watch:
    """Watches one claim that is another's, and tells when its worker must be dead.

    Args:
        folder: Of the jobs.
        key: Of the job.
        lease: Seconds without a beat after which a worker is dead.
        clock: This process's own; only differences count.
    """

    def __init__(self, folder: Path, key: str, lease: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._key, self._lease, self._clock = folder, key, lease, clock
        self.generation = max(0, last_generation(folder, key))
        self._seen: Mark | None = None
        self._since = clock()

    def look(self) -> tuple[Mark, bool]:
        """What the newest claim says, and whether its worker has not moved for a lease while we watched."""
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
