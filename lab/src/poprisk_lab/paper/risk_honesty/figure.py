"""The figure of population risk from one run, drawn from its saved result."""

from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, STYLE

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the population-risk figure") from None

Saved = Mapping[str, Any]
Row = Mapping[str, Any]
_SHOWN = "classes, 40% replaced"
"""The task whose curve is drawn."""


def draw(saved: Saved) -> Figure:
    """Estimated against true risk in every setting, and one task along its training."""
    rows = saved["result"]["rows"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 4.3), layout="constrained")
        scatter, curve = figure.subplots(1, 2)
        _draw_scatter(scatter, rows)
        _draw_curve(curve, rows)
    return figure


def _draw_scatter(axes: Axes, rows: Sequence[Row]) -> None:
    kinds = (("exclusion", "o", BLUE), ("first_order", "^", ORANGE), ("k_fold", "s", GREEN))
    for name, marker, colour in kinds:
        for valid in (False, True):
            found = [(r["truth"], r["estimates"][name]) for r in rows if r["estimates"][name]["valid"] is valid]
            if not found:
                continue
            label = f"{name.replace('_', ' ')}, {'valid' if valid else 'not valid'}"
            fill = {"color": colour} if valid else {"mfc": "none", "mec": colour, "alpha": 0.55}
            points = [t for t, _ in found], [e["value"] for _, e in found]
            axes.loglog(*points, marker, linestyle="none", markersize=4.5 if valid else 5, label=label, **fill)
    truths = [row["truth"] for row in rows]
    ends = [min(truths), max(truths)]
    axes.plot(ends, ends, color=INK, linewidth=1, zorder=0)
    axes.set_title(f"A  {len(rows)} settings")
    axes.set_xlabel("true risk, large test set (loss)")
    axes.set_ylabel("estimated risk (loss)")
    lowest = min(row["estimates"]["first_order"]["value"] for row in rows)
    axes.set_ylim(bottom=0.6 * lowest, top=60 * max(truths))  # room for the legend
    axes.legend(loc="upper left", handletextpad=0.1, fontsize=8.5, ncols=2, columnspacing=0.8)


def _draw_curve(axes: Axes, rows: Sequence[Row]) -> None:
    tasks = [row["task"] for row in rows]
    task = _SHOWN if _SHOWN in tasks else tasks[0]
    moments = [row for row in rows if row["task"] == task and row["seed"] == rows[0]["seed"]]
    steps = [row["step"] for row in moments]
    axes.plot(steps, [row["training_loss"] for row in moments], "--", color=FAINT, label="training loss")
    axes.plot(steps, [row["truth"] for row in moments], "-", color=INK, linewidth=2, label="true risk")
    for name, marker, colour in (("exclusion", "o", BLUE), ("k_fold", "s", GREEN)):
        found = [(k, row["estimates"][name]) for k, row in zip(steps, moments, strict=True)]
        found = [(k, e) for k, e in found if e["valid"]]
        x, y = [k for k, _ in found], [e["value"] for _, e in found]
        errors = [2 * e["standard_error"] for _, e in found]
        label = f"{name.replace('_', ' ')} ± 2 standard errors, where valid"
        axes.errorbar(x, y, errors, fmt=f"{marker}-", color=colour, markersize=5, capsize=3, label=label)
    first = [row["estimates"]["first_order"]["value"] for row in moments]
    axes.plot(steps, first, "^:", color=ORANGE, markersize=5, label="first order, valid or not")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"B  {task}, one seed")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy" if "classes" in task or "digits" in task else "half squared error")
    axes.legend(loc="lower left")
