"""The figure of the study of defaults, from its saved result."""

import math
import re
from collections.abc import Mapping, Sequence
from string import ascii_letters
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PALE, PURPLE, SKY, STYLE
from poprisk_lab.paper.default_choice.numbers import (
    GATE_WORDS,
    chosen,
    front,
    library_default,
    ranked,
    task_words,
    tasks_of,
    words,
)
from poprisk_lab.paper.default_choice.study import ALLOWED_COST, Candidate

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of the study of defaults") from None

Saved = Mapping[str, Any]
_GATES = dict(zip(GATE_WORDS, ((BLUE, "o"), (SKY, "s"), (ORANGE, "^"), (PURPLE, "v"), (GREEN, "D")), strict=True))
_FAMILY_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, INK)
_NOISE_MARKERS = "osD^"
_CHOSEN, _DEFAULT = ORANGE, INK
_LETTER_ROOM = 18.0
_HALF_AXIS = 2 * ALLOWED_COST  # the axis of costs is linear up to here: a default is decided within it


def draw(saved: Saved) -> Figure:
    """Score against cost of every candidate, and the scores task by task of those that nothing beats in both.

    Letters join the panels: a candidate on the front of panel A is the row of that letter in panel B. The one the rule
    takes has a ring, the library's present default a square around it. What diverged on a clean task is at the right
    edge.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "default_choice")`` gives.
    """
    found = ranked(saved)
    best, now, taken = front(found), library_default(found), chosen(found)
    rows = best if now is None or now in best else [*best, now]
    rows = rows or found[:1]  # all diverged
    letters = {candidate.label: _letter(place) for place, candidate in enumerate(rows)}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13.2, max(5.4, 2.6 + 0.36 * len(rows))), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
        _draw_trade(left, found, best)
        _write_letters(left, best, letters)
        _highlight(left, taken, now, _edge(found))
        if now is not None and now not in best:
            at = (_place(now, _edge(found)), now.score)
            left.annotate(letters[now.label], at, (11, -12), textcoords="offset points", weight="bold")
        _draw_tasks(right, rows, letters, taken, now)
        left.legend(handles=_gate_legend(found, taken, now), loc="lower right", fontsize=9.5)
        figure.legend(handles=_task_legend(tasks_of(rows)), loc="outside lower right", ncols=6, handletextpad=0.2)
    return figure


