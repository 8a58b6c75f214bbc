"""The figure of the Lorenz study, from its saved result: the four panels of the paper's figure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.engine.reading import StoredRow, StoredStudy, best, curve, final, find_row, row
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SKY, STYLE
from poprisk_lab.pages.comparison import (
    best_gate,
)
from poprisk_lab.pages.gate_choice import tuned_gate_words
from poprisk_lab.pages.seed_curves import draw_seeds
from poprisk_lab.paper.lorenz.numbers import noise_levels, reference_study
from poprisk_lab.paper.lorenz.study import DEFAULTS, PAPER_RULE, SHARED_ADAMW, SNR
from poprisk_lab.paper.lorenz.task import HELD_OUT, VALID_TIME

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the Lorenz figure") from None

Saved = Mapping[str, Any]
_MSE, _TIME = HELD_OUT.name, VALID_TIME.name
_GIVEN = {SHARED_ADAMW: BLUE, PAPER_RULE: ORANGE, SNR: GREEN, DEFAULTS: SKY}
_TUNED_ADAMW = "AdamW, tuned"


def draw(saved: Saved) -> Figure:
    """Held-out error along training, best against final, final across noise levels, and roll-outs in the x-z plane.

    Curves and bars are means over the seeds; bands are the range of the seeds, dots the seeds themselves.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "lorenz")`` gives.
    """
    study, noise = reference_study(saved), saved["config"]["reference"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.8, 8.4), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(1.25, 1))
        above, below = parts
        curves, bars = above.subplots(1, 2, width_ratios=(1, 1.1))
        levels, *planes = below.subplots(1, 4, width_ratios=(1.9, 1, 1, 1))
        _draw_curves(curves, study, f"A  Held-out error, noise {noise:g}")
        _draw_best_and_final(bars, study, f"B  Best and final, noise {noise:g}")
        _draw_levels(levels, saved)
        _draw_planes(planes, study)
    return figure


def _rows(study: StoredStudy) -> dict[str, tuple[StoredRow, str]]:
    """What is drawn: the given rows and the tuned ones, by their words, with a colour each."""
    found = {label: (row(study, label), colour) for label, colour in _GIVEN.items()}
    tuned, gate = find_row(study, "adamw"), best_gate(study)
    if tuned is not None:
        found[_TUNED_ADAMW] = (tuned, INK)
    if gate is not None:
        found[tuned_gate_words(study)] = (gate, PURPLE)
    return found


def _draw_curves(axes: Axes, study: StoredStudy, title: str) -> None:
    for words, (each, colour) in _rows(study).items():
        line = "-" if words in _GIVEN else "--"
        draw_seeds(axes, study["evaluation_steps"], curve(each, _MSE), words, colour, linestyle=line, linewidth=1.8)
    axes.set_yscale("log")
    axes.set_xlim(0, study["task"]["steps"])
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.55)  # the legend's place
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("one-step MSE on true states")
    axes.legend(loc="upper right", ncols=1)


def _draw_best_and_final(axes: Axes, study: StoredStudy, title: str) -> None:
    """Two bars a row, with a dot a seed; the line is the best checkpoint of the AdamW with shared hyper-parameters."""
    rows = _rows(study)
    for place, (each, colour) in enumerate(reversed(rows.values())):
        for offset, values, alpha in ((0.2, best(each, _MSE, False), 0.4), (-0.2, final(each, _MSE), 1.0)):
            mean = math.fsum(values) / len(values)
            if math.isnan(mean):
                axes.text(0.02, place + offset, "diverged", transform=axes.get_yaxis_transform(), va="center")
                continue
            axes.barh(place + offset, mean, height=0.38, color=colour, alpha=alpha)
            axes.plot(values, [place + offset] * len(values), ".", color=INK, markersize=3)
    checkpoint = best(rows[SHARED_ADAMW][0], _MSE, False)
    axes.axvline(math.fsum(checkpoint) / len(checkpoint), color=BLUE, linestyle=":", linewidth=1.3)
    axes.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=8.5)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:.1g}")
    axes.set_title(title)
    axes.set_xlabel(f"one-step MSE; pale: best step, full: last step\ndotted: best checkpoint of {SHARED_ADAMW}")


def _draw_levels(axes: Axes, saved: Saved) -> None:
    levels = noise_levels(saved)
    for words, (_, colour) in _rows(levels[0][1]).items():
        shown = [(noise, _rows(study).get(words)) for noise, study in levels]
        points = [(noise, final(found[0], _MSE)) for noise, found in shown if found is not None]
        means = [math.fsum(values) / len(values) for _, values in points]
        line = "-" if words in _GIVEN else "--"
        axes.plot([noise for noise, _ in points], means, line, marker="o", markersize=4, color=colour)
    axes.set_yscale("log")
    axes.set_title("C  Final error across noise")
    axes.set_xlabel("sensor noise (standard deviations)")
    axes.set_ylabel("final one-step MSE")


def _draw_planes(planes: Sequence[Axes], study: StoredStudy) -> None:
    """Roll-outs from one true state, the truth from there behind them in grey."""
    shown = {"AdamW": SHARED_ADAMW, "paper's rule": PAPER_RULE, "PopRiskAdamW": DEFAULTS}
    for axes, (words, label) in zip(planes, shown.items(), strict=True):
        portrait = study["portraits"][label]
        for states, colour, width in ((portrait["truth"], FAINT, 0.5), (portrait["rollout"], _GIVEN[label], 0.8)):
            axes.plot([state[0] for state in states], [state[2] for state in states], color=colour, linewidth=width)
        axes.set_xlim(-25, 25)
        axes.set_ylim(-5, 55)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(words)
    planes[0].set_title("D  Roll-outs, x against z (grey: truth)")
