"""The learning-rate guide's figure, drawn from its saved result."""

from collections.abc import Mapping
from typing import Any

from poprisk.cli._demonstration.summary import format_lr
from poprisk.errors import MissingExtraError
from poprisk.optim._learning_rate import FACTOR
from poprisk_lab.direct_labels import Point, along, label_points
from poprisk_lab.figure_style import FAINT, PALE, SMALL, STYLE, WIDTH, colour_of, marker_of
from poprisk_lab.paper.learning_rate.factors import ADAMW, Rows, cells_of, reference_lr, tasks_of

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the learning-rate guide's figure") from None

_LINES: dict[str, tuple[str, str]] = {
    ADAMW: ("AdamW", "adamw"),
    "default": ("PopRiskAdamW, defaults", "defaults"),
    "soft": ("Algorithm 1 (soft, α = 1)", "soft"),
    "calibrated": ('soft, alpha="calibrated"', "soft_calibrated"),
    "snr": ("SNR, strength 1", "snr"),
}
"""Words and arm of each optimizer in the stored result."""


def draw(saved: Mapping[str, Any]) -> Figure:
    """The last step of every optimizer against its learning rate in units of AdamW's best, one panel for each task.

    The first task has the large panel, in which the lines have their names; the others have the same colours.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "learning_rate_guide")`` gives.
    """
    rows: Rows = saved["result"]["summary"]
    first, *others = tasks_of(rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
        grid = figure.add_gridspec(max(1, len(others)), 2 if others else 1, width_ratios=(1.35, 1) if others else None)
        large = figure.add_subplot(grid[:, 0])
        _draw_task(large, rows, first)
        for place, task in enumerate(others):
            axes = figure.add_subplot(grid[place, 1])
            _draw_task(axes, rows, task)
        figure.draw_without_rendering()
        _name_lines(large, rows, first)
    return figure


def _draw_task(axes: Axes, rows: Rows, task: str) -> None:
    reference = reference_lr(rows, task)
    for optimizer, (label, arm) in _LINES.items():
        cells = cells_of(rows, task, optimizer)
        if not cells:
            continue
        ratios = [lr / reference for lr in cells]
        values = [row["last"]["value"] for row in cells.values()]
        errors = [row["last"]["standard_error"] or 0.0 for row in cells.values()]
        style = {"color": colour_of(arm), "marker": marker_of(arm), "markersize": 5, "linewidth": 1.8, "capsize": 2.5}
        axes.errorbar(ratios, values, errors, label=label, **style)
    axes.set_xscale("log")
    _mark_factors(axes)
    is_loss = next(iter(cells_of(rows, task, ADAMW).values()))["metric"] == "loss"
    if is_loss:
        axes.invert_yaxis()  # better is up in every panel
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f}%"))
    axes.set_title(task[0].upper() + task[1:], pad=17)
    axes.set_ylabel("held-out loss\n(upside down)" if is_loss else "test accuracy, last step")
    axes.set_xlabel(f"lr / AdamW's best lr ({format_lr(reference)})")
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def _name_lines(axes: Axes, rows: Rows, task: str) -> None:
    """Each name beside the stretch of its line that is furthest from the others."""
    reference = reference_lr(rows, task)
    names, drawn = [], []
    for optimizer, (label, arm) in _LINES.items():
        cells = cells_of(rows, task, optimizer)
        points = [(lr / reference, row["last"]["value"]) for lr, row in cells.items()]
        if points:
            words = label.replace(" (", "\n(") if "(" in label else label.replace(", ", ",\n")
            names.append(Point(words, points, colour_of(arm)))
            drawn += along(axes, points)
            for (ratio, value), row in zip(points, cells.values(), strict=True):
                error = row["last"]["standard_error"] or 0.0
                drawn += along(axes, [(ratio, value - error), (ratio, value + error)])
    label_points(axes, names, drawn)


def _mark_factors(axes: Axes) -> None:
    """Where an unchanged learning rate lies, and the one suggested for the defaults."""
    for factor, name in ((1.0, "unchanged"), (FACTOR, "suggested")):
        axes.axvline(factor, color=FAINT, linewidth=1, linestyle=":", zorder=0)
        place: Any = {"xy": (factor, 1.0), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(name, xytext=(0, 3), ha="center", va="bottom", fontsize=SMALL, color=FAINT, **place)
    axes.xaxis.set_major_locator(LogLocator(base=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
