"""The demo's figure, drawn from its saved result."""

from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the demo's figure") from None

# Okabe and Ito's colours, told apart with any colour vision.
_COLOURS = ("#D55E00", "#E69F00", "#0072B2")
_INK, _FAINT = "#222222", "#8A8A8A"
_STYLE = {
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
    """Test accuracy over the steps, and at the last step against the learning rate.

    Args:
        saved: What ``poprisk.store.load_result(path, "demo")`` gives.
    """
    result, config = saved["result"], saved["config"]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
        _draw_curves(left, result)
        _draw_learning_rates(right, result)
        left.set_ylabel("test accuracy")
        left.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:.0f}%"))
        seeds = f"{config['seeds']} seed" + ("s" if config["seeds"] > 1 else "")
        figure.suptitle(
            f"Digits, {result['wrong_share']:.0%} of the training labels wrong ({seeds})", x=0.01, ha="left", fontsize=11
        )
    return figure


def _draw_curves(axes: Axes, result: Mapping[str, Any]) -> None:
    steps = result["evaluation_steps"]
    rows = result["summary"]["rows"]
    ends = _spread([row["last"]["value"] for row in rows], _lowest(result))
    for row, colour, end in zip(rows, _COLOURS, ends, strict=True):
        curve = row["curve"]
        axes.fill_between(steps, curve["low"], curve["high"], color=colour, alpha=0.18, linewidth=0)
        axes.plot(steps, curve["mean"], color=colour, linewidth=2.2)
        axes.annotate(
            _curve_label(row), (steps[-1], end), (8, 0), textcoords="offset points", color=colour, va="center", fontsize=9.5
        )
    axes.set_title("Every step of training")
    axes.set_xlabel("step")
    axes.set_xlim(0, steps[-1])
    axes.set_ylim(_lowest(result), 1.0)


def _draw_learning_rates(axes: Axes, result: Mapping[str, Any]) -> None:
    for (name, sweep), colour in zip(result["sweeps"].items(), (_COLOURS[0], _COLOURS[2]), strict=True):
        rates, finals = sweep["learning_rates"], result["summary"]["last_by_lr"][name]
        values = [final["value"] for final in finals]
        errors = [final["standard_error"] or 0.0 for final in finals]
        axes.errorbar(rates, values, errors, color=colour, marker="o", markersize=5, linewidth=2, capsize=2.5)
        default = rates.index(sweep["default_lr"])
        axes.plot(rates[default], values[default], "o", markersize=11, mfc="none", mec=colour, mew=1.8)
        _label_line(axes, name, rates, values, colour)
    axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title("The last step, by learning rate")
    axes.set_xlabel("learning rate (ring: default)")
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.8)
    axes.set_axisbelow(True)


def _label_line(axes: Axes, name: str, rates: list[float], values: list[float], colour: str) -> None:
    """The name beside the line's outer end: AdamW's curve lies to the left, PopRiskAdamW's to the right."""
    first = name == "AdamW"
    point = (rates[0], values[0]) if first else (rates[-1], values[-1])
    axes.annotate(
        name,
        point,
        (2, -16),
        textcoords="offset points",
        color=colour,
        ha="left" if first else "right",
        va="center",
        weight="bold",
    )


def _curve_label(row: Mapping[str, Any]) -> str:
    share = "" if row["memorized"] is None else f"\n{row['memorized']['value']:.0%} memorized"
    return f"{row['label']}{share}"


def _lowest(result: Mapping[str, Any]) -> float:
    """The bottom of the scale: a little under the lowest last step, to the next five percent."""
    finals = [x["value"] for means in result["summary"]["last_by_lr"].values() for x in means]
    return max(0.0, int(20 * (min(finals) - 0.03)) / 20)


def _spread(heights: list[float], bottom: float) -> list[float]:
    """Heights for labels, moved apart as far as two lines of text need."""
    gap = 0.13 * (1.0 - bottom)
    order = sorted(range(len(heights)), key=lambda i: -heights[i])
    placed = list(heights)
    for above, below in zip(order, order[1:], strict=False):
        placed[below] = min(placed[below], placed[above] - gap)
    return placed
