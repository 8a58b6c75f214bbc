"""Progress on a terminal as bars side by side, elsewhere as a few plain lines."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn

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

    def report(name: str, step: int, accuracy: float) -> None:
        tenth = 10 * step // steps
        if tenth > told.get(name, 0):
            told[name] = tenth
            print(f"{name}: step {step} of {steps}, test accuracy {accuracy:.1%}", file=sys.stderr, flush=True)

    return report
