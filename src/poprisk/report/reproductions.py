"""The experiments that ``poprisk reproduce`` knows: each one's sizes, its run, and how its saved result is shown."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from rich.console import RenderableType

from poprisk.errors import HyperparameterError
from poprisk.report.job_progress import Report
from poprisk.store.files import Figure

Saved = Mapping[str, Any]
"""What ``poprisk.store.load_result`` gives."""


class Result(Protocol):
    """What an experiment returns."""

    def save(self, path: str | Path) -> Path:
        """Write it as JSON, with its environment."""
        ...


@dataclass(frozen=True)
class Reproduction:
    """An experiment, ready to run and to be shown."""

    kind: str
    """Of the saved result."""
    full: Any
    """The configuration whose numbers are reported."""
    smoke: Any
    """One of some seconds, which shows that everything works and nothing else."""
    run: Callable[[Any, Report], Result]
    draw: Callable[[Saved], Figure]
    lines: Callable[[Saved], Iterable[RenderableType]]


def _coupling() -> Reproduction:
    from poprisk.experiments import coupling as experiment
    from poprisk.report.coupling import draw_coupling
    from poprisk.report.coupling_page import coupling_lines

    return Reproduction(
        kind=experiment.KIND,
        full=experiment.CouplingConfig(),
        smoke=experiment.SMOKE,
        run=experiment.run,
        draw=draw_coupling,
        lines=coupling_lines,
    )


def _signal() -> Reproduction:
    from poprisk.experiments import signal as experiment
    from poprisk.report.signal import draw_signal
    from poprisk.report.signal_page import signal_lines

    return Reproduction(
        kind=experiment.KIND,
        full=experiment.SignalConfig(),
        smoke=experiment.SMOKE,
        run=experiment.run,
        draw=draw_signal,
        lines=signal_lines,
    )


def _capacity() -> Reproduction:
    from poprisk.experiments import capacity as experiment
    from poprisk.report.capacity import draw_capacity
    from poprisk.report.capacity_page import capacity_lines

    return Reproduction(
        kind=experiment.KIND,
        full=experiment.CapacityConfig(),
        smoke=experiment.SMOKE,
        run=experiment.run,
        draw=draw_capacity,
        lines=capacity_lines,
    )


def _time() -> Reproduction:
    from poprisk.experiments import time_axis as experiment
    from poprisk.report.time_axis import draw_time
    from poprisk.report.time_page import time_lines

    return Reproduction(
        kind=experiment.KIND,
        full=experiment.TimeConfig(),
        smoke=experiment.SMOKE,
        run=experiment.run,
        draw=draw_time,
        lines=time_lines,
    )


_KNOWN: dict[str, tuple[str, Callable[[], Reproduction]]] = {
    "coupling": ("training displacement determines test displacement while the kernel moves", _coupling),
    "signal": ("directions that dissipate most per complexity, what a test set loses without the rest", _signal),
    "capacity": ("exact risk against simulated fits across capacity, and the price of interpolated noise", _capacity),
    "time": ("which directions are fitted first, and generalization long after interpolation", _time),
}


def known() -> dict[str, str]:
    """What each name stands for, in a line; nothing heavy is imported for it.

    >>> "coupling" in known()
    True
    """
    return {name: claim for name, (claim, _) in _KNOWN.items()}


def require_known(name: str | None) -> str:
    """The name, if there is an experiment of that name.

    Raises:
        HyperparameterError: there is none; the message lists those there are and the one that was perhaps meant.

    >>> require_known("coupling")
    'coupling'
    """
    if name in _KNOWN:
        return name
    listed = "; ".join(f"{known_name} ({claim})" for known_name, claim in known().items())
    if name is None:
        raise HyperparameterError(f"reproduce needs the NAME of an experiment. Known: {listed}")
    near = get_close_matches(name.lower(), _KNOWN, n=1)
    guess = f", did you mean {near[0]!r}?" if near else "."
    raise HyperparameterError(f"no experiment is called {name!r}{guess} Known: {listed}")


def reproduction(name: str) -> Reproduction:
    """The experiment of this name, imported now.

    Raises:
        HyperparameterError: there is none.
        MissingExtraError: a package that the experiment or its figure needs is not installed.
    """
    return _KNOWN[require_known(name)][1]()
