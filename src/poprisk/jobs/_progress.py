"""How far the jobs are, and the time left: a bar on a terminal, elsewhere a line at each tenth of the way."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Called with how many jobs are done, and whether that took work (or was found so).
Report = Callable[[int, bool], None]


@contextmanager
def job_progress(name: str, total: int, *, shown: bool | None) -> Iterator[Report]:
    """What to call as jobs are done; written to stderr, so that results stay alone."""
    terminal = sys.stderr.isatty()
    if shown is False or (shown is None and not terminal):
        yield lambda done, worked: None
    elif terminal:
        yield from _bar(name, total)
    else:
        yield _lines(name, total)


def _bar(name: str, total: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[left]}"))
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task, time_left = progress.add_task(name, total=total, left=""), TimeLeft(total)

        def report(done: int, worked: bool) -> None:
            progress.update(task, completed=done, left=time_left.words(done, worked))

        yield report


def _lines(name: str, total: int) -> Report:
    told, time_left = -1, TimeLeft(total)

    def report(done: int, worked: bool) -> None:
        nonlocal told
        words, tenth = time_left.words(done, worked), 10 * done // max(total, 1)
        if tenth > told:
            told = tenth
            print(f"{name}: {done} of {total} done{words}", file=sys.stderr, flush=True)

    return report


class TimeLeft:
    """The time left at the speed so far; jobs that were found done when we came do not count as speed.

    >>> clock = iter([0.0, 0.0, 2.0, 4.0]).__next__
    >>> left = TimeLeft(4, clock)
    >>> left.words(1, worked=False), left.words(2, worked=True), left.words(3, worked=True)
    ('', ', about 4 s left', ', about 2 s left')
    """

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._clock = total, clock
        self._began, self._found, self._before = clock(), 0, 0

    def words(self, done: int, worked: bool) -> str:
        """As the end of a sentence; empty where nothing is known."""
        now = self._clock()
        if not worked:
            self._found += done - self._before
        self._before = done
        own = done - self._found
        if own <= 0 or done >= self._total:
            return ""
        return f", about {duration((now - self._began) / own * (self._total - done))} left"


def duration(seconds: float) -> str:
    """In words.

    >>> duration(45), duration(600), duration(36000)
    ('45 s', '10 min', '10 h')
    """
    if seconds >= 6000:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
