"""The figure of the study of gate variants: the trade-off, and every rule on every task."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.direct_labels import Point, along, label_points
from poprisk_lab.figure_style import (
    HELD,
    INK,
    LOST,
    PALE,
    SHADE,
    SLATE,
    SMALL,
    STYLE,
    WIDTH,
    colour_of,
    marker_of,
    text_colour,
)
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
_MARKERS = {REPLAY: "o", VARIANCE: "v", TIME: "D", POOLING: "P", APART: "^", ACTION: "X"}
_FAR = 99.0  # standard errors that say no more: with few seeds they can be nearly 0
_ROOTS = {idea.label: idea.root for idea in IDEAS}


def draw(saved: Saved) -> Figure:
    """A: mean score on noisy tasks against mean slowdown on clean ones. B: each rule on each task.

    In A, the region in which both requirements are met is shaded; known rules have their names, and variants the
    numbers of their rows in B. In B, a cell is blue if the rule holds the task. Noisy tasks show how far the last step
    is above the strict gate's, in standard errors; clean tasks show the slowdown and, in brackets, how many seeds reach
    the target if not all do.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "gate_variants")`` gives.
    """
    found = outcomes(saved["result"]["studies"])
    with matplotlib.rc_context(STYLE):
        rows = 1.0 + 0.23 * len(found)
        figure = Figure(figsize=(WIDTH, 5.2 + rows), layout="constrained")
        trade, tasks = figure.subplots(2, 1, height_ratios=(4.8, rows))
        _draw_trade(trade, found)
        _draw_tasks(tasks, found)
        figure.legend(handles=_legend(found), loc="outside lower center", ncols=6, handletextpad=0.1, columnspacing=1.2)
        figure.draw_without_rendering()
        _name_points(trade, found)
    return figure


def _score(outcome: Outcome) -> float:
    return 0.0 if math.isnan(outcome.score) else outcome.score


def _draw_trade(axes: Axes, found: Sequence[Outcome]) -> None:
    scores = [_score(outcome) for outcome in found]
    widest = max(*(outcome.slowdown for outcome in found), 1.3)
    low, high = min(*scores, 0.0) - 0.15, max(*scores, 1.0) + 0.25
    axes.add_patch(Rectangle((0.5, 1.0), ALLOWED_SLOWDOWN - 0.5, high - 1.0, color=SHADE, zorder=0, linewidth=0))
    axes.axvline(ALLOWED_SLOWDOWN, color=INK, linewidth=1, linestyle="--")
    axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
    for outcome, score in zip(found, scores, strict=True):
        colour, marker = _look(outcome)
        axes.plot(outcome.slowdown, score, marker, color=colour, markersize=7, alpha=0.9, label=outcome.label)
    axes.set_xscale("log")
    axes.set_xlim(min(0.9, 0.95 * min(outcome.slowdown for outcome in found)), 1.2 * widest)
    axes.set_ylim(low, high)
    ticks = [tick for tick in (0.7, 0.8, 1.0, 1.1, 1.5, 2, 3, 5, 8) if axes.get_xlim()[0] <= tick <= 1.15 * widest]
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("slowdown on clean tasks at AdamW's learning rate (geometric mean)")
    axes.set_ylabel("score on noisy tasks:\nAdamW 0, strict gate 1")
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title("A  Score under noise against slowdown on clean tasks")


def _name_points(axes: Axes, found: Sequence[Outcome]) -> None:
    places = [(outcome.slowdown, _score(outcome)) for outcome in found]
    names = [
        Point(outcome.label if outcome.label in KNOWN else str(number), [place], _look(outcome)[0])
        for number, (outcome, place) in enumerate(zip(found, places, strict=True), start=1)
    ]
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    required = along(axes, [(left, 1.0), (right, 1.0)], 150) + along(
        axes, [(ALLOWED_SLOWDOWN, low), (ALLOWED_SLOWDOWN, high)], 100
    )
    label_points(axes, names, [*places, *required])


def _draw_tasks(axes: Axes, found: Sequence[Outcome]) -> None:
    noisy, clean = list(found[0].noisy), list(found[0].clean)
    for row, outcome in enumerate(found):
        cells: list[Noisy | Clean] = [*(outcome.noisy[name] for name in noisy), *(outcome.clean[n] for n in clean)]
        for column, cell in enumerate(cells):
            place = column + (0.25 if column >= len(noisy) else 0.0)
            colour = HELD if cell.holds else LOST
            axes.add_patch(Rectangle((place, row), 0.96, 0.92, color=colour, linewidth=0))
            axes.text(place + 0.48, row + 0.48, _words(cell), ha="center", va="center", fontsize=SMALL)
        colour, marker = _look(outcome)
        axes.plot(-0.14, row + 0.46, marker, color=colour, markersize=5.5, clip_on=False)
    axes.set_xlim(0, len(noisy) + len(clean) + 0.25)
    axes.set_ylim(len(found), 0)
    places = [*(i + 0.48 for i in range(len(noisy))), *(len(noisy) + i + 0.73 for i in range(len(clean)))]
    words = ["\n".join(task_words(name).split()) for name in (*noisy, *clean)]
    axes.set_xticks(places, words, fontsize=SMALL)
    labels = [f"{outcome.label}  {number}" for number, outcome in enumerate(found, start=1)]
    axes.set_yticks([row + 0.46 for row in range(len(found))], labels, fontsize=SMALL)
    for label, outcome in zip(axes.get_yticklabels(), found, strict=True):
        label.set_color(text_colour(_look(outcome)[0]) if outcome.label in KNOWN else INK)
        label.set_fontweight("bold" if outcome.meets_both else "normal")
    axes.tick_params(axis="x", length=0)
    axes.tick_params(axis="y", length=0, pad=14)
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


def _look(outcome: Outcome) -> tuple[str, str]:
    """A known rule has its optimizer's colour and marker; a variant the marker of its idea."""
    if outcome.label in KNOWN:
        arm = KNOWN[outcome.label][0]
        return colour_of(arm), marker_of(arm)
    return SLATE, _MARKERS[_ROOTS[outcome.label]]


def _legend(found: Sequence[Outcome]) -> list[Line2D]:
    there = {_ROOTS[outcome.label] for outcome in found if outcome.label not in KNOWN}
    return [
        Line2D([], [], color=SLATE, marker=marker, linestyle="none", label=root)
        for root, marker in _MARKERS.items()
        if root in there
    ]
