"""``poprisk analyze``: find out what a report shows, and keep it with the run."""

import shlex
from typing import Annotated

import typer

from poprisk.cli._opening import opened
from poprisk.cli._options import AsJson, Budget, Clean, ProblemReference, Retrain, RunDirectory, examples
from poprisk.cli._outcome import interrupt_says, user_code
from poprisk.cli._output import show

EXAMPLES = examples(
    "poprisk analyze poprisk-run", "poprisk analyze poprisk-run --budget 120 --retrain 10", "poprisk analyze RUN --json"
)


def analyze(
    run: RunDirectory,
    budget: Budget = None,
    retrain: Retrain = None,
    clean: Clean = None,
    problem: ProblemReference = None,
    again: Annotated[bool, typer.Option("--again", help="Compute also the parts that are kept with the run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Find out what a recorded run learned, memorized and mislabelled, say it in words, and keep it with the run.

    Each part is kept in RUN/analysis as soon as it is finished: an interrupted analysis goes on from there, and poprisk
    report uses what is there. Nothing is trained again without --retrain.
    """
    from poprisk.cli._progress import part_progress
    from poprisk.report import PARTS, CleanTargets, KeptAnalysis, analysis_json, summary_lines
    from poprisk.report import analyze as analyze_run

    found = opened(run, problem)
    targets = None if clean is None else CleanTargets.load(clean)
    kept = KeptAnalysis(found, budget, retrain, targets)
    if again:
        kept.forget()
    options = {"budget": kept.budget, "retrain": kept.retrain, "clean": targets}
    with interrupt_says(kept.words), user_code("the analysis"), part_progress("analysis", PARTS) as progress:
        analysis = analyze_run(found, **options, kept=kept, progress=progress)
    summary, where = summary_lines(analysis), f"Kept in {kept.folder}. " if kept.finished else ""
    after = f"\n{where}The same with every chart and example: poprisk report {shlex.quote(str(run))}"
    found_out = {**analysis_json(analysis), "kept": kept.folder.as_posix() if kept.finished else None}
    show([*summary, *_left_out(analysis.left_out, summary), after], found_out, as_json)


def _left_out(reasons: dict[str, str], told: list[str]) -> list[str]:
    """Each reason that was not told yet, with the parts that it stands in the way of.

    >>> _left_out({"kernel": "too large", "gates": "none", "operators": "too large"}, ["The gate: none."])
    ['Left out: kernel, operators: too large.']
    """
    parts: dict[str, list[str]] = {}
    for part, why in reasons.items():
        if not any(why in line for line in told):
            parts.setdefault(why, []).append(part)
    return [f"Left out: {', '.join(names)}: {why}." for why, names in parts.items()]
