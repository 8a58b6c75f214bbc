"""Input of the commands: numbers within limits, options that several commands share, recorded runs and problems."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from poprisk.cli._outcome import note, user_code
from poprisk.errors import RunError, UntrustedError

if TYPE_CHECKING:
    from poprisk.runs import Problem, Run


def between(low: Any, high: Any) -> Callable[[Any], Any]:
    """A parser for numbers of the type of ``low``; a wrong one gives an error with the expected range.

    >>> between(1, 9)("7")
    7
    """
    kind, words = (int, "a whole number") if isinstance(low, int) else (float, "a number")

    def parse(given: Any) -> Any:
        try:
            value = kind(given)
        except (ValueError, TypeError):
            value = math.nan
        if not low <= value <= high or isinstance(given, bool) or (isinstance(given, float) and given != value):
            raise typer.BadParameter(f"expected {words} from {low} to {high}, got {given}")
        return value

    return parse


def number(low: Any, high: Any, explanation: str, **shown: Any) -> Any:
    """An option that takes a number within limits."""
    return typer.Option(parser=between(low, high), metavar=f"{low}…{high}", help=explanation, **shown)


def examples(*lines: str) -> str:
    r"""The examples at the end of a command's help.

    >>> examples("poprisk demo")
    'Examples:\n\n$ poprisk demo'
    """
    return "\n\n".join(["Examples:", *(f"$ {line}" for line in lines)])


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a recorded run.")]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Import and call what the run names as its task, even if you have not run it on this machine: it may do "
        "all that you may.",
    ),
]
ProblemReference = Annotated[
    str | None,
    typer.Option(
        "--problem",
        metavar="FUNCTION",
        help="Function that makes the problem, as script.py:function or package.module:function; needed if the run "
        "cannot rebuild its problem.",
        show_default=False,
    ),
]
Budget = Annotated[
    float | None,
    number(
        0.1,
        1e6,
        "Approximate time per section, in seconds on one CPU core (the four sections on operators share 5 times that); "
        "more expensive sections are skipped. Default: that of the analysis kept with the run, otherwise 30.",
        show_default=False,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help='Memory that the process may use, e.g. "2 GB": work is done in smaller pieces. Default: no limit.',
        show_default=False,
    ),
]
Retrain = Annotated[
    int | None,
    number(
        0,
        100,
        "Number of trainings that may be spent on the risk if the run alone does not determine it: 0, or at least 3. "
        "Default: that of the analysis kept with the run, otherwise 0.",
        show_default=False,
    ),
]
Clean = Annotated[
    Path | None,
    typer.Option(
        help="Targets without label noise, to split the test error into its terms: a .npz file with the arrays train "
        "and test.",
        show_default=False,
    ),
]


def built(reference: str, **arguments: Any) -> "Problem":
    """The problem that a function makes, given as ``script.py:function`` or ``package.module:function``."""
    from poprisk.runs import Problem

    with user_code(reference):
        return Problem.build(reference, **arguments)


def opened(path: Path, problem: str | None, trust: bool, *, quiet: bool = False) -> "Run":
    """A recorded run, with the given problem or the one that it rebuilds; on a terminal, asks before foreign code.

    If the problem is not available, a note says so, unless it is to be quiet.

    Raises:
        DataError: There is no run, or it is damaged.
    """
    from poprisk.runs import Run

    run = Run.load(path, problem=None if problem is None else built(problem), trust=trust)
    try:
        with user_code("rebuilding the run's problem"):
            _ = run.problem
    except UntrustedError as error:
        if _allows(path, error):
            return opened(path, None, True)
        if not quiet:
            note(str(error))
    except RunError:
        pass  # what can be shown without it is shown, and everything else says why it is missing
    return run


def _allows(path: Path, error: UntrustedError) -> bool:
    """Show what would be executed, and ask; False where nobody can answer."""
    from poprisk._core.store import Importable, shown_call

    if not (sys.stdin.isatty() and sys.stderr.isatty() and isinstance(error.call, Importable)):
        return False
    note(f"{path} names code that you have not run on this machine. To go on with it, this would be executed:")
    note(f"  {shown_call(error.call)}")
    return typer.confirm(f"Do you trust {shown_call(Importable(error.call.path))}?", default=False, err=True)
