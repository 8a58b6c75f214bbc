"""``poprisk analyze``: analyze a recorded run, and keep the analysis with it."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from poprisk.cli import _options as given
from poprisk.cli._audit import kept_table
from poprisk.cli._outcome import interrupt_says, user_code
from poprisk.cli._output import show

if TYPE_CHECKING:
    from poprisk.report import Analysis, CleanTargets, KeptAnalysis
    from poprisk.runs import Run

EXAMPLES = given.examples(
    "poprisk analyze poprisk-run", "poprisk analyze poprisk-run --budget 120 --retrain 10", "poprisk analyze RUN --json"
)


def analyze(
    run: given.RunDirectory,
    budget: given.Budget = None,
    retrain: given.Retrain = None,
    memory: given.Memory = None,
    clean: given.Clean = None,
    problem: given.ProblemReference = None,
    trust: given.Trust = False,
    again: Annotated[bool, typer.Option("--again", help="Compute everything again, also parts already kept.")] = False,
    as_json: given.AsJson = False,
) -> None:
    """Find out what a recorded run learned and memorized and which labels look wrong; print a summary.

    Each part is kept in RUN/analysis as soon as it is finished: an interrupted analysis continues from there, and
    poprisk report uses it. Without --retrain only a few deletions are trained, to check the risk, where quick.
    """
    from poprisk.report import CleanTargets, KeptAnalysis, analysis_json, summary_lines

    found = given.opened(run, problem, trust)
    targets = None if clean is None else CleanTargets.load(clean)
    kept = KeptAnalysis(found, budget, retrain, targets)
    if again:
        kept.forget()
    analysis = analyzed(found, kept, targets, memory)
    summary, where = summary_lines(analysis), f"Kept in {kept.folder}. " if kept.finished else ""
    after = f"\n{where}For all charts and examples: poprisk report {shlex.quote(str(run))}"
    found_out = {**analysis_json(analysis), "kept": kept.folder.as_posix() if kept.finished else None}
    show([*summary, *_left_out(analysis.left_out, summary), after], found_out, as_json)


def analyzed(
    run: "Run", kept: "KeptAnalysis", clean: "CleanTargets | None" = None, memory: str | None = None
) -> "Analysis":
    """The analysis of a run with the options of ``kept``; shows progress, and says what is kept after an interrupt."""
    from poprisk.report import analyze as analyze_run

    if kept.retrain and not kept.finished:
        kept_table(run, kept.retrain)  # refuses a run that cannot be trained again
    with interrupt_says(kept.words), user_code("the analysis"):
        return analyze_run(run, clean=clean, kept=kept, memory=memory)


def _left_out(reasons: dict[str, str], told: list[str]) -> list[str]:
    """A line for each reason that is not in the summary, with the parts that are missing because of it.

    >>> _left_out({"kernel": "too large", "gates": "none", "operators": "too large"}, ["The gate: none."])
    ['Not available: kernel, operators (too large).']
    """
    parts: dict[str, list[str]] = {}
    for part, why in reasons.items():
        if not any(why in line for line in told):
            parts.setdefault(why, []).append(part)
    return [f"Not available: {', '.join(names)} ({why})." for why, names in parts.items()]
