"""A progress bar in a notebook: one output that is replaced, not a line for each look."""

import sys
import time
from collections.abc import Callable
from typing import Any

from poprisk._core.html import bar
from poprisk._core.progress import time_left

_PERIOD = 0.25
"""Seconds between two updates: more would only fill the connection to the browser."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook: Jupyter, VS Code, Colab and others that speak its protocol.

    IPython in a terminal is none, and where IPython was never imported there is no kernel.

    >>> in_notebook()
    False
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return getattr(shell, "kernel", None) is not None


class NotebookBar:
    """One display that shows how far something is, updated at most four times a second and at the end.

    Args:
        name: What is under way.
        start: Where it begins.
        total: Where it ends.
        clock: Seconds, for the speed.
    """

    def __init__(self, name: str, start: int, total: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        from IPython.display import display  # type: ignore[import-not-found]  # the notebook has it

        self._name, self._start, self._total, self._clock = name, start, max(total, 1), clock
        self._done, self._began, self._shown_at = start, clock(), clock()
        self._handle = display(self._picture(""), display_id=True)

    def is_due(self, done: int) -> bool:
        """Whether an update now would be shown; ask before computing what it says."""
        return done >= self._total or self._clock() - self._shown_at >= _PERIOD

    def update(self, done: int, words: str = "") -> None:
        """So much is done, and something to say about it."""
        self._done, self._shown_at = done, self._clock()
        self._handle.update(self._picture(words))

    def finish(self) -> None:
        """All of it is done, also where the last updates said less."""
        if self._done < self._total:
            self.update(self._total)

    def stop(self) -> None:
        """Leave the bar where it is, and say that it goes no further."""
        self._handle.update(self._picture("stopped"))

    def _picture(self, words: str) -> Any:
        from IPython.display import HTML  # type: ignore[import-not-found]

        taken, made = self._clock() - self._began, self._done - self._start
        ahead = time_left(taken / made * (self._total - self._done)) if made and self._done < self._total else ""
        said = [f"{self._name}: {self._done} of {self._total}", words, "" if words == "stopped" else ahead]
        return HTML(bar(self._done / self._total, ", ".join(part for part in said if part)))
