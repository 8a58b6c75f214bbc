"""Which of the searched gates stands for population-risk training: the one that was best on the tuning seeds."""

from poprisk.experiments.comparison import reading
from poprisk.experiments.comparison.reading import StoredRow, StoredStudy
from poprisk.experiments.comparison.study import choose
from poprisk.experiments.comparison.task import Metric

GATES = ("soft", "hard", "snr", "soft_calibrated", "hard_calibrated")
"""The gates an option of PopRiskAdamW gives; their searches together are one search over the gate as well."""


def chosen_gate(study: StoredStudy, question: str) -> StoredRow | None:
    """The report's row of the gate whose chosen trial answered best on the tuning seeds.

    The report's own seeds have no say in it, so that nothing is gained by having many gates.

    Args:
        study: A stored study.
        question: ``last``, ``best`` or ``target``.

    Returns:
        None where no gate was searched, or none has an answer.
    """
    searched = {arm: study["arms"][arm] for arm in GATES if arm in study["arms"]}
    found = {
        arm: a["trials"][a["chosen"][question]] for arm, a in searched.items() if a["chosen"][question] is not None
    }
    if not found:
        return None
    metric = Metric(**reading.primary(study))
    place = choose(metric, [trial["curve"] for trial in found.values()], study["evaluation_steps"])[question]
    return None if place is None else reading.row(study, list(found)[place], question)
