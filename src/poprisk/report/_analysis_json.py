"""What an analysis of a run found, as plain values: for programs, where the page is for people."""

import math
from typing import Any

from poprisk.report._analysis import Analysis
from poprisk.report._sections import summary_lines
from poprisk.risk import Reading

_WORST = 20


def analysis_json(found: Analysis) -> dict[str, Any]:
    """The summary in words and the numbers behind it; numbers that are not finite become None.

    Args:
        found: The analysis.

    Returns:
        JSON values: of each part what is last or foremost, None for the parts in ``left_out``.
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
        "risk": _reading(found.readings[-1]) if found.readings else None,
        "risk_along_the_run": [_reading(r) for r in found.readings] if found.readings else None,
        "memorization": found.memorization and vars(found.memorization),
        "gates": found.gates and {name: values[-1] for name, values in found.gates.overall.items()},
        "operators": window and {"directions": window.outputs, "signal_rank": window.rank, "cells": window.cells},
        "kernel_drift": found.kernel and found.kernel.drift[-1],
        "wrong_labels": None if table is None else table.wrong_labels.to_dict(),
        "suspects": None if table is None else int(table.is_suspect.sum()),
        "most_suspicious": table.order()[:_WORST].tolist() if table is not None else None,
        "left_out": found.left_out,
    }
    return finite(out)


def _reading(reading: Reading) -> dict[str, Any]:
    risk = reading.risk
    about = {"step": reading.step, "training_loss": risk.training_loss, "method": risk.method, "target": risk.target}
    return about | risk.to_dict()


def finite(value: Any) -> Any:
    """The same without NaN and infinity, which JSON does not know.

    >>> finite({"a": [1.0, float("nan")]})
    {'a': [1.0, None]}
    """
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
