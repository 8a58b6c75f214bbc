"""Which of the searched gates stands for population-risk training, and what that choice cost in trials.

The best of several gates has been searched with several times the trials of AdamW, so every page that shows it says
so, and shows beside it the one gate that was fixed before anything was run.
"""

from poprisk_lab.engine import reading
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.reading import StoredRow, StoredStudy
from poprisk_lab.engine.study import choose
from poprisk_lab.engine.task import TaskMetric

GATES = ("soft", "hard", "snr", "soft_calibrated", "hard_calibrated")
"""The gates an option of PopRiskAdamW gives; their searches together are one search over the gate as well."""


def searched_gates(study: StoredStudy) -> list[str]:
    """The gates that were searched here, in the order of :data:`GATES`."""
    return [arm for arm in GATES if arm in study["arms"]]


def chosen_gate(study: StoredStudy, question: str) -> StoredRow | None:
    """The report's row of the gate whose chosen trial answered best on the tuning seeds.

    The report's own seeds have no say in it. The choice is still one among k gates, each with as many trials as AdamW
    had in all: k times the budget, which :func:`budget_words` says and :func:`fixed_gate` avoids.

    Args:
        study: A stored study.
        question: ``last``, ``best`` or ``target``.

    Returns:
        None where no gate was searched, or none has an answer.
    """
    searched = {arm: study["arms"][arm] for arm in searched_gates(study)}
    found = {
        arm: a["trials"][a["chosen"][question]]
        for arm, a in searched.items()
        if a["chosen"][question] is not None and reading.find_row(study, arm, question) is not None
    }
    if not found:
        return None
    metric = TaskMetric(**reading.primary(study))
    place = choose(metric, [trial["curve"] for trial in found.values()], study["evaluation_steps"])[question]
    return None if place is None else reading.row(study, list(found)[place], question)


def library_gate() -> str:
    """The searched arm with the gate and threshold that PopRiskAdamW has by default; the soft one if there is none.

    >>> library_gate() in GATES
    True
    """
    library = ARMS["defaults"]
    same = (name for name in GATES if (ARMS[name].rule, ARMS[name].calibrated) == (library.rule, library.calibrated))
    return next(same, "soft")


def fixed_gate(study: StoredStudy, question: str) -> StoredRow | None:
    """The row of the one gate fixed in advance: the library's own if it was searched, else the soft one.

    Where a study searches one gate only, it is that one. It had exactly AdamW's budget. None where there is no such
    gate, or it has no answer.
    """
    searched = searched_gates(study)
    for arm in (library_gate(), "soft", *(searched if len(searched) == 1 else ())):
        if arm in searched:
            return reading.find_row(study, arm, question)
    return None


def budget_words(study: StoredStudy) -> str:
    """What it means that a gate was the best of those searched.

    >>> budget_words({"arms": {"soft": {}, "snr": {}, "adamw": {}}})
    'best of 2 gates, 2 times the trials'
    >>> budget_words({"arms": {"soft": {}, "adamw": {}}}), budget_words({"arms": {"adamw": {}}})
    ('the only gate searched', 'no gate searched')
    """
    count = len(searched_gates(study))
    if count > 1:
        return f"best of {count} gates, {count} times the trials"
    return "the only gate searched" if count else "no gate searched"


def tuned_gates(study: StoredStudy, question: str) -> dict[str, StoredRow]:
    """The rows that stand for a tuned gate, by words that say what each has cost.

    The best of those searched first, then the one fixed in advance; one row where they are the same, none where no
    gate was searched or has an answer.
    """
    chosen, fixed = chosen_gate(study, question), fixed_gate(study, question)
    found: dict[str, StoredRow] = {}
    if chosen is not None:
        same = ", the one fixed in advance" if chosen is fixed and len(searched_gates(study)) > 1 else ""
        found[f"{chosen['label']} ({budget_words(study)}{same})"] = chosen
    if fixed is not None and fixed is not chosen:
        found[f"{fixed['label']} (the gate fixed in advance)"] = fixed
    return found


def tuned_gate_words(study: StoredStudy) -> str:
    """The column or the line of the best gate in a table or a figure.

    >>> tuned_gate_words({"arms": {"soft": {}, "snr": {}}}), tuned_gate_words({"arms": {"soft": {}}})
    ('best of 2 gates, tuned', 'gate, tuned')
    """
    count = len(searched_gates(study))
    return f"best of {count} gates, tuned" if count > 1 else "gate, tuned"
