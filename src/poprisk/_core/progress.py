"""How far some work is, and how long it will still take: on a terminal, in a notebook, or as lines in a log."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from poprisk._core.notebook import time_left

if TYPE_CHECKING:
    from torch import Tensor

Report = Callable[[int, "Tensor"], None]
_NARROW = 72


@dataclass
class _Row:
    """One line of progress."""

    name: str
    total: int
    done: int
    skipped: int
    """Part of ``done`` that took no work here: it was done before, or found done."""
    began: float
    words: str = ""
    doing: str = ""

    def time_left(self, now: float) -> str:
        """Time left at the speed so far; empty if it is unknown, or if nothing is left."""
        worked = self.done - self.skipped
        if worked <= 0 or self.done >= self.total:
            return ""
        return time_left((now - self.began) / worked * (self.total - self.done))


class Progress:
    """Shows how far some work is: a bar on a terminal, one output in a notebook, otherwise lines of text on stderr.

    Args:
        name: What is under way; several names give several bars.
        total: Units of work in all.
        start: Units that were done before.
        counted: How lines of text say how much is done.
        shown: Whether to show anything; None shows bars, but no lines of text.
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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        names = [name] if isinstance(name, str) else list(name)
        self._rows = {each: _Row(each, total, start, start, clock()) for each in names}
        self._first, self._counted, self._shown, self._clock = names[0], counted, shown, clock
        self._face: Any = None

    def __enter__(self) -> "Progress":
        if self._shown is not False:
            face = _face(list(self._rows.values()), self._counted, self._clock)
            self._face = None if self._shown is None and isinstance(face, _Lines) else face
        return self

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
        """
        if self._face is None:
            return
        row = self._rows[self._first if name is None else name]
        if not worked:
            row.skipped += done - row.done
        row.done, row.doing, row.total = done, doing, row.total if total is None else total
        if self._face.is_due(row):
            row.words = words if isinstance(words, str) else words()
            self._face.show(row)

    def __exit__(self, kind: object, *_: object) -> None:
        if self._face is not None:
            self._face.close(finished=kind is None)
            self._face = None


def _face(rows: list[_Row], counted: str, clock: Callable[[], float]) -> Any:
    from poprisk._core.notebook import in_notebook

    if in_notebook():
        return _Notebook(rows, clock)
    console = _console()
    if console.is_terminal and not console.is_dumb_terminal:
        return _Terminal(rows, console, clock)
    return _Lines(rows, counted, clock)


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stderr)


class _Terminal:
    """A bar for each row; on a narrow terminal without words."""

    def __init__(self, rows: list[_Row], console: Any, clock: Callable[[], float]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        narrow = console.width < _NARROW
        bar = BarColumn(bar_width=None if narrow else 40)
        more = (
            [TextColumn("{task.percentage:>3.0f}%")]
            if narrow
            else [MofNCompleteColumn(), TextColumn("{task.fields[said]}")]
        )
        self._clock = clock
        self._progress = Progress(TextColumn("{task.description}"), bar, *more, console=console, expand=narrow)
        self._tasks = {r.name: self._progress.add_task(r.name, total=r.total, completed=r.done, said="") for r in rows}
        self._progress.start()

    def is_due(self, row: _Row) -> bool:
        return bool(row.doing) or row.done % max(1, row.total // 200) == 0 or row.done >= row.total

    def show(self, row: _Row) -> None:
        said = ", ".join(part for part in (row.words, row.time_left(self._clock())) if part)
        name = f"{row.name}: {row.doing}" if row.doing else row.name
        task = self._tasks[row.name]
        self._progress.update(
            task, completed=row.done, total=row.total, description=name, said=said, refresh=bool(row.doing)
        )

    def close(self, finished: bool) -> None:
        for name, task in self._tasks.items() if finished else ():
            self._progress.update(task, completed=self._progress.tasks[task].total, description=name, said="")
        self._progress.stop()


class _Notebook:
    """One output for each row, which is replaced."""

    def __init__(self, rows: list[_Row], clock: Callable[[], float]) -> None:
        from poprisk._core.notebook import NotebookBar

        self._bars = {row.name: NotebookBar(row.name, row.done, row.total, clock=clock) for row in rows}

    def is_due(self, row: _Row) -> bool:
        return bool(row.doing) or self._bars[row.name].is_due(row.done)

    def show(self, row: _Row) -> None:
        words = ", ".join(part for part in (row.doing, row.words) if part)
        self._bars[row.name].update(row.done, words, total=row.total, skipped=row.skipped)

    def close(self, finished: bool) -> None:
        for bar in self._bars.values():
            bar.finish() if finished else bar.stop()


class _Lines:
    """A line when something begins, otherwise at each tenth of the way."""

    def __init__(self, rows: list[_Row], counted: str, clock: Callable[[], float]) -> None:
        self._counted, self._clock = counted, clock
        self._told = {row.name: 10 * row.done // max(row.total, 1) for row in rows}

    def is_due(self, row: _Row) -> bool:
        return bool(row.doing) or 10 * row.done // max(row.total, 1) > self._told[row.name]

    def show(self, row: _Row) -> None:
        self._told[row.name] = 10 * row.done // max(row.total, 1)
        counted = self._counted.format(done=row.done, total=row.total)
        line = ", ".join(part for part in (counted, row.words, row.time_left(self._clock())) if part)
        write_line(f"{row.name}: {line}; next: {row.doing}" if row.doing else f"{row.name}: {line}")

    def close(self, finished: bool) -> None:
        pass


@contextmanager
def training_progress(name: str, start: int, steps: int, shown: bool | None = True) -> Iterator[Report]:
    """A function to call with (number of steps done, loss) after each step; it reads the loss only to show it."""
    with Progress(name, steps, start=start, counted="step {done} of {total}", shown=shown) as progress:
        yield lambda step, loss: progress.update(step, lambda: f"loss {float(loss):.3g}")


def write_line(text: str) -> None:
    """Write a line of progress to stderr; messages that nobody asked for go to the logger ``poprisk`` instead."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
