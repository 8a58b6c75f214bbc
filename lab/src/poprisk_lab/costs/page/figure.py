"""Predicted over measured seconds of every operation at every size, one panel for each machine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from poprisk.errors import MissingExtraError
from poprisk_lab.costs.page.tables import GOOD, OPERATIONS, Measured
from poprisk_lab.costs.page.words import duration
from poprisk_lab.figure_style import FAINT, INK, PALE, SHADE, SLATE, SMALL, STYLE, WIDTH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10)


def draw_scaling(found: Sequence[Measured]) -> "Figure":
    """The figure of the page: a row for each operation, a point for each size, full at the size the model was fitted.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "a figure") from None
    rows = [name for name in OPERATIONS if any(name in measured.operations for measured in found)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.3 + 0.3 * len(rows)), layout="constrained")
        panels = figure.subplots(1, len(found), squeeze=False, sharex=True, sharey=True)[0]
        for axes, measured in zip(panels, found, strict=True):
            _panel(axes, measured, rows)
        panels[0].set_yticks(range(len(rows)), [OPERATIONS[name].title for name in rows], fontsize=9.5)
        panels[0].set_ylim(len(rows) - 0.4, -0.6)
        ratios = [p.ratio for measured in found for each in measured.operations.values() for p in each.points]
        widest = 1.3 * max(GOOD, *ratios, *(1 / ratio for ratio in ratios))
        panels[0].set_xlim(1 / widest, widest)
        shown = [tick for tick in _TICKS if 1 / widest < tick < widest]
        panels[0].set_xticks(shown, [f"{tick:g}" for tick in shown])
    return figure


def _panel(axes: Any, measured: Measured, rows: Sequence[str]) -> None:
    axes.axvspan(1 / GOOD, GOOD, color=SHADE, linewidth=0, zorder=0)
    axes.axvline(1, color=FAINT, linewidth=1, zorder=1)
    for place, name in enumerate(rows):
        each = measured.operations.get(name)
        if each is None:
            continue
        ratios = [point.ratio for point in each.points]
        axes.plot(ratios, [place] * len(ratios), "o", markersize=5.5, mfc="none", mec=SLATE)
        axes.plot(each.base.ratio, place, "o", markersize=5.5, color=SLATE)
        seconds = [point.seconds for point in (each.base, *each.points)]
        words = f"{duration(min(seconds))} to {duration(max(seconds))}"
        axes.annotate(
            words,
            (1, place),
            (4, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color=INK,
        )
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="both", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_title(measured.machine.name)
    axes.set_xlabel("predicted ÷ measured (right: times measured)", fontsize=9.5)
