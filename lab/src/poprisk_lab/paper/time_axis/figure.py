"""The figure of the time axis, drawn from its saved result."""

from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SKY, STYLE
from poprisk_lab.pages.wording import power

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the time figure") from None

Saved = Mapping[str, Any]
_COLOURS = (BLUE, SKY, GREEN, ORANGE, PURPLE)
_MARKERS = "osD^v"


def draw(saved: Saved) -> Figure:
    """Filters of single directions over time, delayed generalization, and transfer mass by mobility.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "time")`` gives; its first seed is drawn.
    """
    run = saved["result"]["runs"][0]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 9.4), layout="constrained")
        filters, accuracy, mass = figure.subplots(3, 1, sharex=True)
        _draw_filters(filters, run, saved["config"])
        _draw_accuracy(accuracy, run)
        _draw_mass(mass, run, saved["config"])
        mass.set_xlabel("time t (learning rate × steps)")
        mass.set_xlim(run["times"][0], run["times"][-1])
    return figure


def _draw_filters(axes: Axes, run: Saved, config: Saved) -> None:
    for k, mode in enumerate(run["modes"]):
        colour = _COLOURS[k % len(_COLOURS)]
        label = rf"$j = {mode['index'] + 1}$, $\sigma^2 = $ {_number(mode['mobility'])}"
        axes.plot(run["times"], mode["flow"], color=colour, linewidth=2, label=label)
        axes.plot(run["times"], mode["decayed"], color=colour, linewidth=1.2, linestyle=":")
        axes.plot(run["times"][::2], mode["measured"][::2], _MARKERS[k % 5], color=colour, markersize=4)
    axes.plot([], [], color=INK, linestyle=":", label=f"with weight decay {power(config['decay'])}")
    axes.plot([], [], "o", color=INK, markersize=4, label="gradient descent, measured")
    axes.set_xscale("log")
    axes.set_ylim(-0.03, 1.08)
    axes.set_title(r"A  Implicit bias: share of singular direction j fitted, $1 - e^{-t\sigma_j^2/n}$")
    axes.set_ylabel("share fitted")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_accuracy(axes: Axes, run: Saved) -> None:
    axes.plot(run["times"], run["train_accuracy"], color=BLUE, linestyle="--", linewidth=2, label="training")
    axes.plot(run["times"], run["predicted_test_accuracy"], color=ORANGE, linewidth=2, label="test, by the filter")
    axes.plot(run["times"][::2], run["test_accuracy"][::2], "o", color=ORANGE, markersize=4, label="test, measured")
    axes.axhline(0.5, color=FAINT, linewidth=1)
    axes.text(run["times"][1], 0.505, "chance", color=FAINT, fontsize=9.5, va="bottom")
    for at, words in ((run["interpolated_at"], "all training\nsigns right"), (run["generalized_at"], "test halfway")):
        if at is not None:
            axes.axvline(at, color=INK, linestyle=":", linewidth=1.2)
            axes.text(at * 1.1, 0.43, words, fontsize=9.5, va="center")
    axes.set_ylim(0.38, 1.03)
    axes.set_title("B  Generalization comes late")
    axes.set_ylabel("accuracy")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_mass(axes: Axes, run: Saved, config: Saved) -> None:
    fast, slow = config["memorizing"], run["rank"] - config["memorizing"]
    axes.loglog(
        run["times"], run["fast_mass"], color=BLUE, linestyle="--", linewidth=2, label=f"{fast} fast directions"
    )
    axes.loglog(run["times"], run["slow_mass"], color=ORANGE, linewidth=2, label=f"{slow} slow directions")
    if run["overtaken_at"] is not None:
        axes.axvline(run["overtaken_at"], color=INK, linestyle=":", linewidth=1.2)
        axes.text(
            run["overtaken_at"] * 1.1, 0.1, "slow\nabove fast", fontsize=9.5, transform=axes.get_xaxis_transform()
        )
    axes.set_ylim(bottom=min(x for x in run["slow_mass"] if x > 0))
    axes.set_title("C  Transfer mass by mobility")
    axes.set_ylabel(r"diagonal of $n^2 M_t\Gamma_0 M_t$, summed")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _number(value: float) -> str:
    return f"{value:.2g}" if value >= 0.01 else power(value)
