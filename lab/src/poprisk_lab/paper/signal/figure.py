"""The figure of the signal channel, drawn from its saved result."""

from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.figure_style import BLUE, FAINT, INK, ORANGE, PURPLE, STYLE

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the signal figure") from None

Saved = Mapping[str, Any]
_MOONS = ("o", "s")  # markers of the two labels


def draw(saved: Saved) -> Figure:
    """Loss curves, the two spectra, lost test motion against its bound, and the signal channel on the data.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "signal")`` gives; its first seed is drawn.
    """
    run = saved["result"]["runs"][0]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 8.0), layout="constrained")
        (losses, spectra), (lost, data) = figure.subplots(2, 2)
        _draw_losses(losses, run, saved["config"])
        _draw_spectra(spectra, run)
        _draw_lost(lost, run)
        _draw_data(figure, data, run)
    return figure


def _draw_losses(axes: Axes, run: Saved, config: Saved) -> None:
    axes.plot(run["steps"], run["test_losses"], color=ORANGE, linewidth=2, label="test, true labels")
    axes.plot(run["steps"], run["train_losses"], color=BLUE, linewidth=2, linestyle="--", label="training")
    best = min(range(len(run["steps"])), key=lambda i: run["test_losses"][i])
    axes.plot(run["steps"][best], run["test_losses"][best], "v", color=ORANGE, markersize=8, label="lowest test loss")
    axes.set_title(f"A  Losses, {config['noise']:.0%} of labels wrong")
    axes.set_xlabel("step")
    axes.set_ylabel("mean logistic loss")
    axes.set_xlim(0, run["steps"][-1])
    axes.set_ylim(bottom=0, top=1.25 * max(run["test_losses"] + run["train_losses"]))
    axes.legend(loc="upper left")


def _draw_spectra(axes: Axes, run: Saved) -> None:
    for values, rank, colour, line, name in (
        (run["dissipation"], run["dissipation_rank"], BLUE, "--", "$W$"),
        (run["per_complexity"], run["signal_rank"], PURPLE, "-", r"$C_R = R^{-1/2} W R^{-1/2}$"),
    ):
        shown = [x / values[0] for x in values if x > 0]
        label = rf"{name}, $r_{{\mathrm{{eff}}}} = {rank:.1f}$"
        axes.semilogy(range(1, len(shown) + 1), shown, color=colour, linestyle=line, linewidth=2, label=label)
        axes.axvline(rank, color=colour, linestyle=":", linewidth=1.2)
    axes.set_title("B  Dissipation, raw and per complexity")
    axes.set_xlabel("index j, largest first")
    axes.set_ylabel(r"$\lambda_j\ /\ \lambda_1$")
    axes.legend(loc="upper right")


def _draw_lost(axes: Axes, run: Saved) -> None:
    known = [i for i, bound in enumerate(run["bound"]) if bound > 0]
    ranks = [run["ranks"][i] for i in known]
    read = lambda name: [run[name][i] for i in known]  # noqa: E731
    axes.semilogy(ranks, read("bound"), color=INK, linewidth=1.5, label=r"bound $\Vert\Gamma_Q\Vert\,\lambda_{r+1}$")
    axes.semilogy(
        ranks, read("attained"), "o", mfc="none", mec=PURPLE, markersize=5.5, label="worst case, built to attain it"
    )
    axes.semilogy(ranks, read("realized"), "^", color=ORANGE, markersize=3.8, label="this run's own test motion")
    axes.set_title("C  Lost test motion")
    axes.set_xlabel("directions kept, r")
    axes.set_ylabel("lost (output² per gradient² per complexity)")
    axes.legend(loc="upper right")


def _draw_data(figure: Figure, axes: Axes, run: Saved) -> None:
    positive = [x for x in run["energy"] if x > 0]
    scale = LogNorm(min(positive), max(positive))  # a few examples hold most of the energy
    for label, marker in enumerate(_MOONS):
        chosen = [i for i, x in enumerate(run["labels"]) if x == label]
        points = [run["inputs"][i] for i in chosen]
        drawn = axes.scatter(
            [x for x, _ in points],
            [y for _, y in points],
            c=[run["energy"][i] for i in chosen],
            marker=marker,
            cmap="cividis",
            norm=scale,
            s=34,
            edgecolors="none",
            label=f"label {label}",
        )
        if label == 0:
            bar = figure.colorbar(drawn, ax=axes, shrink=0.85)
            bar.set_label(f"energy in the first {run['kept_directions']} directions")
            bar.outline.set_visible(False)  # type: ignore[operator]
    wrong = [point for point, is_wrong in zip(run["inputs"], run["wrong"], strict=True) if is_wrong]
    ring = {"facecolors": "none", "edgecolors": ORANGE, "linewidths": 1.6, "s": 130}
    axes.scatter([x for x, _ in wrong], [y for _, y in wrong], label="wrong label", **ring)
    axes.set_title("D  Signal directions on the data")
    axes.set_xlabel(r"$x_1$")
    axes.set_ylabel(r"$x_2$")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.32 * (high - low))  # the legend's place
    legend = axes.legend(loc="upper center", ncols=3, handletextpad=0.1, columnspacing=0.8)
    for handle in legend.legend_handles[: len(_MOONS)]:
        handle.set_array(None)  # type: ignore[union-attr]  # its colour means nothing here
        handle.set_facecolor(FAINT)  # type: ignore[union-attr]
