"""How far some work is, and how long it will still take: on a terminal, in a notebook, or as lines in a log."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Event, RLock, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from poprisk._core.costs import Limits, current_limits, held, is_out_of_memory, memory_used, said
from poprisk._core.progress_faces import Lines, Row, open_face
from poprisk.errors import LimitError

if TYPE_CHECKING:
    from torch import Tensor

Report = Callable[[int, "Tensor"], None]
T = TypeVar("T")
_LONG = 10.0
"""Work that takes longer than this many seconds is announced."""
_PATIENCE = 1.0
_MEASURED = 0.5
"""Seconds of work from which the speed is known."""


_LOCK = RLock()
_OPEN: ContextVar["tuple[Progress, ...]"] = ContextVar("poprisk_progress", default=())


class Progress:
    """Shows how far some work is: a bar on a terminal, one output in a notebook, otherwise lines of text on stderr.

    As soon as the speed is known, work of more than 10 seconds is announced with its time and memory, and work that
    would go beyond the limits of the call (:func:`poprisk._core.costs.limits`) is refused.

    Args:
        name: What is under way; several names give several bars.
        total: Units of work in all.
        start: Units that were done before.
        counted: How lines of text say how much is done.
        shown: Whether to show anything; None shows bars, but no lines of text.
        patient: Whether to show nothing of what is done in a second, and no lines of what takes less than ten.
        least: Units below which the work is of no use: if a time limit allows fewer, it is refused. Default: all.
        clock: Seconds, to measure the speed.

    >>> with Progress("jobs", 4, shown=False) as progress:
    ...     progress.update(2, "loss 0.5")
    """

    def __init__(
        self,
        name: str | Iterable[str],
        total: int = 1,
        *,
        start: int = 0,
        counted: str = "{done} of {total}",
        shown: bool | None = True,
        patient: bool = False,
        least: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        names = [name] if isinstance(name, str) else list(name)
        self._limits = current_limits()
        if clock is None:
            clock = time.perf_counter if self._limits is None else self._limits.clock
        self._rows = {each: Row(each, total, start, start, clock()) for each in names}
        self._first, self._counted, self._clock = names[0], counted, clock
        self._shown = shown
        if self._limits is not None and shown is not False:
            self._shown = self._limits.shown if shown is None or self._limits.shown is False else shown
        self._patient, self._least = patient, least
        self._face: Any = None
        self._outer: tuple[Progress, ...] = ()
        self._innermost = self
        """The innermost progress within this one: what is under way."""

    def __enter__(self) -> "Progress":
        self._outer = _OPEN.get()
        self._patient = self._patient or any(row.total for each in self._outer for row in each._rows.values())
        if self._shown is not False:
            around = next((each._face for each in reversed(self._outer) if each._face is not None), None)
            face: Any = open_face(self._clock) if around is None else around
            if self._shown is not None or not isinstance(face, Lines):
                self._face = face
                _OPEN.set((*self._outer, self))
                self._mark(self)
        for row in self._rows.values() if self._face is not None and not self._patient else ():
            self._add(row)
        return self

    def _add(self, row: Row) -> None:
        with _LOCK:
            if not row.shown:
                self._face.add(row, self._counted)
                row.shown = True

    def update(
        self,
        done: int,
        words: str | Callable[[], str] = "",
        *,
        doing: str = "",
        total: int | None = None,
        worked: bool = True,
        name: str | None = None,
    ) -> None:
        """Tell how much is done.

        Args:
            done: Units done so far.
            words: What to say about it; a function is called only if its answer will be shown.
            doing: What begins now.
            total: Units in all, if that has changed.
            worked: False if what is new since the last update took no work, so that it does not count as speed.
            name: Which of the bars, if there are several.

        Raises:
            LimitError: what is left would go beyond the limits of the call.
        """
        if self._face is None and self._limits is None:
            return
        row = self._rows[self._first if name is None else name]
        if not worked:
            row.skipped += done - row.done
        row.done, row.doing, row.total = done, doing, row.total if total is None else total
        self._measure(row)
        if self._face is None or not self._is_ready(row):
            return
        if self._face.is_due(row):
            row.words = words if isinstance(words, str) else words()
            self._face.show(row)

    def advance(self, units: int = 1) -> None:
        """Tell that so many more units are done; see :meth:`update`."""
        self.update(self._rows[self._first].done + units)

    def fits(self, units: int) -> bool:
        """Whether the limits of the call leave time for so many more units at the speed so far."""
        row = self._rows[self._first]
        if self._limits is None or row.done <= row.skipped:
            return True
        left = max(row.total - row.done, 1)
        return row.seconds_left(self._clock()) * units / left <= self._limits.left()

    def _measure(self, row: Row) -> None:
        """Estimate the time of all the work once its speed is known; announce it, and hold it to the limits."""
        now, worked = self._clock(), row.done - row.skipped
        if row.estimate is not None or worked <= 0 or row.done >= row.total:
            return
        if row.first is None:
            row.first = now, row.done
            if now - row.began < _LONG:  # otherwise it is announced now
                return
            row.first = row.began, row.skipped
        if now - row.first[0] < _MEASURED:
            return
        left = row.seconds_left(now)
        if self._limits is not None:
            least = 1.0 if self._least is None else max(self._least - worked, 0) / (row.total - row.done)
            self._limits.check(row.name, left * least)
            left = min(left, self._limits.left())
        row.estimate = now - row.began + left
        if row.estimate >= _LONG and self._face is not None and self._limits is not None:
            words = f"about {said(left)} and {memory_used() / 1e9:.1f} GB; Ctrl-C keeps {self._limits.keeps}"
            self._face.say(f"{row.name}: {words}")

    def _is_ready(self, row: Row) -> bool:
        """Whether to show a row, which is added now if it is time for it."""
        if not row.shown:
            long = (row.estimate or 0.0) >= _LONG
            if not long and (isinstance(self._face, Lines) or self._clock() - row.began < _PATIENCE):
                return False
            self._add(row)
        return True

    def _mark(self, innermost: "Progress") -> None:
        for each in self._outer:
            each._innermost = innermost

    def beat(self) -> None:
        """Say what is under way, if nothing was said for a while."""
        row = self._rows[self._first]
        with _LOCK:
            if self._face is not None and self._face.is_silent(self._clock()):
                self._add(row)
                self._face.beat(row)

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Let a thread say what is under way whenever nothing was said for a while."""
        if self._face is None:
            yield
            return
        ended = Event()

        def go_on() -> None:
            while not ended.wait(_PATIENCE):
                self._innermost.beat()

        thread = Thread(target=go_on, name="poprisk-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def __exit__(self, kind: object, *_: object) -> None:
        if self._face is None:
            return
        _OPEN.set(self._outer)
        with _LOCK:
            self._mark(self._outer[-1] if self._outer else self)
            for row in self._rows.values():
                if row.shown:
                    self._face.remove(row, finished=kind is None, nested=bool(self._outer))
            if not any(each._face is self._face for each in self._outer):
                self._face.close()
            self._face = None


def tracked(items: Sequence[T], name: str) -> Iterator[T]:
    """The items one after another, as work of a call whose costs are announced.

    >>> list(tracked([2, 3], "example"))
    [2, 3]
    """
    with Progress(name, len(items), shown=None, patient=True) as progress:
        for item in items:
            yield item
            progress.advance()


@contextmanager
def limits(
    name: str,
    *,
    budget: float | None = None,
    memory: int | str | None = None,
    progress: bool | None = True,
    keeps: str = "nothing",
    lower: str = "fewer examples",
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Limits]:
    """Hold what is done within the block to limits; within another such block, to the limits of that one.

    Args:
        name: The call.
        budget: Seconds that it may take.
        memory: Bytes that the process may use, or words such as "2 GB".
        progress: Whether to show progress.
        keeps: What an interrupt keeps, for the announcement of long work.
        lower: What to lower if memory runs out.
        clock: Seconds.

    Raises:
        HyperparameterError: a limit is not a positive number.
        LimitError: within the block, work would take longer or more memory than is allowed.

    >>> with limits("example", budget=3.0, memory="2 GB", progress=False) as found:
    ...     found.memory, 2 < found.left() < 3
    (2000000000, True)
    """
    outer = current_limits()
    if outer is not None:
        yield outer
        return
    about = {"shown": progress, "keeps": keeps, "lower": lower, "clock": clock}
    try:
        with (
            held(name, budget, memory, **about) as found,
            Progress(name, 0, shown=progress, patient=True) as shown,
            shown.beating(),
        ):
            yield found
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        first = (str(error) or type(error).__name__).splitlines()[0][:100]
        raise LimitError(f"{name} ran out of memory ({first}): set a limit with memory=…, or use {lower}") from error


@contextmanager
def training_progress(
    name: str, start: int, steps: int, shown: bool | None = True, *, patient: bool = False
) -> Iterator[Report]:
    """A function to call with (number of steps done, loss) after each step; it reads the loss only to show it."""
    with Progress(name, steps, start=start, counted="step {done} of {total}", shown=shown, patient=patient) as progress:
        yield lambda step, loss: progress.update(step, lambda: f"loss {float(loss):.3g}")
