"""What a call may take: limits of time and memory, which everything that works within the call asks for."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from poprisk.errors import HyperparameterError, LimitError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LEAST = 2**26
"""Working memory below which a call cannot go on."""
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "failed to allocate")


@dataclass(frozen=True)
class Limits:
    """Limits of a call, and when it began."""

    name: str
    budget: float | None
    """Seconds."""
    memory: int | None
    """Bytes of this process."""
    shown: bool | None
    keeps: str
    """What Ctrl-C keeps."""
    lower: str
    """What to lower if memory runs out."""
    clock: Callable[[], float]
    began: float

    def left(self) -> float:
        """Seconds left."""
        return float("inf") if self.budget is None else self.began + self.budget - self.clock()

    def check(self, work: str, seconds: float) -> None:
        """Refuse work that would take longer than what is left; a LimitError."""
        if self.budget is not None and seconds > self.left():
            taken = self.clock() - self.began
            raise LimitError(
                f"{work} would take about {said(seconds)} more, over the budget of {self.budget:g} s: use "
                f"budget={_round_up(seconds + taken)}"
            )


_CURRENT: ContextVar[Limits | None] = ContextVar("poprisk_limits", default=None)


def current_limits() -> Limits | None:
    """The limits of the outermost call that this is a part of."""
    return _CURRENT.get()


@contextmanager
def held(name: str, budget: float | None, memory: int | str | None, **about: Any) -> Iterator[Limits]:
    """Limits that begin now, which what is done within the block asks for."""
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if budget is not None and not (number and 0 < budget < float("inf")):
        raise HyperparameterError(f"budget must be None or a positive number of seconds, got {budget!r}")
    allowed = None if memory is None else in_bytes(memory)
    limits = Limits(name, budget, allowed, began=about["clock"](), **about)
    token = _CURRENT.set(limits)
    try:
        yield limits
    finally:
        _CURRENT.reset(token)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python or PyTorch says that memory ran out.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), is_out_of_memory(ValueError("x"))
    (True, False)
    """
    words = str(error).lower()
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(each in words for each in _OUT_OF_MEMORY)


def working_memory(usual: int) -> int:
    """Bytes that work may use: ``usual``, or less where the limit of the call leaves less."""
    found = _CURRENT.get()
    if found is None or found.memory is None:
        return usual
    held = memory_used()
    if found.memory - held < _LEAST:
        raise LimitError(
            f"memory={found.memory / 1e9:.3g} GB is too little for {found.name}: the process holds {held / 1e9:.2f} GB "
            f"already; allow {_ceiling((held + 4 * _LEAST) / 1e9)} GB or more"
        )
    return min(usual, (found.memory - held) // 2)  # what is planned from it takes up to half as much again


def memory_used() -> int:
    """Bytes that this process holds in memory now.

    >>> memory_used() > 1000
    True
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            import resource

            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        import resource
        import sys

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def in_bytes(memory: int | str) -> int:
    """A limit of memory in bytes.

    >>> in_bytes("1.5 GB"), in_bytes(2**20)
    (1500000000, 1048576)
    """
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*([\d.]+)\s*([KMG]I?B)\s*", memory.upper())
        try:
            memory = int(float(found[1]) * _UNITS[found[2]]) if found else 0
        except ValueError:
            memory = 0
        if memory > 0:
            return memory
    elif isinstance(memory, int | float) and not isinstance(memory, bool) and 1 <= memory < float("inf"):
        return int(memory)
    raise HyperparameterError(f'memory must be None, a number of bytes, or words such as "2 GB", got {memory!r}')


def said(seconds: float) -> str:
    """A time in words, to two digits.

    >>> said(0.4), said(43.2), said(431.0), said(7300.0)
    ('1 s', '43 s', '430 s', '2.0 h')
    """
    if seconds >= 6000:
        return f"{seconds / 3600:.1f} h"
    return f"{10 * round(seconds / 10)} s" if seconds >= 100 else f"{max(1, round(seconds))} s"


def _round_up(seconds: float) -> int:
    digits = 10 ** max(0, len(str(int(seconds))) - 2)
    return (int(seconds * 1.2) // digits + 1) * digits


def _ceiling(gigabytes: float) -> float:
    return -(-gigabytes * 10 // 1) / 10
