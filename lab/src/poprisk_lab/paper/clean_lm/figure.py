"""The figure of the gates on clean text, drawn from the saved result."""

from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.direct_labels import Point, along, label_points
from poprisk_lab.figure_style import PALE, STYLE, WIDTH, colour_of, marker_of

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of the gates on clean text") from None

_LINES: dict[str, tuple[str, str]] = {
    "AdamW": ("AdamW", "adamw"),
    "soft": ("Algorithm 1 (soft, α = 1)", "soft"),
    "calibrated": ('soft, alpha="calibrated"', "soft_calibrated"),
    "snr": ("SNR, strength 1", "snr"),
}
"""Words and arm of each optimizer in the stored result."""


def draw(saved: Mapping[str, Any]) -> Figure:
    """The held-out loss after the last step against the learning rate, mean ± standard error over seeds.

    Args:
        saved: Return value of ``poprisk._core.store.load_result(path, "clean_lm")``.
    """
    rows = saved["result"]["summary"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        axes = figure.subplots()
        drawn: list[tuple[str, str, list[tuple[float, float]]]] = []
        for name, (label, arm) in _LINES.items():
            line = sorted((row for row in rows if row["optimizer"] == name), key=lambda row: row["lr"])
            points = [(row["lr"], row["loss"]["value"]) for row in line]
            errors = [row["loss"]["standard_error"] or 0.0 for row in line]
            look: Any = {"color": colour_of(arm), "marker": marker_of(arm), "markersize": 5, "capsize": 2}
            axes.errorbar([x for x, _ in points], [y for _, y in points], yerr=errors, label=label, **look)
            drawn.append((label, arm, points))
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("held-out loss (nats per character)")
        axes.grid(axis="y", color=PALE, linewidth=0.8)
        axes.set_axisbelow(True)
        figure.draw_without_rendering()
        taken = [place for _, _, points in drawn if points for place in along(axes, points)]
        names = [Point(label, points, colour_of(arm)) for label, arm, points in drawn if points]
        label_points(axes, names, taken, size=9.5)
    return figure
