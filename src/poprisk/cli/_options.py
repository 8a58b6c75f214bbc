"""What commands have in common on their way in: numbers within limits, options of one name, examples in the help."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer


def between(low: Any, high: Any) -> Callable[[Any], Any]:
    """Parses a number of the kind of ``low``; a wrong one is answered with what was expected and what came.

    >>> between(1, 9)("7")
    7
    """
    kind, words = (int, "a whole number") if isinstance(low, int) else (float, "a number")

    def parse(given: Any) -> Any:
        try:
            value = kind(given)
        except (ValueError, TypeError):
            value = math.nan
        if not low <= value <= high or (isinstance(given, bool | float) and given != value):
            raise typer.BadParameter(f"expected {words} from {low} to {high}, got {given}")
        return value

    return parse


def number(low: Any, high: Any, explanation: str, **shown: Any) -> Any:
    """An option that takes a number within limits."""
    return typer.Option(parser=between(low, high), metavar=f"{low}…{high}", help=explanation, **shown)


def examples(*lines: str) -> str:
    r"""The end of a command's help: what to type.

    >>> examples("poprisk demo")
    'Examples:\n\n$ poprisk demo'
    """
    return "\n\n".join(["Examples:", *(f"$ {line}" for line in lines)])


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of words.")]
RunDirectory = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a recorded run.")]
HOW_PROBLEM = "--problem package.module:function or --problem script.py:function"
ProblemReference = Annotated[
    str | None,
    typer.Option(
        "--problem",
        metavar="FUNCTION",
        help="script.py:function or package.module:function that makes the problem, where the run cannot rebuild it.",
        show_default=False,
    ),
]
Budget = Annotated[
    float | None,
    number(
        0.1,
        1e6,
        "Seconds on one CPU core, about, that each part may take; dearer ones are left out. Default: as in the "
        "analysis kept with the run, else 30.",
        show_default=False,
    ),
]
Retrain = Annotated[
    int | None,
    number(
        0,
        100,
        "Trainings that may be spent on the risk where the run alone cannot tell it: 0, or at least 3. Default: as in "
        "the analysis kept with the run, else 0.",
        show_default=False,
    ),
]
Clean = Annotated[
    Path | None,
    typer.Option(
        help="The targets without noise, for the four cells of test error: a .npz file with train and test.",
        show_default=False,
    ),
]
