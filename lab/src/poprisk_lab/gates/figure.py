"""The figure of the study of gate variants: the trade-off, and every rule on every task."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PALE, PURPLE, SKY, STYLE
from poprisk_lab.gates.arms import ACTION, APART, IDEAS, POOLING, REPLAY, TIME, VARIANCE
from poprisk_lab.gates.evidence_numbers import task_words
from poprisk_lab.gates.plan import KNOWN
from poprisk_lab.gates.verdict import ALLOWED_SLOWDOWN, Clean, Noisy, Outcome, outcomes

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter, NullFormatter
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of the gate variants") from None

Saved = Mapping[str, Any]
_LOOKS = {
    "known rule": (INK, "s"),
    REPLAY: (BLUE, "o"),
    VARIANCE: (SKY, "v"),
    TIME: (GREEN, "D"),
    POOLING: (PURPLE, "P"),
    APART: (ORANGE, "^"),
    ACTION: (FAINT, "X"),
}
_FAR = 99.0  # standard errors that say no more: with few seeds they can be nearly 0
_HELD, _LOST = "#CFE6F3", "#F8D9C4"
_ROOTS = {idea.label: idea.root for idea in IDEAS}


def draw(saved: Saved) -> Figure:
    """A: mean score on noisy tasks against mean slowdown on clean ones. B: each rule on each task.

    In A, the region in which both requirements are met is shaded; the numbers are the rows of B. In B, a cell is blue
    if the rule holds the task. Noisy tasks show how far the last step is above the strict gate's, in standard errors;
    clean tasks show the slowdown and, in brackets, how many seeds reach the target if not all do.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "gate_variants")`` gives.
    """
    found = outcomes(saved["result"]["studies"])
    with matplotlib.rc_context(STYLE):
        rows = 1.0 + 0.25 * len(found)
        figure = Figure(figsize=(10.0, 5.2 + rows), layout="constrained")
        trade, tasks = figure.subplots(2, 1, height_ratios=(4.8, rows))
        _draw_trade(trade, found)
        _draw_tasks(tasks, found)
        figure.legend(handles=_legend(found), loc="outside lower center", ncols=4, handletextpad=0.3)
    return figure


def _draw_trade(axes: Axes, found: Sequence[Outcome]) -> None:
    scores = [0.0 if math.isnan(outcome.score) else outcome.score for outcome in found]
    widest = max(*(outcome.slowdown for outcome in found), 1.3)
    low, high = min(*scores, 0.0) - 0.15, max(*scores, 1.0) + 0.15
    axes.add_patch(Rectangle((0.5, 1.0), ALLOWED_SLOWDOWN - 0.5, high - 1.0, color="#E3EEF6", zorder=0, linewidth=0))
    axes.axvline(ALLOWED_SLOWDOWN, color=INK, linewidth=1, linestyle="--")
    axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
    for number, (outcome, score) in enumerate(zip(found, scores, strict=True), start=1):
        colour, marker = _LOOKS[_root(outcome)]
        axes.plot(outcome.slowdown, score, marker, color=colour, markersize=7.5, alpha=0.85)
        style: Any = {"textcoords": "offset points", "fontsize": 8}
        axes.annotate(str(number), (outcome.slowdown, score), (5, 4), **style)
    axes.set_xscale("log")
    axes.set_xlim(min(0.9, 0.95 * min(outcome.slowdown for outcome in found)), 1.15 * widest)
    axes.set_ylim(low, high)
    ticks = [tick for tick in (0.7, 0.8, 1.0, 1.1, 1.5, 2, 3, 5, 8) if axes.get_xlim()[0] <= tick <= 1.15 * widest]
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("slowdown on clean tasks at AdamW's learning rate (geometric mean)")
    axes.set_ylabel("score on noisy tasks: AdamW 0, strict gate 1")
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title("A  Score under noise against slowdown on clean tasks")


def _draw_tasks(axes: Axes, found: Sequence[Outcome]) -> None:
    noisy, clean = list(found[0].noisy), list(found[0].clean)
    for row, outcome in enumerate(found):
        cells: list[Noisy | Clean] = [*(outcome.noisy[name] for name in noisy), *(outcome.clean[n] for n in clean)]
        for column, cell in enumerate(cells):
            place = column + (0.25 if column >= len(noisy) else 0.0)
            colour = _HELD if cell.holds else _LOST
            axes.add_patch(Rectangle((place, row), 0.96, 0.92, color=colour, linewidth=0))
            axes.text(place + 0.48, row + 0.48, _words(cell), ha="center", va="center", fontsize=7.5)
    axes.set_xlim(0, len(noisy) + len(clean) + 0.25)
    axes.set_ylim(len(found), 0)
    places = [*(i + 0.48 for i in range(len(noisy))), *(len(noisy) + i + 0.73 for i in range(len(clean)))]
    axes.set_xticks(places, ["\n".join(task_words(name).split(maxsplit=1)) for name in (*noisy, *clean)], fontsize=8)
    labels = [f"{outcome.label}  {number}" for number, outcome in enumerate(found, start=1)]
    axes.set_yticks([row + 0.48 for row in range(len(found))], labels, fontsize=8.5)
    for label, outcome in zip(axes.get_yticklabels(), found, strict=True):
        label.set_color(_LOOKS[_root(outcome)][0])
        label.set_fontweight("bold" if outcome.meets_both else "normal")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title("B  Noisy tasks: standard errors above the strict gate; clean tasks: slowdown")


def _words(cell: Noisy | Clean) -> str:
    if isinstance(cell, Clean):
        return f"{cell.slowdown:.2f}" if cell.reached == cell.seeds else f"≥{cell.slowdown:.1f} ({cell.reached})"
    if not math.isfinite(cell.lead):
        return "diverged"
    if cell.lead == 0:
        return "0"
    ratio = cell.lead / cell.error if cell.error else math.copysign(math.inf, cell.lead)
    if abs(ratio) > _FAR:
        return f"{'>' if ratio > 0 else '<'} {math.copysign(_FAR, ratio):+.0f}"
    return f"{ratio:+.1f}"


def _root(outcome: Outcome) -> str:
    return "known rule" if outcome.label in KNOWN else _ROOTS[outcome.label]


def _legend(found: Sequence[Outcome]) -> list[Line2D]:
    there = {_root(outcome) for outcome in found}
    return [
        Line2D([], [], color=colour, marker=marker, linestyle="none", label=root)
        for root, (colour, marker) in _LOOKS.items()
        if root in there
    ]
