"""The figure of the gates on clean text, drawn from the saved result."""

from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.figure_style import BLUE, GREEN, INK, ORANGE, PALE, STYLE

try:
    import matplotlib
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of the gates on clean text") from None

# Markers distinguish the lines without colour.
_LINES: dict[str, tuple[str, str, str]] = {
    "AdamW": ("AdamW", INK, "s"),
    "soft": ("Algorithm 1 (soft, α = 1)", BLUE, "o"),
    "calibrated": ('soft, alpha="calibrated"', ORANGE, "^"),
    "snr": ("SNR, strength 1", GREEN, "D"),
}


def draw(saved: Mapping[str, Any]) -> Figure:
    """The held-out loss after the last step against the learning rate, mean ± standard error over seeds.

    Args:
        saved: Return value of ``poprisk._core.store.load_result(path, "clean_lm")``.
    """
    rows = saved["result"]["summary"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.8), layout="constrained")
        axes = figure.subplots()
        for name, (label, colour, marker) in _LINES.items():
            line = sorted((row for row in rows if row["optimizer"] == name), key=lambda row: row["lr"])
            axes.errorbar(
                [row["lr"] for row in line],
                [row["loss"]["value"] for row in line],
                yerr=[row["loss"]["standard_error"] or 0.0 for row in line],
                label=label,
                color=colour,
                marker=marker,
                markersize=5,
                capsize=2,
            )
        axes.set_xscale("log")
        axes.set_xlabel("learning rate")
        axes.set_ylabel("held-out loss (nats per character)")
        axes.grid(axis="y", color=PALE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.legend()
    return figure
