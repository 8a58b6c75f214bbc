"""Recorded runs and problems by what the user typed."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from poprisk.cli._options import HOW_PROBLEM
from poprisk.cli._outcome import user_code
from poprisk.errors import RunError

if TYPE_CHECKING:
    from poprisk.runs import Problem, Run


def built(reference: str, **arguments: Any) -> "Problem":
    """The problem that a function makes: ``script.py:function`` or ``package.module:function``."""
    from poprisk.runs import Problem

    with user_code(reference):
        return Problem.build(reference, **arguments)


def opened(path: Path, problem: str | None, *, needs_problem: bool = False) -> "Run":
    """A run, with the problem given or the one that it rebuilds.

    Raises:
        DataError: there is no run, or it is damaged.
        RunError: the problem is needed and not known.
    """
    from poprisk.runs import Run

    run = Run.load(path, problem=None if problem is None else built(problem))
    try:
        with user_code("rebuilding the run's problem"):
            _ = run.problem
    except RunError as error:
        if needs_problem:
            raise RunError(f"{error}; on the command line: {HOW_PROBLEM}") from None
    return run
