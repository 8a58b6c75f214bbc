"""The learning-rate guide's figure, drawn from its saved result."""

from collections.abc import Mapping
from typing import Any

from poprisk.cli._demonstration.summary import format_lr
from poprisk.errors import MissingExtraError
from poprisk.optim._learning_rate import FACTOR
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PALE, PURPLE, STYLE
from poprisk_lab.paper.learning_rate.factors import ADAMW, Rows, cells_of, reference_lr, tasks_of

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the learning-rate guide's figure") from None

# Markers tell the lines apart without colour.
_LINES: dict[str, tuple[str, str, str]] = {
    ADAMW: ("AdamW", INK, "s"),
    "default": ("PopRiskAdamW, defaults", BLUE, "o"),
    "soft": ("Algorithm 1 (soft, α = 1)", PURPLE, "v"),
    "calibrated": ('soft, alpha="calibrated"', ORANGE, "^"),
    "snr": ("SNR, strength 1", GREEN, "D"),
}


def draw(saved: Mapping[str, Any]) -> Figure:
    """The last step of every optimizer against its learning rate in units of AdamW's best, one panel for each task.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "learning_rate_guide")`` gives.
    """
    rows: Rows = saved["result"]["summary"]
    tasks = tasks_of(rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(3.9 * len(tasks), 4.6), layout="constrained")
        panels = figure.subplots(1, len(tasks), squeeze=False, gridspec_kw={"wspace": 0.08})[0]
        for axes, task in zip(panels, tasks, strict=True):
            _draw_task(axes, rows, task)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _draw_task(axes: Axes, rows: Rows, task: str) -> None:
    reference = reference_lr(rows, task)
    for optimizer, (label, colour, marker) in _LINES.items():
        cells = cells_of(rows, task, optimizer)
        if not cells:
            continue
        ratios = [lr / reference for lr in cells]
        values = [row["last"]["value"] for row in cells.values()]
        errors = [row["last"]["standard_error"] or 0.0 for row in cells.values()]
        style = {"color": colour, "marker": marker, "markersize": 5, "linewidth": 1.8, "capsize": 2.5}
        axes.errorbar(ratios, values, errors, label=label, **style)
    axes.set_xscale("log")
    _mark_factors(axes)
    is_loss = next(iter(cells_of(rows, task, ADAMW).values()))["metric"] == "loss"
    if is_loss:
        axes.invert_yaxis()  # better is up in every panel
    else:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f}%"))
    axes.set_title(task[0].upper() + task[1:], pad=18)
    axes.set_ylabel("held-out nats, last step (axis upside down)" if is_loss else "test accuracy, last step")
    axes.set_xlabel(f"lr / AdamW's best lr ({format_lr(reference)})")
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def _mark_factors(axes: Axes) -> None:
    """Where an unchanged learning rate lies, and the one suggested for the defaults."""
    for factor, name in ((1.0, "unchanged"), (FACTOR, "suggested")):
        axes.axvline(factor, color=FAINT, linewidth=1, linestyle=":", zorder=0)
        place: Any = {"xy": (factor, 1.0), "xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate(name, xytext=(0, 3), ha="center", va="bottom", fontsize=9, color=FAINT, **place)
    axes.xaxis.set_major_locator(LogLocator(base=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
