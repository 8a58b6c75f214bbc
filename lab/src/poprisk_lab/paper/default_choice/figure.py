"""The figure of the study of defaults, from its saved result."""

import math
from collections.abc import Mapping, Sequence
from string import ascii_letters
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.direct_labels import Point, label_points
from poprisk_lab.figure_style import (
    DEEP,
    FAINT,
    INK,
    PALE,
    SHADE,
    SMALL,
    STYLE,
    WIDTH,
    colour_of,
    marker_of,
    text_colour,
)
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
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of the study of defaults") from None

Saved = Mapping[str, Any]
_CHOSEN, _DEFAULT = INK, colour_of("defaults")
_SCORES = LinearSegmentedColormap.from_list("scores", ["white", DEEP])
_LETTER_ROOM = 18.0
_HALF_AXIS = 2 * ALLOWED_COST  # the axis of costs is linear up to here: a default is decided within it


def draw(saved: Saved) -> Figure:
    """Score against cost of every candidate, and the scores task by task of those that nothing beats in both.

    Letters join the panels: a candidate on the front of panel A is the row of that letter in panel B. The one the rule
    takes has a ring, the default of version 0.1 a square around it. What diverged on a clean task is at the right
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
        table = 0.9 + 0.24 * len(rows)
        figure = Figure(figsize=(WIDTH, 4.7 + table), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(4.4, table))
        above, below = (part.subplots() for part in parts)
        _draw_trade(above, found, best)
        _highlight(above, taken, now, _edge(found))
        _draw_tasks(below, rows, letters, taken, now)
        above.legend(handles=_gate_legend(found, taken, now), loc="center left", bbox_to_anchor=(1.0, 0.5))
        figure.draw_without_rendering()
        extra = [] if now is None or now in best else [now]
        _write_letters(above, best, extra, found, letters)
    return figure


def _draw_trade(axes: Axes, found: Sequence[Candidate], best: Sequence[Candidate]) -> None:
    edge = _edge(found)
    axes.axvspan(-1, ALLOWED_COST, color=SHADE, zorder=0, linewidth=0)
    axes.axvline(ALLOWED_COST, color=INK, linewidth=1.2, linestyle="--")
    axes.axhline(0, color=FAINT, linewidth=0.8)
    for candidate in found:
        colour, marker = colour_of(candidate.arm), marker_of(candidate.arm)
        axes.plot(_place(candidate, edge), candidate.score, marker, color=colour, markersize=6, alpha=0.8)
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


def _write_letters(
    axes: Axes,
    best: Sequence[Candidate],
    extra: Sequence[Candidate],
    found: Sequence[Candidate],
    letters: Mapping[str, str],
) -> None:
    """Beside each candidate of the front; one label for neighbours whose letters would lie on each other."""
    groups: list[list[Candidate]] = []
    for candidate in best:
        if groups and _distance(axes, groups[-1][-1], candidate) < _LETTER_ROOM:
            groups[-1].append(candidate)
        else:
            groups.append([candidate])
    edge = _edge(found)
    names = []
    for group in (*groups, *([each] for each in extra)):
        ends = [letters[group[0].label], letters[group[-1].label]]
        words = ends[0] if len(group) == 1 else "–".join(ends)
        names.append(Point(words, [(_place(group[0], edge), group[0].score)], INK, "bold"))
    label_points(axes, names, [(_place(each, edge), each.score) for each in found], size=10)


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
    """A table: a row for each candidate, best score on top, a column for each task, the darker the better."""
    tasks = tasks_of(rows)
    for y, candidate in enumerate(rows):
        for x, value in enumerate([*(candidate.scores.get(task) for task in tasks), candidate.score]):
            if value is None:
                continue
            known = math.isfinite(value)
            colour = _SCORES(min(max(value, 0.0), 1.0)) if known else PALE
            axes.add_patch(Rectangle((x + 0.2 * (x == len(tasks)), y - 0.46), 0.96, 0.92, color=colour, linewidth=0))
            style: Any = {"ha": "center", "va": "center", "fontsize": SMALL}
            axes.text(x + 0.48 + 0.2 * (x == len(tasks)), y, f"{value:.2f}" if known else "–", **style)
    axes.set_yticks(range(len(rows)), [f"{_short(c)}  {letters[c.label]}" for c in rows], fontsize=SMALL)
    for label, candidate in zip(axes.get_yticklabels(), rows, strict=True):
        label.set_color(text_colour(_DEFAULT if candidate is now else colour_of(candidate.arm)))
        label.set_fontweight("bold" if candidate in (taken, now) else "normal")
    axes.set_xlim(0, len(tasks) + 1.2)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    heads = [_head(task_words(task).replace("noise", "noise ").replace("inr", "image")) for task in tasks]
    axes.set_xticks([*(x + 0.48 for x in range(len(tasks))), len(tasks) + 0.68], [*heads, "mean"], fontsize=SMALL)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title("B  Scores of the candidates with letters, task by task")
    axes.set_xlabel("score: 0 is usual AdamW's last step, 1 AdamW's best step")


def _head(words: str) -> str:
    r"""A task as the head of a narrow column.

    >>> _head("digits 20")
    'digits\n20%\nwrong'
    """
    return "\n".join(f"{word}%\nwrong" if word.isdigit() else word for word in words.split())


def _short(candidate: Candidate) -> str:
    return words(candidate).replace("weight_decay", "wd")


def _gate_legend(found: Sequence[Candidate], taken: Candidate | None, now: Candidate | None) -> list[Line2D]:
    there = {candidate.arm for candidate in found}
    handles = [
        Line2D([], [], linestyle="none", marker=marker_of(arm), color=colour_of(arm), label=GATE_WORDS[arm])
        for arm in GATE_WORDS
        if arm in there
    ]
    for candidate, colour, marker, label in (
        (taken, _CHOSEN, "o", "chosen by the rule"),
        (now, _DEFAULT, "s", "default of version 0.1"),
    ):
        if candidate is not None:
            style: Any = {"mfc": "none", "mec": colour, "mew": 1.8, "markersize": 11}
            handles.append(Line2D([], [], linestyle="none", marker=marker, label=label, **style))
    handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.2, label="allowed cost"))
    return handles


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
