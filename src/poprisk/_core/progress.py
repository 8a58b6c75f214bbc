"""How far a training is, and how long it still takes: a bar on a terminal or in a notebook, else ten lines."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Report = Callable[[int, Tensor], None]


@contextmanager
def training_progress(name: str, start: int, steps: int, shown: bool = True) -> Iterator[Report]:
    """What to call with (steps so far, loss) after each step; reads the loss only to show it.

    In a notebook one output is replaced again and again, elsewhere stderr is written to.
    """
    from poprisk._core.notebook import in_notebook

    if not shown:
        yield lambda step, loss: None
    elif in_notebook():
        yield from _display(name, start, steps)
    elif sys.stderr.isatty():
        yield from _bar(name, start, steps)
    else:
        yield _lines(name, start, steps)


def _bar(name: str, start: int, steps: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    loss_column = TextColumn("loss {task.fields[loss]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), loss_column, TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(name, total=steps, completed=start, loss="")
        often = max(1, steps // 200)

        def report(step: int, loss: Tensor) -> None:
            if step % often == 0 or step == steps:
                progress.update(task, completed=step, loss=f"{float(loss):.3g}")

        yield report


def _display(name: str, start: int, steps: int) -> Iterator[Report]:
    from poprisk._core.notebook import NotebookBar

    bar = NotebookBar(name, start, steps)

    def report(step: int, loss: Tensor) -> None:
        if bar.is_due(step):
            bar.update(step, f"loss {float(loss):.3g}")

    try:
        yield report
    except BaseException:
        bar.stop()
        raise
    bar.finish()


def _lines(name: str, start: int, steps: int) -> Report:
    told, began = 10 * start // steps, time.perf_counter()

    def report(step: int, loss: Tensor) -> None:
        nonlocal told
        tenth = 10 * step // steps
        if tenth > told:
            told = tenth
            left = (time.perf_counter() - began) / max(step - start, 1) * (steps - step)
            ahead = f", {time_left(left)}" if step < steps else ""
            write_line(f"{name}: step {step} of {steps}, loss {float(loss):.3g}{ahead}")

    return report


def write_line(text: str) -> None:
    """A line of progress that was asked for; what the library has to say unasked goes to the logger ``poprisk``."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def time_left(seconds: float) -> str:
    """In words.

    >>> time_left(7.2), time_left(400.0)
    ('about 7 s left', 'about 7 min left')
    """
    return f"about {seconds / 60:.0f} min left" if seconds >= 100 else f"about {seconds:.0f} s left"
