"""An analysis in sentences, for people, and as JSON values, for programs."""

import math
from typing import Any

from poprisk.report._analysis.analyze import Analysis
from poprisk.report._analysis.curves import Memorization
from poprisk.report._drawing.svg_chart import number
from poprisk.report._drawing.wording import as_command, percent, share_words, size_of
from poprisk.risk import AuditTable, Reading, RiskEstimate, under_training

_WORST = 20


def summary_lines(found: Analysis) -> list[str]:
    """The findings in sentences, the most important first."""
    unfinished = under_training(found.run, found.last_risk)
    lines = [f"{unfinished[0].upper()}{unfinished[1:]}."] if unfinished else []
    curves, table = found.curves, found.table
    if found.memorization is not None and curves is not None:
        lines.append(_memorization_words(found.memorization, curves.train[0], curves.train[-1]))
    elif "memorization" in found.left_out:
        lines.append(f"How much was memorized is not known: {as_command(found.left_out['memorization'])}.")
    last = found.last_risk
    if found.risk is not None:
        lines.append(f"Population risk, the expected loss on new data: {_risk_words(found.risk)}.")
        if last is not None and last is not found.risk:
            lines.append(f"The same at the last step: {_risk_words(last)}.")
    elif "risk" in found.left_out and table is not None:
        lines.append(f"Population risk was not estimated: {found.left_out['risk']}.")
    if curves is not None and curves.test:
        right = f"accuracy {100 * curves.test_accuracy[-1]:.1f}%, " if curves.test_accuracy else ""
        lines.append(f"On the test set, with the weights of the last step: {right}loss {number(curves.test[-1])}.")
    if table is not None:
        lines.append(headline(table))
    lines += _stop_words(found)
    if found.gates is not None:
        gate = found.gates.overall
        lines.append(
            f"At the end of training the gate was open for {percent(gate['active_fraction'][-1])} of the weights; its "
            f"mean was {number(gate['mean_gate'][-1])}."
        )
    if found.kernel is not None:
        moved = found.kernel.drift[-1]
        lines.append(f"The tangent kernel moved by {percent(moved)}{' of' if moved <= 2 else ''} its initial norm.")
    return lines or [next(iter(found.left_out.values()), "Nothing could be computed.")]


def headline(table: AuditTable) -> str:
    """The estimated number of wrong labels, in a sentence."""
    n, wrong = len(table), table.wrong_labels
    if table.kind == "loss":
        return f"{n} examples ranked by their loss averaged over training; {wrong.reason}."
    if wrong.valid:
        return f"{float(wrong.value):.0f} ± {float(wrong.standard_error):.0f} of {n} labels are estimated to be wrong."
    known = f"{int(table.is_suspect.sum())} of {n} labels are suspects; how many are wrong is not known"
    return f"{known}: {as_command(wrong.reason)}."


def _memorization_words(found: Memorization, first: float, last: float) -> str:
    share, error = 100 * found.share, 100 * found.standard_error
    known = math.isfinite(error)
    size = share_words(found.share, found.standard_error)
    doubt = " This cannot be distinguished from zero." if known and share < 2 * error else ""
    doubt += " More than 100% means that the network does worse on new data than before training." * (share > 100)
    assumed = ", assuming that it is drawn from the same distribution as the training set"
    source = f"{found.source}{assumed if 'test' in found.source else ''}"
    return (
        f"{size} of the drop in training loss, from {number(first)} to {number(last)}, was memorization: it does not "
        f"carry over to new data, according to the {source}.{doubt}"
    )


def _risk_words(risk: RiskEstimate) -> str:
    verdict = "valid" if risk.valid else f"not valid: {as_command(risk.reason)}"
    trained = f"; training loss {number(risk.training_loss)}" if math.isfinite(risk.training_loss) else ""
    return f"{size_of(risk)} ({verdict}), for {risk.target}{trained}"


def _stop_words(found: Analysis) -> list[str]:
    valid = [r for r in found.readings or [] if r.risk.valid]
    if len(valid) < 2:
        return []
    best, last = min(valid, key=lambda r: float(r.risk.value)), valid[-1]
    if best.step == last.step:
        return [f"The estimated risk was lowest at step {last.step}, the last one with a valid estimate."]
    low, high = float(best.risk.value), float(last.risk.value)
    clear = high - low > float(last.risk.standard_error)
    verdict = (
        "the steps in between did not help on new data" if clear else "the difference is within one standard error"
    )
    return [
        f"The estimated risk was lowest at step {best.step}, {low:.4g}, and {high:.4g} at step {last.step}: {verdict}."
    ]


def analysis_json(found: Analysis) -> dict[str, Any]:
    """The summary and the numbers behind it as JSON values; numbers that are not finite become None.

    Args:
        found: The analysis.

    Returns:
        The final or most important values of each part; None for the parts in ``left_out``.
    """
    run, curves, window, table = found.run, found.curves, found.window, found.table
    out = {
        "run": None if run.path is None else run.path.as_posix(),
        "examples": run.num_examples,
        "weights": run.num_weights,
        "steps": run.num_steps,
        "optimizer": run.manifest["optimizer"]["name"],
        "budget": found.budget,
        "retrain": found.retrain,
        "summary": summary_lines(found),
        "curves": curves and {"steps": curves.steps, "train": curves.train, "test": curves.test},
        "test_accuracy": curves.test_accuracy[-1] if curves and curves.test_accuracy else None,
        "risk": _kept_or_last(found),
        "risk_at_the_last_step": _reading(found.readings[-1]) if found.readings else None,
        "risk_along_the_run": [_reading(r) for r in found.readings] if found.readings else None,
        "memorization": found.memorization and vars(found.memorization),
        "gates": found.gates and {name: values[-1] for name, values in found.gates.overall.items()},
        "operators": window
        and {
            "directions": window.outputs,
            "signal_rank": window.dense and window.dense.rank,
            "cells": window.dense and window.dense.cells,
            "steps": [window.readings.start, window.readings.stop],
            "left": {name: values[-1] for name, values in window.readings.left.items()},
            "test_loss_terms": window.readings.terms,
        },
        "kernel_drift": found.kernel and found.kernel.drift[-1],
        "wrong_labels": None if table is None else table.wrong_labels.to_dict(),
        "suspects": None if table is None else int(table.is_suspect.sum()),
        "most_suspicious": table.order()[:_WORST].tolist() if table is not None else None,
        "left_out": found.left_out,
    }
    return finite(out)


def _kept_or_last(found: Analysis) -> dict[str, Any] | None:
    kept = found.run.kept
    if kept is not None and found.risk is not None:
        return _reading(Reading(kept.risk.step, found.risk))
    return _reading(found.readings[-1]) if found.readings else None


def _reading(reading: Reading) -> dict[str, Any]:
    risk = reading.risk
    about = {"step": reading.step, "training_loss": risk.training_loss, "method": risk.method, "target": risk.target}
    return about | risk.to_dict()


def finite(value: Any) -> Any:
    """The value without NaN and infinity, which JSON does not have.

    >>> finite({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
