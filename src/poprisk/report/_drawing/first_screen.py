"""The facts of an analysis that the first screen of a report judges."""

from poprisk.report._analysis.analyze import WITHOUT_PROBLEM, Analysis
from poprisk.report._drawing.advice import Facts
from poprisk.risk import Reading, under_training

_CLEAR = 2.0
"""Standard errors by which the risk must have risen to say so."""


def facts_of(found: Analysis) -> Facts:
    """What the rules of :mod:`poprisk.report._drawing.advice` look at."""
    run, curves, table, memorized = found.run, found.curves, found.table, found.memorization
    kept = run.kept
    loss, error = test_loss(found)
    return Facts(
        examples=run.num_examples,
        steps=run.num_steps,
        path="RUN" if run.path is None else run.path.as_posix(),
        first_loss=None if curves is None else curves.train[0],
        last_loss=None if curves is None else curves.train[-1],
        risk=found.risk,
        why_no_risk=found.left_out.get("risk", ""),
        held=0 if kept is None else kept.count,
        kept_step=None if kept is None else kept.risk.step,
        best_step=best_step(found.readings or []),
        unfinished=under_training(run, found.last_risk).partition(": train longer")[0],
        memorized=None if memorized is None else memorized.share,
        memorized_error=float("nan") if memorized is None else memorized.standard_error,
        why_not_memorized=found.left_out.get("memorization", ""),
        wrong=None if table is None else table.wrong_labels,
        suspects=0 if table is None else int(table.is_suspect.sum()),
        kind="loss" if table is None else table.kind,
        reviewable=table is not None and not {"suggested_label", "suggested_target"}.isdisjoint(table.columns),
        test_loss=loss,
        test_error=error,
        no_problem=found.left_out.get("examples") == WITHOUT_PROBLEM,
    )


def test_loss(found: Analysis) -> tuple[float | None, float]:
    """Test loss, and its standard error, of the weights that ``found.risk`` is about."""
    curves = found.curves
    if curves is None or curves.test is None:
        return None, float("nan")
    if found.run.kept is not None:
        return (None, float("nan")) if curves.kept is None else curves.kept[:2]
    return curves.test[-1], float("nan") if curves.test_error is None else curves.test_error


def best_step(readings: list[Reading]) -> int | None:
    """The step with the lowest valid risk, if the last valid one is clearly higher."""
    valid = [r for r in readings if r.risk.valid]
    if len(valid) < 2:
        return None
    best, last = min(valid, key=lambda r: float(r.risk.value)), valid[-1]
    rise = float(last.risk.value) - float(best.risk.value)
    return best.step if best.step and rise > _CLEAR * float(last.risk.standard_error) else None
