"""A progress bar in a notebook: one output that is replaced, rather than a line for each update."""

import sys
import time
from collections.abc import Callable
from typing import Any

from poprisk._core.html import bar

_PERIOD = 0.25
"""Seconds between two updates; more frequent ones would only fill the connection to the browser."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: Jupyter, VS Code, Colab and others that speak its protocol.

    IPython in a terminal is not a notebook, and if IPython was never imported there is no kernel.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """One output that shows how far some work is, updated at most four times a second and at the end."""

    def __init__(self, name: str, start: int, total: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        from IPython.display import display  # type: ignore[import-not-found]  # the notebook has it

        self._name, self._start, self._total, self._clock = name, start, max(total, 1), clock
        self._done, self._began, self._shown_at = start, clock(), clock()
        self._handle = display(self._picture(""), display_id=True)

    def is_due(self, done: int) -> bool:
        """Whether an update is due; ask before computing what it would say."""
        return done >= self._total or self._clock() - self._shown_at >= _PERIOD

    def update(self, done: int, words: str = "", *, total: int | None = None, skipped: int | None = None) -> None:
        """Show how much is done, with a few words; ``skipped`` units took no work and do not count as speed."""
        self._done, self._shown_at = done, self._clock()
        self._total = self._total if total is None else max(total, 1)
        self._start = self._start if skipped is None else skipped
        self._handle.update(self._picture(words))

    def finish(self) -> None:
        """Show that all is done, even if the last update said less."""
        if self._done < self._total:
            self.update(self._total)

    def stop(self) -> None:
        """Leave the bar where it is, and say that the work stopped."""
        self._handle.update(self._picture("stopped"))

    def _picture(self, words: str) -> Any:
        from IPython.display import HTML  # type: ignore[import-not-found]

        taken, made = self._clock() - self._began, self._done - self._start
        ahead = time_left(taken / made * (self._total - self._done)) if made > 0 and self._done < self._total else ""
        said = [f"{self._name}: {self._done} of {self._total}", words, "" if words == "stopped" else ahead]
        return HTML(bar(self._done / self._total, ", ".join(part for part in said if part)))


def time_left(seconds: float) -> str:
    """The time left in words.

    >>> time_left(7.2), time_left(400.0)
    ('about 7 s left', 'about 7 min left')
    """
    return f"about {duration(seconds)} left"


def duration(seconds: float) -> str:
    """A duration in words.

    >>> duration(45), duration(600), duration(36000)
    ('45 s', '10 min', '10 h')
    """
    if seconds >= 6000:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"
