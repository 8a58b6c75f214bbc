"""The demo's figure, drawn from its saved result."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from poprisk.cli._demonstration.summary import format_lr
from poprisk.errors import MissingExtraError

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator
except ImportError:
    raise MissingExtraError("matplotlib", "report,data", "the demo") from None

_INK, _FAINT = "#222222", "#8A8A8A"
# AdamW is black and averaged weights green in every figure of the project (lab/src/poprisk_lab/figure_style.py).
_COLOURS, _LINES = (_INK, _INK, "#009E73"), ("-", "--", "-")
_TEXT_COLOURS = (_INK, _INK, "#008662")  # darker, for text on white
_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def draw_demo(saved: Mapping[str, Any]) -> Figure:
    """Test accuracy over the steps, and accuracy at the end over the learning rate.

    Args:
        saved: The saved result, as loaded by ``load_result(path, "demo")``.
    """
    result, config = saved["result"], saved["config"]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 4.5), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.3, 1))
        _draw_curves(left, result)
        _draw_learning_rates(right, result)
        for axes in (left, right):
            axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
            axes.set_axisbelow(True)
        figure.suptitle(_title(config, result), x=0.012, ha="left", fontsize=10.5)
    return figure


def _title(config: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    share = f"{result['wrong_share']:.0%}"
    data = f"Digits, {share} of the training labels wrong; “memorized”: share of the wrong labels that is reproduced."
    if config["seeds"] == 1:
        return f"{data} One seed."
    return f"{data}\nMean of {config['seeds']} seeds; band: lowest to highest seed; bars: standard error."


def _draw_curves(axes: Axes, result: Mapping[str, Any]) -> None:
    steps, rows = result["evaluation_steps"], result["summary"]["rows"]
    bottom = _lowest(result)
    heights = _moved_apart([row["last"]["value"] for row in rows], gap=0.155 * (1 - bottom))
    for row, colour, line, ink, height in zip(rows, _COLOURS, _LINES, _TEXT_COLOURS, heights, strict=True):
        curve = row["curve"]
        axes.fill_between(steps, curve["low"], curve["high"], color=colour, alpha=0.18, linewidth=0)
        axes.plot(steps, curve["mean"], line, color=colour, linewidth=2.2)
        end = {"xy": (steps[-1], height), "xytext": (7, 0), "textcoords": "offset points"}
        axes.annotate(_curve_label(row), **end, color=ink, va="center", fontsize=9.5)
    axes.set_title("Test accuracy during training")
    axes.set_xlabel("step")
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(bottom, 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f}%"))


def _curve_label(row: Mapping[str, Any]) -> str:
    lines = [row["optimizer"], f"{row['choice']} lr {format_lr(row['lr'])}"]
    if row["memorized"] is not None:
        lines.append(f"memorized {row['memorized']['value']:.0%}")
    return "\n".join(lines)


def _draw_learning_rates(axes: Axes, result: Mapping[str, Any]) -> None:
    places = ((-13, "top"), (13, "bottom"))  # AdamW's label below its curve, the other above
    looks = zip(_COLOURS[::2], _TEXT_COLOURS[::2], places, strict=True)
    for (name, sweep), (colour, ink, (away, side)) in zip(result["sweeps"].items(), looks, strict=True):
        rates, finals = sweep["learning_rates"], result["summary"]["last_by_lr"][name]
        values = [final["value"] for final in finals]
        errors = [final["standard_error"] or 0.0 for final in finals]
        axes.errorbar(rates, values, errors, color=colour, marker="o", markersize=5, linewidth=2, capsize=2.5)
        default = rates.index(sweep["default_lr"])
        axes.plot(rates[default], values[default], "o", markersize=11, mfc="none", mec=colour, mew=1.8)
        end = (rates[-1], values[-1])
        axes.annotate(name, end, (8, away), textcoords="offset points", color=ink, ha="right", va=side, weight="bold")
    best = next(row for row in result["summary"]["rows"] if row["choice"] == "best")
    axes.plot(best["lr"], best["last"]["value"], "D", markersize=7, color=_INK, zorder=5)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title("At the end, by learning rate")
    axes.set_xlabel("learning rate (ring: default, diamond: best)")


def _lowest(result: Mapping[str, Any]) -> float:
    """Lower end of the scale: a little below the lowest accuracy, rounded to five percent."""
    finals = [x["value"] for means in result["summary"]["last_by_lr"].values() for x in means]
    return max(0.0, int(20 * (min(finals) - 0.03)) / 20)


def _moved_apart(heights: list[float], gap: float) -> list[float]:
    """Heights for labels, moved apart if they are too close."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for _ in range(20 * len(heights)):
        for below, above in pairwise(order):
            lacking = max(0.0, gap - (placed[above] - placed[below]))
            placed[below] -= lacking / 2
            placed[above] += lacking / 2
    return placed