def _draw_trade(axes: Axes, found: Sequence[Candidate], best: Sequence[Candidate]) -> None:
    edge = _edge(found)
    axes.axvspan(-1, ALLOWED_COST, color="#E3EEF6", zorder=0, linewidth=0)
    axes.axvline(ALLOWED_COST, color=INK, linewidth=1.2, linestyle="--")
    axes.axhline(0, color=FAINT, linewidth=0.8)
    for candidate in found:
        colour, marker = _GATES.get(candidate.arm, (FAINT, "x"))
        axes.plot(_place(candidate, edge), candidate.score, marker, color=colour, markersize=6.5, alpha=0.8)
    costs, scores = [candidate.cost for candidate in best], [candidate.score for candidate in best]
    axes.plot(costs, scores, color=FAINT, linewidth=1.2, drawstyle="steps-post", zorder=1)
    axes.set_xscale("symlog", linthresh=_HALF_AXIS, linscale=1.6)
    axes.set_xlim(min(-0.005, 1.3 * min(map(_finite_cost, found))), 1.25 * edge)
    ticks = [-0.01, 0.0, ALLOWED_COST, _HALF_AXIS, 0.05, 0.1, 0.2, 0.5, 1.0]
    low, high = axes.get_xlim()
    axes.set_xticks([tick for tick in ticks if low <= tick <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    axes.minorticks_off()
    axes.set_xlabel("cost: points lost on the worst clean classification")
    axes.set_ylabel("mean score on noisy tasks")
    axes.grid(color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(y=0.09)
    axes.set_title(f"A  {len(found)} candidates: help with noise against cost without")


def _write_letters(axes: Axes, best: Sequence[Candidate], letters: Mapping[str, str]) -> None:
    """Beside each candidate of the front; one label for neighbours whose letters would lie on each other."""
    groups: list[list[Candidate]] = []
    for candidate in best:
        if groups and _distance(axes, groups[-1][-1], candidate) < _LETTER_ROOM:
            groups[-1].append(candidate)
        else:
            groups.append([candidate])
    for group in groups:
        ends = [letters[group[0].label], letters[group[-1].label]]
        text = ends[0] if len(group) == 1 else "–".join(ends)
        style: Any = {"textcoords": "offset points", "weight": "bold", "ha": "right"}
        axes.annotate(text, (group[0].cost, group[0].score), (-7, 6), **style)


def _distance(axes: Axes, one: Candidate, other: Candidate) -> float:
    """In pixels of the figure, as far as they are known before it is laid out."""
    ends = axes.transData.transform([(one.cost, one.score), (other.cost, other.score)])
    return math.dist(*ends)


def _highlight(axes: Axes, taken: Candidate | None, now: Candidate | None, edge: float) -> None:
    for candidate, colour, marker, size in ((taken, _CHOSEN, "o", 17), (now, _DEFAULT, "s", 14)):
        if candidate is not None:
            at = (_place(candidate, edge), candidate.score)
            axes.plot(*at, marker, mfc="none", mec=colour, mew=1.8, markersize=size)


def _draw_tasks(
    axes: Axes, rows: Sequence[Candidate], letters: Mapping[str, str], taken: Candidate | None, now: Candidate | None
) -> None:
    looks = _task_looks(tasks_of(rows))
    for y, candidate in enumerate(rows):
        axes.plot([candidate.score] * 2, [y - 0.36, y + 0.36], color=INK, linewidth=2.2)
        for task, value in candidate.scores.items():
            colour, marker = looks[task]
            axes.plot(value, y, marker, color=colour, markersize=6, alpha=0.85)
    axes.set_yticks(range(len(rows)), [f"{words(c)}  {letters[c.label]}" for c in rows], fontsize=9.5)
    for label, candidate in zip(axes.get_yticklabels(), rows, strict=True):
        if candidate in (taken, now):
            label.set_fontweight("bold")
            label.set_color(_CHOSEN if candidate is taken else _DEFAULT)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    for value in (0, 1):
        axes.axvline(value, color=FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("score (0: usual AdamW, 1: AdamW's best step)", loc="right")
    axes.set_title("B  Task by task, the bar their mean")


def _gate_legend(found: Sequence[Candidate], taken: Candidate | None, now: Candidate | None) -> list[Line2D]:
    there = {candidate.arm for candidate in found}
    handles = [
        Line2D([], [], linestyle="none", marker=marker, color=colour, label=GATE_WORDS[arm])
        for arm, (colour, marker) in _GATES.items()
        if arm in there
    ]
    for candidate, colour, marker, label in (
        (taken, _CHOSEN, "o", "chosen by the rule"),
        (now, _DEFAULT, "s", "default now"),
    ):
        if candidate is not None:
            style: Any = {"mfc": "none", "mec": colour, "mew": 1.8, "markersize": 11}
            handles.append(Line2D([], [], linestyle="none", marker=marker, label=label, **style))
    handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.2, label="allowed cost"))
    return handles


def _task_legend(tasks: Sequence[str]) -> list[Line2D]:
    return [
        Line2D([], [], linestyle="none", marker=marker, color=colour, label=task_words(task))
        for task, (colour, marker) in _task_looks(tasks).items()
    ]


def _task_looks(tasks: Sequence[str]) -> dict[str, tuple[str, str]]:
    """A colour for each family of tasks, a marker for each noise within it."""
    families = sorted({_family(task) for task in tasks})
    looks = {}
    for task in tasks:
        alike = [other for other in tasks if _family(other) == _family(task)]
        colour = _FAMILY_COLOURS[families.index(_family(task)) % len(_FAMILY_COLOURS)]
        looks[task] = (colour, _NOISE_MARKERS[alike.index(task) % len(_NOISE_MARKERS)])
    return looks


def _family(task: str) -> str:
    return re.split(r"[-_]", task)[0]


def _letter(place: int) -> str:
    """The letter of a row; doubled after the last of the alphabet.

    >>> _letter(0), _letter(52)
    ('a', 'aa')
    """
    return ascii_letters[place % len(ascii_letters)] * (1 + place // len(ascii_letters))


def _finite_cost(candidate: Candidate) -> float:
    return candidate.cost if math.isfinite(candidate.cost) else 0.0


def _edge(found: Sequence[Candidate]) -> float:
    """Where the costs end, and where those that diverged are drawn."""
    return max(_HALF_AXIS, *map(_finite_cost, found))


def _place(candidate: Candidate, edge: float) -> float:
    return candidate.cost if math.isfinite(candidate.cost) else edge
