"""Tables of what a gate can observe: turning points of AdamW, and twin trainings with right and with wrong answers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk._core.statistics import mean_over_seeds, paired_difference
from poprisk_lab.gates.evidence import SEEN

Rows = tuple[list[str], list[list[str]]]
_WORDS = {
    "digits-40": "digits, 40% wrong",
    "fashion-40": "Fashion, 40% wrong",
    "teacher_40": "teacher, 40% wrong",
    "lorenz_noise0.4": "Lorenz, noisy sensor",
    "inr_astronaut": "noisy photograph",
    "digits-0": "clean digits",
    "teacher_clean": "clean teacher",
    "char_clean": "language model",
    "pinn_clean": "clean PINN",
}


def task_words(name: str) -> str:
    """A task of the study in words.

    >>> task_words("inr_astronaut"), task_words("digits-20")
    ('noisy photograph', 'digits 20')
    """
    return _WORDS.get(name, name.replace("_", " ").replace("-", " "))


def turning_rows(turning: Mapping[str, Any]) -> Rows:
    """Each task: when AdamW's test value is best, and what the next batch says then and at the end.

    Args:
        turning: That part of a stored result of :mod:`poprisk_lab.gates.evidence`.

    Returns:
        The head of a table and its rows.
    """
    head = ["AdamW on", "best after", "passes", "agreement then", "agreement at the end", "best → end"]
    return head, [[task_words(name), *_turn(found)] for name, found in turning.items()]


def _turn(found: Mapping[str, Any]) -> list[str]:
    pick = max if found["higher_is_better"] else min
    curves = found[found["metric"]]
    means = [mean_over_seeds(values).value for values in zip(*curves, strict=True)]
    best = means.index(pick(means))
    then, end = ([curve[i] for curve in found["agreement"]] for i in (best, -1))
    step = found["steps"][best]
    drop = f"{found['metric']} {means[best]:.3g} → {means[-1]:.3g}"
    return [f"{step} steps", f"{step / found['pass_steps']:.0f}", _cell(then), _cell(end), drop]


def twins_rows(twins: Mapping[str, Any]) -> Rows:
    """What a gate can observe with right and with wrong answers, and the accuracies behind it."""
    head = ["mean of the steps up to", *(f"{step}" for step in twins["right"]["steps"])]
    return head, [
        [f"{name}, {world} answers", *map(_cell, zip(*twins[world][name], strict=True))]
        for name in (*SEEN, "train accuracy", "test accuracy")
        for world in ("right", "wrong")
    ]


def twin_counts(twins: Mapping[str, Any]) -> dict[str, int]:
    """How many comparisons of the twins there are, and how many have a 95% interval that excludes 0."""
    right, wrong = twins["right"], twins["wrong"]
    found = [
        paired_difference(ours, theirs)
        for name in SEEN
        for ours, theirs in zip(zip(*right[name], strict=True), zip(*wrong[name], strict=True), strict=True)
    ]
    apart = sum(not (d.low or 0.0) <= 0 <= (d.high or 0.0) for d in found)
    return {"seeds": len(right["loss"]), "comparisons": len(found), "rows": 2 * len(SEEN), "apart": apart}


def _cell(values: Sequence[float]) -> str:
    """Mean ± standard deviation.

    >>> _cell([0.1, 0.3])
    '0.2 ± 0.1'
    """
    found = mean_over_seeds(values)
    return f"{found.value:.2g} ± {(found.standard_error or 0.0) * math.sqrt(len(values)):.1g}"
