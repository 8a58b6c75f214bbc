"""Progress on a terminal as bars side by side, elsewhere as a few plain lines; both with the time left."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

from poprisk._core.progress import time_left

Report = Callable[[str, int, float], None]
_NARROW = 72


def stdout() -> Console:
    """Where results go."""
    return Console(file=sys.stdout)


@contextmanager
def demo_progress(names: Iterable[str], steps: int) -> Iterator[Report]:
    """What to call with (optimizer, steps so far, test accuracy); written to stderr, so that results stay alone."""
    console = Console(file=sys.stderr)
    if not console.is_terminal or console.is_dumb_terminal:
        yield _plain(steps)
        return
    columns: list[ProgressColumn] = [TextColumn("{task.description:<12}"), BarColumn(bar_width=None)]
    columns.append(TextColumn("{task.percentage:>3.0f}%"))
    if console.width >= _NARROW:
        columns += [TextColumn("test {task.fields[accuracy]}"), TimeRemainingColumn()]
    with Progress(*columns, console=console, expand=console.width < _NARROW) as progress:
        yield _bars(progress, names, steps)


def _bars(progress: Progress, names: Iterable[str], steps: int) -> Report:
    tasks = {name: progress.add_task(name, total=steps, accuracy="") for name in names}

    def report(name: str, step: int, accuracy: float) -> None:
        progress.update(tasks[name], completed=step, accuracy=f"{accuracy:.1%}")

    return report


def _plain(steps: int) -> Report:
    """A line at each tenth of the way."""
    told: dict[str, int] = {}
    began = time.perf_counter()

    def report(name: str, step: int, accuracy: float) -> None:
        tenth = 10 * step // steps
        if tenth > told.get(name, 0):
            told[name] = tenth
            left = time_left((time.perf_counter() - began) / step * (steps - step))
            line = f"{name}: step {step} of {steps}, test accuracy {accuracy:.1%}"
            print(f"{line}, {left}" if step < steps else line, file=sys.stderr, flush=True)

    return report


@contextmanager
def part_progress(name: str, parts: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """What to call with each part's name before it begins; parts may be passed over. Written to stderr."""
    console = Console(file=sys.stderr)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda part: print(
            f"{name}: {part} ({parts.index(part) + 1} of {len(parts)})", file=sys.stderr, flush=True
        )
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, speed_estimate_period=3600.0) as progress:
        task = progress.add_task(name, total=len(parts))
        yield lambda part: progress.update(task, completed=parts.index(part), description=f"{name}: {part}")
