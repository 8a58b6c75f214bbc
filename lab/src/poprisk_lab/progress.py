"""Progress over a few long jobs: a bar with the time left on a terminal, elsewhere a line after each job."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Report = Callable[[int, int, str], None]
# Speed is taken over so many seconds; rich's usual half a minute is shorter than one job.
_SPEED_PERIOD = 3600.0


@contextmanager
def job_progress(name: str) -> Iterator[Report]:
    """What to call with (jobs done, jobs in all, the next job); written to stderr, so that results stay alone."""
    console = Console(file=sys.stderr)
    if not console.is_terminal or console.is_dumb_terminal:
        yield _plain(name)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, speed_estimate_period=_SPEED_PERIOD) as progress:
        task = progress.add_task(name, total=None)

        def report(done: int, total: int, upcoming: str) -> None:
            words = f"{name}: {upcoming}" if upcoming else name
            progress.update(task, completed=done, total=total, description=words)

        yield report


def _plain(name: str) -> Report:
    began = time.perf_counter()

    def report(done: int, total: int, upcoming: str) -> None:
        line = f"{name}: {done} of {total} runs"
        if done:
            line += f", about {_words((time.perf_counter() - began) / done * (total - done))} left"
        print(f"{line}; next: {upcoming}" if upcoming else line, file=sys.stderr, flush=True)

    return report


def _words(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
