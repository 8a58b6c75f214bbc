"""How far a training is: a bar on a terminal, elsewhere a line at each tenth of the way."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Report = Callable[[int, Tensor], None]


@contextmanager
def training_progress(name: str, start: int, steps: int, *, shown: bool) -> Iterator[Report]:
    """What to call with (steps so far, loss) after each step; writes to stderr, and reads the loss only to show it."""
    if not shown:
        yield lambda step, loss: None
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


def _lines(name: str, start: int, steps: int) -> Report:
    told = 10 * start // steps

    def report(step: int, loss: Tensor) -> None:
        nonlocal told
        tenth = 10 * step // steps
        if tenth > told:
            told = tenth
            print(f"{name}: step {step} of {steps}, loss {float(loss):.3g}", file=sys.stderr, flush=True)

    return report
