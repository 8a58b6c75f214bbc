"""Predicted against measured seconds, every operation at every size, one panel for each machine."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from poprisk.errors import MissingExtraError
from poprisk_lab.costs.page.tables import GOOD, OPERATIONS, Measured
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PALE, PURPLE, SKY, STYLE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, INK)
_MARKERS = ("o", "s", "^")


def draw_scaling(found: Sequence[Measured]) -> "Figure":
    """The figure of the page.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "report", "a figure") from None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.4 * len(found) + 2.4, 5.2), layout="constrained")
        for place, measured in enumerate(found):
            axes = figure.add_subplot(1, len(found), place + 1)
            _panel(axes, measured)
            if place == 0:
                axes.set_ylabel("predicted, s")
        entries = {label: h for axes in figure.axes for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        ordered = [each.title for each in OPERATIONS.values() if each.title in entries]
        figure.legend([entries[title] for title in ordered], ordered, loc="outside right center")
    return figure


def _panel(axes: Any, measured: Measured) -> None:
    seconds = []
    for name, each in measured.operations.items():
        place = list(OPERATIONS).index(name)
        colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place // len(_COLOURS) % len(_MARKERS)]
        x, y = [point.seconds for point in each.points], [point.predicted for point in each.points]
        axes.plot(x, y, marker, ms=4.5, mfc="none", mec=colour, label=OPERATIONS[name].title)
        axes.plot([each.base.seconds], [each.base.predicted], marker, ms=4.5, color=colour)
        seconds += [*x, *y]
    low, high = min(seconds) / 2, max(seconds) * 2
    axes.fill_between([low, high], [low / GOOD, high / GOOD], [low * GOOD, high * GOOD], color=PALE, lw=0, zorder=0)
    axes.plot([low, high], [low, high], color=FAINT, lw=1, zorder=1)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel="measured, s")
    axes.set_title(measured.machine.name)
    axes.set_aspect("equal")
