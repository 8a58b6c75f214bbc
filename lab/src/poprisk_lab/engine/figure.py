"""The figure of a comparison: the last step of every optimizer on every task, drawn from a saved result."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk._core.statistics import mean_over_seeds
from poprisk.errors import MissingExtraError
from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredMetric, StoredRow, StoredStudy
from poprisk_lab.figure_style import FAINT, INK, PALE, SHADE, SMALL, STYLE, WIDTH, colour_of, marker_of, text_colour
from poprisk_lab.pages.comparison import ADAMW, DEFAULTS, compared_rows

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of a comparison") from None

Saved = Mapping[str, Any]
_ROW_HEIGHT, _ABREAST = 0.235, 3
_REACH = 4.0  # length of the axis in distances of the median from the best: one bad row must not squeeze the others


def draw_comparison(saved: Saved, titles: Sequence[str] | None = None) -> Figure:
    """One panel for each study with the last step of each optimizer, mean ± standard error over seeds.

    The rows are the same in all panels: the optimizer with the best mean rank over the studies is on top. A hollow
    marker is the mean over seeds of each seed's best step. The solid line is the last step of tuned AdamW, the dotted
    line its best checkpoint. Bold names were not tuned. Rows beyond the axis are shown at its edge.

    Args:
        saved: Return value of ``poprisk._core.store.load_result`` for an experiment made of studies.
        titles: One for each study; default: the names of their tasks.
    """
    studies = list(saved["result"]["studies"].values())
    columns = min(_ABREAST, len(studies))
    lines = math.ceil(len(studies) / columns)
    with matplotlib.rc_context(STYLE):
        height = lines * (_ROW_HEIGHT * len(shared_rows(studies)) + 1.0) + 0.5
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
        for i, axes in enumerate(panels.flatten()):
            if i >= len(studies):
                axes.set_axis_off()
        draw_studies(list(panels.flatten()[: len(studies)]), studies, titles)
        figure.legend(handles=legend_handles(), loc="outside lower center", ncols=4, handletextpad=0.4)
    return figure


def draw_studies(panels: Sequence[Axes], studies: Sequence[StoredStudy], titles: Sequence[str] | None = None) -> None:
    """Draw the forest plots of some studies, with the same rows in each; the panels share their vertical axis."""
    names = [study["task"]["name"].replace("_", " ") for study in studies] if titles is None else titles
    rows = shared_rows(studies)
    for axes, study, title in zip(panels, studies, names, strict=True):
        _draw_study(axes, study, rows, title)
    labels = panels[0]
    labels.set_ylim(-0.7, len(rows) - 0.3)
    labels.set_yticks(range(len(rows)), [row["label"] for row in reversed(rows)], fontsize=SMALL)
    for axes in panels:
        axes.tick_params(axis="y", length=0)
    for label, row in zip(labels.get_yticklabels(), reversed(rows), strict=True):
        label.set_fontweight("normal" if row["chosen_for"] else "bold")
        label.set_color(text_colour(colour_of(row["arm"])))


def shared_rows(studies: Sequence[StoredStudy]) -> list[StoredRow]:
    """Every row that any study compares, the one with the best mean rank first; what a study lacks does not count."""
    ranks: dict[str, list[float]] = {}
    found: dict[str, StoredRow] = {}
    for study in studies:
        rows = compared_rows(study)
        for place, row in enumerate(rows):
            ranks.setdefault(row["label"], []).append(place / len(rows))
            found.setdefault(row["label"], row)
    return sorted(found.values(), key=lambda row: math.fsum(ranks[row["label"]]) / len(ranks[row["label"]]))


def _draw_study(axes: Axes, study: StoredStudy, rows: Sequence[StoredRow], title: str) -> None:
    metric, here = reading.primary(study), {row["label"]: row for row in compared_rows(study)}
    ends = {label: reading.final(row, metric["name"]) for label, row in here.items()}
    limits = _limits(list(ends.values()), [_mean_peak(row, metric) for row in here.values()], metric)
    for place, row in enumerate(reversed(rows)):
        if row["arm"] == DEFAULTS:
            axes.axhspan(place - 0.5, place + 0.5, color=SHADE, zorder=0, linewidth=0)
        if row["label"] in here:
            _draw_row(axes, place, here[row["label"]], ends[row["label"]], metric, limits)
    _draw_references(axes, study, limits)
    axes.set_xlim(*limits)
    axes.locator_params(axis="x", nbins=4)
    axes.tick_params(axis="x", labelsize=9.5)
    axes.grid(axis="x", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    direction = "more is better" if metric["higher_is_better"] else "less is better"
    axes.set_xlabel(f"{metric['name']}\n({direction})")
    axes.set_title(title)


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
    colour, marker = colour_of(row["arm"]), marker_of(row["arm"])
    peak = _mean_peak(row, metric)
    if peak is not None and limits[0] <= peak <= limits[1]:
        axes.plot(peak, y, marker, mfc="none", mec=colour, markersize=6.5, alpha=0.8)
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
    axes.errorbar(mean.value, y, xerr=error, fmt=marker, color=colour, ms=5, lw=1.6, capsize=2, label=row["label"])


def _write_at_edge(axes: Axes, y: int, words: str, left: bool, limits: tuple[float, float]) -> None:
    if left:
        axes.text(limits[0], y, f" ◂ {words}", va="center", ha="left", fontsize=SMALL, color=INK)
    else:
        axes.text(limits[1], y, f"{words} ▸ ", va="center", ha="right", fontsize=SMALL, color=INK)


def _draw_references(axes: Axes, study: StoredStudy, limits: tuple[float, float]) -> None:
    tuned, name = reading.find_row(study, ADAMW), reading.primary(study)["name"]
    if tuned is None:
        return
    for values, line in ((reading.final(tuned, name), "-"), (reading.oracle(study), ":")):
        mean = math.fsum(values) / len(values)
        if math.isfinite(mean) and limits[0] <= mean <= limits[1]:
            axes.axvline(mean, color=FAINT, linewidth=1.3, linestyle=line, zorder=1)


def legend_handles() -> list[Line2D]:
    """What lines, hollow markers and bold names mean; the colours are those of the names."""
    last = Line2D([], [], color=FAINT, label="tuned AdamW, last step")
    best = Line2D([], [], color=FAINT, linestyle=":", label="tuned AdamW, best checkpoint")
    hollow = Line2D([], [], color=FAINT, marker="o", mfc="none", linestyle="none", label="hollow: best step")
    bold = Line2D([], [], linestyle="none", label="bold: given, not tuned")
    return [last, best, hollow, bold]
