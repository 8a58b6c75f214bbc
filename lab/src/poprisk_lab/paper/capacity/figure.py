"""The figure of the capacity axis, drawn from its saved result."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, STYLE

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, MaxNLocator
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the capacity figure") from None

Saved = Mapping[str, Any]
_NOISE_STYLES = ((BLUE, "o"), (GREEN, "s"), (PURPLE, "D"), (ORANGE, "^"))


def draw(saved: Saved) -> Figure:
    """Risk along predictive rank and along width, increments, and the error of interpolated noise.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "capacity")`` gives.
    """
    result = saved["result"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 7.8), layout="constrained")
        (ranks, widths), (increments, noise) = figure.subplots(2, 2)
        _draw_ranks(ranks, result["ranks"])
        _draw_widths(widths, result["widths"], saved["config"])
        _draw_increments(increments, result["ranks"])
        _draw_noise(noise, result["noise"], saved["config"])
    return figure


def _draw_risk(axes: Axes, compared: Saved, theory: str) -> None:
    at = compared["capacities"]
    axes.plot(at, compared["theory"], color=BLUE, linewidth=2, label=theory)
    bars = [2 * error for error in compared["standard_error"]]
    label = "simulated fits, ± 2 standard errors"
    axes.errorbar(at, compared["simulated"], bars, fmt="o", color=ORANGE, markersize=4, capsize=2, label=label)
    if compared["peak"] is not None:
        axes.axvline(compared["peak"], ymax=0.72, color=INK, linestyle=":", linewidth=1.2)  # under the legend


def _draw_ranks(axes: Axes, ranks: Saved) -> None:
    _draw_risk(axes, ranks["shown"], r"exact $\mathcal{R}_r$")
    axes.set_title("A1  Risk along predictive rank")
    axes.set_xlabel("predictive rank r")
    axes.set_ylabel("mean squared error to the clean fit")
    low, high = axes.get_ylim()
    axes.set_ylim(0, high + 0.3 * (high - low))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="upper right")
    axes.text(ranks["shown"]["peak"] + 0.2, 0.03, "peak", transform=axes.get_xaxis_transform(), fontsize=9.5)


def _draw_widths(axes: Axes, widths: Saved, config: Saved) -> None:
    _draw_risk(axes, widths["compared"], "exact, misfit and cross term included")
    at = widths["compared"]["capacities"]
    label = r"without them: bias + variance to $\bar{U}_Q$"
    axes.plot(at, widths["without_misfit"], color=PURPLE, linestyle="--", linewidth=1.5, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=1e3 * max(widths["compared"]["theory"]))  # the legend's place
    axes.set_title(f"A2  Risk along width, n = {config['sweep_examples']}")
    axes.set_xlabel("random features")
    axes.set_ylabel("mean squared error to the truth")
    axes.legend(loc="upper left")


def _draw_increments(axes: Axes, ranks: Saved) -> None:
    values, peak = ranks["increments"], ranks["shown"]["peak"]
    index = range(1, len(values) + 1)
    colours = [ORANGE if value > 0 else BLUE for value in values]
    axes.bar(index, values, color=colours, width=0.75)
    for colour, words in ((ORANGE, "noise above signal: risk rises"), (BLUE, "signal above noise: risk falls")):
        axes.bar([0], [0], color=colour, label=words)
    axes.axhline(0, color=FAINT, linewidth=1)
    axes.axvline(peak + 0.5, ymax=0.72, color=INK, linestyle=":", linewidth=1.2)
    scale = max(abs(value) for value in values)
    axes.set_yscale("symlog", linthresh=scale / 1e3, linscale=0.5)
    decades = [10.0**k for k in range(math.ceil(math.log10(scale / 1e3)), math.floor(math.log10(scale)) + 1)]
    axes.yaxis.set_major_locator(FixedLocator([*(-x for x in decades), 0.0, *decades]))
    axes.yaxis.set_minor_locator(FixedLocator([]))
    axes.set_xlim(0, len(values) + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("B  Increments of A1")
    axes.set_xlabel("rank after the step, r + 1")
    axes.set_ylabel(r"$\mathcal{R}_{r+1} - \mathcal{R}_r$")
    axes.legend(loc="upper right")
    axes.set_ylim(-3 * scale, 300 * scale)  # the legend's place
    axes.text(peak + 0.7, 0.03, "peak of A1", transform=axes.get_xaxis_transform(), fontsize=9.5)


def _draw_noise(axes: Axes, studies: Sequence[Saved], config: Saved) -> None:
    shown = [study for study in studies if study["width"] != config["sweep_examples"]]  # the peak is off the scale
    for k, study in enumerate(shown):
        colour, marker = _NOISE_STYLES[k % len(_NOISE_STYLES)]
        line = [variance * study["visibility"] for variance in study["variances"]]
        bars = [2 * error for error in study["standard_error"]]
        label = rf"{study['width']} features: tr $\Gamma_0$/m = {study['visibility']:.2g}"
        axes.plot([0, *study["variances"]], [0, *line], color=colour, linewidth=1.5)
        axes.errorbar(
            study["variances"],
            study["simulated"],
            bars,
            fmt=marker,
            color=colour,
            markersize=4.5,
            capsize=2,
            label=label,
        )
    end = max(shown[0]["variances"])
    axes.plot([0, end], [0, end], color=FAINT, linestyle=":", linewidth=2, label="the noise itself")
    axes.set_xlim(0, 1.05 * end)
    axes.set_ylim(0, 1.4 * max(max(study["simulated"]) for study in shown))  # the legend's place
    axes.set_title(r"C  Pure noise interpolated; lines: $\sigma^2\,\mathrm{tr}\,\Gamma_0$")
    axes.set_xlabel(r"variance of the noise $\sigma^2$")
    axes.set_ylabel("mean squared test error")
    axes.legend(loc="upper left", ncols=1, labelspacing=0.25)
