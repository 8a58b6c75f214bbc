"""The figure of the page on knowing at scale."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result
from poprisk.errors import MissingExtraError
from poprisk_lab.at_scale.numbers import CIFAR, LORA
from poprisk_lab.direct_labels import End, label_ends
from poprisk_lab.figure_style import AVERAGED, BLUE, FAINT, INK, ORANGE, STYLE, WIDTH, colour_of

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of knowing at scale") from None

_TITLES = {"worse": "CIFAR-10N worst", "random1": "CIFAR-10N random 1", "aggre": "CIFAR-10N aggregate"}


def draw(results: Path) -> Figure:
    """The risk along each run with the truth, and predicted against measured removals.

    Args:
        results: Folder with the stored results.
    """
    runs = load_result(results / f"{CIFAR}.json", CIFAR)["result"]["runs"]
    place = results / f"{LORA}.json"
    lora = load_result(place, LORA)["result"] if place.exists() else {}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        panels = figure.subplots(1, len(runs) + bool(lora.get("removals")), squeeze=False)[0]
        for axes, (name, run) in zip(panels, runs.items(), strict=False):
            _along(axes, run)
            axes.set_title(_TITLES[name])
        panels[0].set_ylabel("accuracy (%)")
        if runs:
            label_ends(panels[len(runs) - 1], _ends(list(runs.values())[-1]["curve"]))
        if lora.get("removals"):
            _removals(panels[-1], lora["removals"])
    return figure


def _along(axes: Axes, run: Mapping[str, Any]) -> None:
    """Accuracy on held-back and on clean test images, and the moment that was kept."""
    curve, epochs = run["curve"], run["config"]["epochs"]
    at = [row["step"] / run["steps"] * epochs for row in curve]
    shares = [row["accuracy"] for row in curve]
    error = [100 * (x * (1 - x) / run["held"]) ** 0.5 for x in shares]
    held = [100 * x for x in shares]
    axes.fill_between(
        at,
        [x - 2 * e for x, e in zip(held, error, strict=True)],
        [x + 2 * e for x, e in zip(held, error, strict=True)],
        color=BLUE,
        alpha=0.15,
        linewidth=0,
    )
    axes.plot(at, held, color=BLUE)
    axes.plot(at, [100 * row["test_accuracy"] for row in curve], color=colour_of(AVERAGED), linestyle="--")
    axes.plot(at, [100 * row["raw_test_accuracy"] for row in curve], color=FAINT, linestyle=":")
    axes.axvline(run["kept"]["step"] / run["steps"] * epochs, color=INK, linewidth=1)
    axes.set_xlim(0, epochs)
    axes.set_xlabel("passes over the images (line: the moment kept)")


def _ends(curve: list[Mapping[str, Any]]) -> list[End]:
    """The names of the three lines."""
    last = curve[-1]
    return [
        End("average, clean\ntest images", 100 * last["test_accuracy"], colour_of(AVERAGED), "--"),
        End("weights themselves,\nclean test images", 100 * last["raw_test_accuracy"], FAINT, ":"),
        End("average, noisy held-\nback images (band: 2\nstandard errors)", 100 * last["accuracy"], BLUE),
    ]


def _removals(axes: Axes, removals: list[Mapping[str, Any]]) -> None:
    """One point for each query and removal."""
    ends = [x for row in removals for key in ("predicted", "measured") for x in row[key]]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=FAINT, linewidth=1)
    for row in removals:
        random = row["group"].startswith("random")
        marker, colour = ("o", FAINT) if random else ("^", ORANGE) if "helpful" in row["group"] else ("v", BLUE)
        first = random and row["group"] != "random 0"
        label = None if first else "random tenth" if random else row["group"]
        axes.scatter(row["predicted"], row["measured"], s=22, marker=marker, color=colour, label=label)
    axes.set_title("pairs removed, LoRA")
    axes.set_xlabel("predicted change of loss")
    axes.set_ylabel("measured")
    axes.legend(frameon=False, fontsize=8.5)
