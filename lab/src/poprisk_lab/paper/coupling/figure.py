r"""The figure of train-test coupling under feature learning, drawn from its saved result."""

from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.direct_labels import End, Point, along, label_ends, label_points
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PALE, STYLE, WIDTH
from poprisk_lab.pages.seed_curves import draw_band
from poprisk_lab.paper.coupling.study import FULL_BATCH, MINIBATCH, REPEATED

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the coupling figure") from None

_DRIFT_LINES = {FULL_BATCH: (BLUE, "--"), MINIBATCH: (ORANGE, "-"), REPEATED: (GREEN, ":")}
Saved = Mapping[str, Any]


def draw(saved: Saved) -> Figure:
    """Visibility under dissipation for two cases, predicted against true test displacement, and kernel drift.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "coupling")`` gives.
    """
    result = saved["result"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 7.6), layout="constrained")
        (full, mini), (predicted, drift) = figure.subplots(2, 2)
        _draw_spectra(full, _first(result, FULL_BATCH), "A1  Full batch, repeated inputs")
        _draw_spectra(mini, _first(result, MINIBATCH), "A2  Minibatches, distinct inputs")
        _draw_predictions(predicted, _first(result, MINIBATCH))
        _draw_drift(drift, result["summary"], saved["config"])
        figure.draw_without_rendering()
        for axes, case in ((full, FULL_BATCH), (mini, MINIBATCH)):
            _name_spectra(axes, _first(result, case))
    return figure


def _first(result: Saved, case: str) -> Mapping[str, Any]:
    return next(run for run in result["runs"] if run["case"] == case)


def _draw_spectra(axes: Axes, run: Mapping[str, Any], title: str) -> None:
    """Both spectra of the signal channel; in the reservoir they are 0 to rounding."""
    visible, allowed, signal = run["visible"], run["allowed"], _signal(run)
    index = range(1, signal + 1)
    axes.semilogy(index, allowed[:signal], color=BLUE, linewidth=2)
    axes.semilogy(index, visible[:signal], "o", color=ORANGE, markersize=3.2)
    if run["reservoir_dimension"]:
        axes.axvline(signal + 0.5, color=INK, linestyle="--", linewidth=1.2)
        axes.axvspan(signal + 0.5, len(visible) + 0.5, color=PALE, zorder=0)
        words = f"reservoir: {run['reservoir_dimension']} directions, 0 to rounding"
        place: Any = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "center"}
        axes.text((signal + len(visible) + 1) / 2, 0.5, words, rotation=90, fontsize=9.5, **place)
    axes.set_xlim(0, len(visible) + 0.5)
    axes.set_ylim(bottom=0.1 * min(value for value in visible[:signal] if value > 0), top=10 * allowed[0])
    axes.set_title(title)
    axes.set_xlabel("index j, largest first")
    axes.set_ylabel("eigenvalue (output² per gradient²)")


def _signal(run: Mapping[str, Any]) -> int:
    return len(run["visible"]) - run["reservoir_dimension"]


def _name_spectra(axes: Axes, run: Mapping[str, Any]) -> None:
    kinds = (
        ("allowed", "dissipation,\n" + r"$\Vert\Gamma_Q\Vert\,\lambda_j(W)$", BLUE),
        ("visible", "visibility,\n" + r"$\lambda_j(G^{\mathsf{T}} G)$", ORANGE),
    )
    drawn = {name: [(j, x) for j, x in enumerate(run[name][: _signal(run)], 1) if x > 0] for name, _, _ in kinds}
    names = [
        Point(words, drawn[name][len(drawn[name]) // 3 :: 1 + len(drawn[name]) // 10], colour)
        for name, words, colour in kinds
    ]
    edge = along(axes, [(_signal(run) + 0.5, y) for y in axes.get_ylim()])
    label_points(axes, names, [*(place for places in drawn.values() for place in places), *edge], size=9.5)


def _draw_predictions(axes: Axes, run: Mapping[str, Any]) -> None:
    true = run["test_displacement"]
    ends = [min(true), max(true)]
    axes.plot(ends, ends, color=FAINT, linewidth=1, zorder=0)
    kinds = (
        ("frozen", "initial kernel", {"marker": "^", "color": FAINT, "markersize": 5, "alpha": 0.8}),
        ("coupled", r"$A_\circ(\Delta u_S - s_S) + s_Q$", {"marker": "o", "color": ORANGE, "markersize": 4.5}),
        ("transferred", r"$-G\,g(0) + s_Q$", {"marker": "o", "mfc": "none", "mec": BLUE, "markersize": 8}),
    )
    for name, words, style in kinds:
        label = f"{words}: error {_scientific(run[name]['relative_error'])}"
        axes.plot(true, run[name]["values"], linestyle="none", label=label, **style)
    axes.set_title("B  Test displacement, minibatches")
    axes.set_xlabel(r"true $\Delta u_Q$ (target units)")
    axes.set_ylabel(r"predicted $\Delta u_Q$ (target units)")
    axes.locator_params(nbins=5)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.35 * (high - low))
    axes.legend(loc="upper left", handletextpad=0.2, borderaxespad=0)
    axes.text(0.98, 0.03, "s: sources (weight decay)", transform=axes.transAxes, ha="right", fontsize=9.5)


def _draw_drift(axes: Axes, summary: Sequence[Mapping[str, Any]], config: Saved) -> None:
    ends = []
    for row in summary:
        colour, line = _DRIFT_LINES[row["case"]]
        curve, words = row["drift_curve"], _CASES[row["case"]]
        values = (curve[name] for name in ("steps", "mean", "low", "high"))
        draw_band(axes, *values, label=words, color=colour, linestyle=line, linewidth=2)
        ends.append(End(words.replace(", ", ",\n"), curve["mean"][-1], colour, line))
    axes.set_title("C  Kernel drift" + ("" if config["seeds"] == 1 else f", mean and range of {config['seeds']} seeds"))
    axes.set_xlabel("step")
    axes.set_ylabel(r"$\Vert K_{SS}(t) - K_{SS}(0)\Vert\ /\ \Vert K_{SS}(0)\Vert$")
    axes.set_xlim(0, config["steps"])
    axes.set_ylim(0, 1.05 * max(max(row["drift_curve"]["high"]) for row in summary))
    axes.locator_params(axis="x", nbins=5)
    label_ends(axes, ends)


_CASES = {
    FULL_BATCH: "full batch, repeated inputs",
    MINIBATCH: "minibatches, distinct inputs",
    REPEATED: "minibatches, repeated inputs",
}


def _scientific(value: float) -> str:
    if value >= 1e-3:
        return f"{value:.2f}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return rf"${mantissa}\times 10^{{{int(exponent)}}}$"
