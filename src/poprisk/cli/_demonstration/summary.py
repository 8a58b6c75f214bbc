"""Summary of the demo: the table, the comparison with the tuned AdamW, the sensitivity to the learning rate."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poprisk._core.statistics import Difference, Mean, mean_over_seeds, paired_difference

LR_RANGE = 30.0
"""Width of the range of learning rates over which sensitivity is measured."""


@dataclass(frozen=True)
class Curve:
    """Test accuracy at each evaluation: mean, lowest and highest over the seeds."""

    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class Row:
    """One line of the table: a recipe at one learning rate."""

    label: str
    optimizer: str
    lr: float
    choice: str
    """How the learning rate was chosen: ``usual`` or ``best`` (of the grid)."""
    last: Mean
    best: Mean
    memorized: Mean | None
    curve: Curve


@dataclass(frozen=True)
class Sensitivity:
    """How much the mean accuracy at the last step varies over a range of learning rates around the default.

    Among the ranges of the grid that are :data:`LR_RANGE` wide and contain the default, the one that varies least.
    """

    optimizer: str
    low_lr: float
    high_lr: float
    variation: float


@dataclass(frozen=True)
class Summary:
    """Rows in the table's order, KeepBest minus the tuned AdamW at the end, sensitivities, one sentence."""

    rows: list[Row]
    last_by_lr: dict[str, list[Mean]]
    difference: Difference
    sensitivity: list[Sensitivity]
    headline: str
    sensitivity_line: str


def summarize(sweeps: Mapping[str, Mapping[str, Any]]) -> Summary:
    """The three rows of the table, and the comparison.

    The tuned AdamW uses the learning rate with the best mean *test* accuracy at the last step, a choice that favours
    AdamW.
    """
    (name, adamw), (kept_name, kept) = sweeps.items()
    usual = adamw["learning_rates"].index(adamw["default_lr"])
    last_by_lr = {key: [mean_over_seeds(_last(c)) for c in sweep["test_accuracy"]] for key, sweep in sweeps.items()}
    tuned = max(range(len(adamw["learning_rates"])), key=lambda i: last_by_lr[name][i].value)
    default = kept["learning_rates"].index(kept["default_lr"])
    rows = [
        _row(name, "usual", adamw, usual),
        _row(name, "best", adamw, tuned),
        _row(kept_name, "usual", kept, default),
    ]
    difference = paired_difference(_last(kept["test_accuracy"][default]), _last(adamw["test_accuracy"][tuned]))
    sensitivity = [s for key, sweep in sweeps.items() if (s := _sensitivity(key, sweep, last_by_lr[key])) is not None]
    return Summary(
        rows=rows,
        last_by_lr=last_by_lr,
        difference=difference,
        sensitivity=sensitivity,
        headline=_headline(rows, difference),
        sensitivity_line=_sensitivity_line(sensitivity),
    )


def format_lr(lr: float) -> str:
    """A learning rate in short form.

    >>> format_lr(1e-3), format_lr(3e-5), format_lr(0.025)
    ('1e-3', '3e-5', '2.5e-2')
    """
    exponent = math.floor(math.log10(lr) + 1e-9)
    return f"{round(lr / 10.0**exponent, 6):g}e{exponent}"


def _row(name: str, choice: str, sweep: Mapping[str, Any], index: int) -> Row:
    accuracy, memorized = sweep["test_accuracy"][index], sweep["memorized"]
    lr = sweep["learning_rates"][index]
    words = {"usual": "at the usual lr", "best": "at the grid's best lr"}[choice]
    return Row(
        label=f"{name} {words} {format_lr(lr)}",
        optimizer=name,
        lr=lr,
        choice=choice,
        last=mean_over_seeds(_last(accuracy)),
        best=mean_over_seeds([max(curve) for curve in accuracy]),
        memorized=None if memorized is None else mean_over_seeds(_last(memorized[index])),
        curve=_curve(accuracy),
    )


def _curve(curves: list[list[float]]) -> Curve:
    points = list(zip(*curves, strict=True))
    return Curve([mean_over_seeds(p).value for p in points], [min(p) for p in points], [max(p) for p in points])


def _last(curves: list[list[float]]) -> list[float]:
    return [curve[-1] for curve in curves]


def _sensitivity(name: str, sweep: Mapping[str, Any], finals: list[Mean]) -> Sensitivity | None:
    rates = sweep["learning_rates"]
    found = []
    for low in rates:
        inside = [i for i, lr in enumerate(rates) if low <= lr <= low * LR_RANGE * (1 + 1e-6)]
        high = rates[inside[-1]]
        if high >= low * LR_RANGE * (1 - 1e-6) and low <= sweep["default_lr"] <= high:
            chosen = [finals[i].value for i in inside]
            found.append(Sensitivity(name, low, high, max(chosen) - min(chosen)))
    return min(found, key=lambda s: s.variation) if found else None


def _headline(rows: list[Row], difference: Difference) -> str:
    usual, tuned, ours = rows
    verdict = {
        "above": "ends above the tuned AdamW",
        "below": "ends below the tuned AdamW",
        "unclear": "shows no clear difference from the tuned AdamW",
    }[difference.verdict]
    if difference.low is None or difference.high is None:
        verdict = "cannot be compared with the tuned AdamW by a single run"
        margin = "one seed, so no interval"
    else:
        interval = f"{100 * difference.low:+.1f} to {100 * difference.high:+.1f}"
        margin = f"{difference.confidence:.0%} interval {interval}, {difference.count} paired seeds"
    return (
        f"With KeepBest, nothing tuned, training ends at {100 * ours.last.value:.1f}% instead of "
        f"{100 * usual.last.value:.1f}%. It {verdict} ({100 * tuned.last.value:.1f}%): "
        f"{100 * difference.value:+.1f} points ({margin})."
    )


def _sensitivity_line(found: list[Sensitivity]) -> str:
    if not found:
        return ""
    parts = [
        f"{s.optimizer} varies by {100 * s.variation:.1f} points (lr {format_lr(s.low_lr)} to {format_lr(s.high_lr)})"
        for s in found
    ]
    return f"Over a {LR_RANGE:g}-fold range of learning rates, {', '.join(parts)}."
