"""The figure of a comparison: the last step of every optimizer on every task, drawn from a saved result."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk._core.statistics import mean_over_seeds
from poprisk.errors import MissingExtraError
from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredMetric, StoredRow, StoredStudy
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PALE, STYLE
from poprisk_lab.pages.comparison import ADAMW, DEFAULTS, compared_rows

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of a comparison") from None

Saved = Mapping[str, Any]
_CONTROLS = ("gate_schedule", "random_mask", "matched_norm")
_FAMILIES = {
    "AdamW": (INK, "s", ("adamw", "adamw_cosine")),
    "a gate": (BLUE, "o", ("defaults", "soft", "hard", "snr", "soft_calibrated", "hard_calibrated", "tensor_gate")),
    "control": (ORANGE, "^", _CONTROLS),
    "another rule": (GREEN, "D", ("adabelief", "msvag", "cautious", "grokfast", "cubed")),
}
_ROW_HEIGHT, _PANEL_WIDTH = 0.235, 6.4
_REACH = 4.0  # length of the axis in distances of the median from the best: one bad row must not squeeze the others


def draw_comparison(saved: Saved) -> Figure:
    """One panel for each study: the last step of each row, mean ± standard error over seeds, sorted, best on top.

    A hollow marker is the mean over seeds of each seed's best step. The solid line is the last step of tuned AdamW,
    the dotted line its best checkpoint. Bold names were not tuned. Rows beyond the axis are shown at its edge.

    Args:
        saved: Return value of ``poprisk._core.store.load_result`` for an experiment made of studies.
    """
    studies = list(saved["result"]["studies"].values())
    columns = min(2, len(studies))
    lines = math.ceil(len(studies) / columns)
    tallest = max(len(compared_rows(study)) for study in studies)
    with matplotlib.rc_context(STYLE):
        size = (_PANEL_WIDTH * columns, lines * (_ROW_HEIGHT * tallest + 1.1) + 0.5)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False).flatten()
        for axes, study in zip(panels, studies, strict=False):
            draw_study(axes, study)
        for axes in panels[len(studies) :]:
            axes.set_axis_off()
        figure.legend(handles=_legend(), loc="outside lower center", ncols=4, handletextpad=0.4)
    return figure


def draw_study(axes: Axes, study: StoredStudy, title: str | None = None) -> None:
    """Draw the forest plot of one study."""
    metric, rows = reading.primary(study), compared_rows(study)
    ends = [reading.final(row, metric["name"]) for row in rows]
    limits = _limits(ends, [_mean_peak(row, metric) for row in rows], metric)
    for place, (row, values) in enumerate(zip(rows, ends, strict=True)):
        _draw_row(axes, len(rows) - 1 - place, row, values, metric, limits)
    _draw_references(axes, study, limits)
    axes.set_xlim(*limits)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_yticks(range(len(rows)), [row["label"] for row in reversed(rows)], fontsize=9)
    for label, row in zip(axes.get_yticklabels(), reversed(rows), strict=True):
        label.set_fontweight("normal" if row["chosen_for"] else "bold")
        if row["arm"] == DEFAULTS:
            label.set_color(BLUE)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=5)
    axes.grid(axis="x", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    direction = "more is better" if metric["higher_is_better"] else "less is better"
    axes.set_xlabel(f"{metric['name']} ({direction})")
    axes.set_title(title or study["task"]["name"].replace("_", " "))


def _limits(
    ends: Sequence[Sequence[float]], peaks: Sequence[float | None], metric: StoredMetric
) -> tuple[float, float]:
    """Limits of the axis: slightly beyond the best bar, and far enough on the other side for most rows."""
    sign = 1.0 if metric["higher_is_better"] else -1.0
    means = [mean_over_seeds(values) for values in ends if all(map(math.isfinite, values))]
    heights = sorted((sign * mean.value for mean in means), reverse=True)
    if not heights:
        return 0.0, 1.0
    top, middle, worst = heights[0], heights[len(heights) // 2], heights[-1]
    span = max(top - middle, 1e-3 * max(abs(top), 1e-9))
    bars = [sign * mean.value + (mean.standard_error or 0.0) for mean in means]
    highest = max(*bars, *(sign * peak for peak in peaks if peak is not None))
    good, bad = highest + 0.3 * span, top - min(_REACH * span, top - worst) - 0.35 * span
    return (bad, good) if metric["higher_is_better"] else (-good, -bad)


def _mean_peak(row: StoredRow, metric: StoredMetric) -> float | None:
    """The mean over seeds of each seed's best step; ``None`` if no value is finite."""
    peaks = [b for b in reading.best(row, metric["name"], metric["higher_is_better"]) if math.isfinite(b)]
    return math.fsum(peaks) / len(peaks) if peaks else None


