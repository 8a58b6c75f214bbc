"""Faces of progress: bars on a terminal, outputs in a notebook, lines of text elsewhere."""

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from poprisk._core.html import bar
from poprisk._core.notebook import duration, in_notebook, time_left
from poprisk._core.text import one_line

BEAT = 4.0
"""Within a call whose costs are announced: the longest time without a word, in seconds."""
PERIOD = 0.25
"""Seconds between two updates in a notebook; more frequent ones would only fill the connection to the browser."""
_NARROW = 72


@dataclass(eq=False)
class Row:
    """One line of progress."""

    name: str
    total: int
    done: int
    skipped: int
    """Part of ``done`` that took no work here: it was done before, or found done."""
    began: float
    words: str = ""
    doing: str = ""
    first: tuple[float, int] | None = None
    """When the first part was done, which may have taken longer than the others, and how much that was."""
    estimate: float | None = None
    """Estimated seconds of all the work, as soon as its speed is known."""
    shown: bool = False

    def time_left(self, now: float) -> str:
        """Time left at the speed so far; empty if it is unknown, or if nothing is left."""
        worked = self.done - self.skipped
        if worked <= 0 or self.done >= self.total:
            return ""
        return time_left(self.seconds_left(now))

    def seconds_left(self, now: float) -> float:
        since, before = (self.began, self.skipped)
        if self.first is not None and self.done > self.first[1]:
            since, before = self.first
        return (now - since) / max(self.done - before, 1) * (self.total - self.done)


def open_face(clock: Callable[[], float]) -> Any:
    if in_notebook():
        return Notebook(clock)
    console = _console()
    if console.is_terminal and not console.is_dumb_terminal:
        return Terminal(console, clock)
    return Lines(clock)


def _console() -> Any:
    from rich.console import Console

    return Console(file=sys.stderr)


class Face:
    """What all faces share: when something was last said, and lines that stand for themselves."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._said_at = clock, clock()

    def say(self, line: str) -> None:
        write_line(line)

    def is_silent(self, now: float) -> bool:
        return now - self._said_at >= BEAT

    def close(self) -> None:
        """Nothing stays open."""


class Terminal(Face):
    """A bar for each row; on a narrow terminal without words."""

    def __init__(self, console: Any, clock: Callable[[], float]) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(clock)
        narrow = console.width < _NARROW
        column = BarColumn(bar_width=None if narrow else 40)
        more = TextColumn(
            "{task.percentage:>3.0f}%" if narrow else "{task.fields[count]} {task.fields[said]}", markup=False
        )
        self._progress = Progress(
            TextColumn("{task.description}", markup=False), column, more, console=console, expand=narrow
        )
        self._tasks: dict[Row, Any] = {}

    def add(self, row: Row, counted: str) -> None:
        if not self._tasks:
            self._progress.start()
        total, count = row.total or None, f"{row.done}/{row.total}" if row.total else ""
        self._tasks[row] = self._progress.add_task(
            one_line(row.name), total=total, completed=row.done, said="", count=count
        )

    def is_due(self, row: Row) -> bool:
        return bool(row.doing) or row.done % max(1, row.total // 200) == 0 or row.done >= row.total

    def show(self, row: Row) -> None:
        self._said_at = self._clock()
        words = ", ".join(part for part in (row.words, row.time_left(self._clock())) if part)
        name = one_line(f"{row.name}: {row.doing}" if row.doing else row.name)
        about = {"completed": row.done, "total": row.total, "count": f"{row.done}/{row.total}"}
        self._progress.update(self._tasks[row], description=name, said=words, refresh=bool(row.doing), **about)

    def say(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, markup=False)

    def beat(self, row: Row) -> None:
        self._progress.update(self._tasks[row], said=f"{duration(self._clock() - row.began)} so far", refresh=True)

    def remove(self, row: Row, finished: bool, nested: bool) -> None:
        task = self._tasks.pop(row)
        if nested or not row.total:
            self._progress.remove_task(task)
        elif finished:
            total = self._progress.tasks[self._progress.task_ids.index(task)].total
            count = f"{total:.0f}/{total:.0f}"
            self._progress.update(task, completed=total, description=one_line(row.name), said="", count=count)

    def close(self) -> None:
        self._progress.stop()


class Notebook(Face):
    """One output for each row, which is replaced, at most four times a second and at the end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._shown: dict[Row, tuple[Any, float, int]] = {}
        """For each row its output, when that was last replaced, and how much it said was done."""

    def add(self, row: Row, counted: str) -> None:
        from IPython.display import display  # type: ignore[import-not-found]  # the notebook has it

        self._shown[row] = display(self._picture(row), display_id=True), self._clock(), row.done

    def is_due(self, row: Row) -> bool:
        return bool(row.doing) or row.done >= max(row.total, 1) or self._clock() - self._shown[row][1] >= PERIOD

    def show(self, row: Row) -> None:
        self._replace(row, row.doing, row.words, row.time_left(self._clock()))

    def beat(self, row: Row) -> None:
        self._replace(row, f"{duration(self._clock() - row.began)} so far", row.time_left(self._clock()))

    def remove(self, row: Row, finished: bool, nested: bool) -> None:
        if not finished:
            self._replace(row, "stopped")
        elif self._shown[row][2] < max(row.total, 1):
            row.done = max(row.total, 1)
            self._replace(row)
        del self._shown[row]

    def _replace(self, row: Row, *words: str) -> None:
        self._said_at = self._clock()
        self._shown[row] = self._shown[row][0], self._said_at, row.done
        self._shown[row][0].update(self._picture(row, *words))

    def _picture(self, row: Row, *words: str) -> Any:
        from IPython.display import HTML  # type: ignore[import-not-found]

        total = max(row.total, 1)
        said = ", ".join(part for part in (f"{row.name}: {row.done} of {total}", *words) if part)
        return HTML(bar(row.done / total, said))


class Lines(Face):
    """A line when something begins, otherwise at each tenth of the way."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._told: dict[Row, int] = {}
        self._counted: dict[Row, str] = {}

    def add(self, row: Row, counted: str) -> None:
        self._told[row], self._counted[row] = 10 * row.done // max(row.total, 1), counted

    def is_due(self, row: Row) -> bool:
        return bool(row.doing) or 10 * row.done // max(row.total, 1) > self._told[row]

    def show(self, row: Row) -> None:
        self._told[row] = 10 * row.done // max(row.total, 1)
        counted = self._counted[row].format(done=row.done, total=row.total)
        line = ", ".join(part for part in (counted, row.words, row.time_left(self._clock())) if part)
        self.say(f"{row.name}: {line}; next: {row.doing}" if row.doing else f"{row.name}: {line}")

    def say(self, line: str) -> None:
        self._said_at = self._clock()
        super().say(line)

    def beat(self, row: Row) -> None:
        now = self._clock()
        so_far = row.doing or self._counted[row].format(done=row.done, total=row.total) if row.total else ""
        self.say(", ".join(p for p in (f"{row.name}: {duration(now - row.began)} so far", so_far) if p))

    def remove(self, row: Row, finished: bool, nested: bool) -> None:
        del self._told[row], self._counted[row]


def write_line(text: str) -> None:
    """Write a line of progress to stderr; messages that nobody asked for go to the logger ``poprisk`` instead."""
    with suppress(OSError, ValueError, AttributeError):  # closed, full, or none at all: the work goes on
        sys.stderr.write(f"{one_line(text)}\n")
        sys.stderr.flush()