def _draw_row(
    axes: Axes, y: int, row: StoredRow, values: Sequence[float], metric: StoredMetric, limits: tuple[float, float]
) -> None:
    colour, marker = _look(row["arm"])
    if row["arm"] == DEFAULTS:
        axes.axhspan(y - 0.5, y + 0.5, color="#E3EEF6", zorder=0, linewidth=0)
    peak = _mean_peak(row, metric)
    if peak is not None:
        axes.plot(peak, y, marker, mfc="none", mec=colour, markersize=6.5, alpha=0.7)
    bad_side = metric["higher_is_better"]  # the left edge if higher is better
    diverged = sum(math.isnan(value) for value in values)
    if diverged:
        _write_at_edge(axes, y, f"{diverged} of {len(values)} diverged", bad_side, limits)
        return
    mean = mean_over_seeds(values)
    if not limits[0] <= mean.value <= limits[1]:
        _write_at_edge(axes, y, f"{mean.value:{metric['spec']}}", bad_side, limits)
        return
    error = mean.standard_error or 0.0
    axes.errorbar(mean.value, y, xerr=error, fmt=marker, color=colour, markersize=5, linewidth=1.6, capsize=2)


def _write_at_edge(axes: Axes, y: int, words: str, left: bool, limits: tuple[float, float]) -> None:
    if left:
        axes.text(limits[0], y, f" ◂ {words}", va="center", ha="left", fontsize=8.5, color="#5A5A5A")
    else:
        axes.text(limits[1], y, f"{words} ▸ ", va="center", ha="right", fontsize=8.5, color="#5A5A5A")


def _draw_references(axes: Axes, study: StoredStudy, limits: tuple[float, float]) -> None:
    tuned, name = reading.find_row(study, ADAMW), reading.primary(study)["name"]
    if tuned is None:
        return
    for values, line in ((reading.final(tuned, name), "-"), (reading.oracle(study), ":")):
        mean = math.fsum(values) / len(values)
        if math.isfinite(mean) and limits[0] <= mean <= limits[1]:
            axes.axvline(mean, color=FAINT, linewidth=1.3, linestyle=line, zorder=1)


def _look(arm: str) -> tuple[str, str]:
    """Colour and marker of the family of an arm; an unknown arm counts as another rule."""
    for colour, marker, arms in _FAMILIES.values():
        if arm in arms:
            return colour, marker
    colour, marker, _ = _FAMILIES["another rule"]
    return colour, marker


def _legend() -> list[Line2D]:
    families = [
        Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=5, label=words)
        for words, (colour, marker, _) in _FAMILIES.items()
    ]
    hollow = Line2D([], [], color=FAINT, marker="o", mfc="none", linestyle="none", label="its best step")
    last = Line2D([], [], color=FAINT, label="tuned AdamW, last step")
    best = Line2D([], [], color=FAINT, linestyle=":", label="tuned AdamW, best checkpoint")
    bold = Line2D([], [], linestyle="none", label="bold: given, not tuned")
    return [*families, last, best, hollow, bold]
