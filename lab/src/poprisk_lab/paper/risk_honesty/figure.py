"""The figure of population risk from one run, drawn from its saved result."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SKY, STYLE
from poprisk_lab.paper.risk_honesty.judging import is_wrong, truth_of
from poprisk_lab.paper.risk_honesty.numbers import shown_split

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the population-risk figure") from None

Saved = Mapping[str, Any]
Setting = Mapping[str, Any]
_ONE_RUN = (
    ("exclusion", "exclusion", "o", BLUE),
    ("first_order", "first order", "^", ORANGE),
    ("leverage", "leverage", "D", PURPLE),
    ("held_back", "held-back block", "P", SKY),
)
_TRAINED = (("k_fold", "10-fold", "s", GREEN),)
_WIDEST = 30.0
"""Estimates further than this factor from the truth are drawn at the edge."""


def draw(saved: Saved) -> Figure:
    """Estimated over true risk against the true risk: by the run alone, and with ten trainings."""
    settings = shown_split(saved)[1]["settings"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.2, 4.6), layout="constrained")
        one, trained = figure.subplots(1, 2, sharey=True, sharex=True)
        _draw(one, settings, _ONE_RUN, "A  Without folds")
        _draw(trained, settings, _TRAINED, "B  Ten folds")
        one.set_ylabel("estimated ÷ true risk")
        shown = {
            label: line
            for axes in (one, trained)
            for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=3, fontsize=9, handletextpad=0.1)
    return figure


def _draw(axes: Axes, settings: Sequence[Setting], kinds: Sequence[tuple[str, str, str, str]], title: str) -> None:
    for band in (1.2, 1 / 1.2):
        axes.axhline(band, color=FAINT, linewidth=0.8, linestyle=":", zorder=0)
    axes.axhline(1, color=INK, linewidth=1, zorder=0)
    for valid in (False, True):  # what is valid on top
        for name, words, marker, colour in kinds:
            points = _points(settings, name, valid)
            if points:
                fill: dict[str, Any] = {"color": colour} if valid else {"mfc": "none", "mec": colour, "alpha": 0.4}
                label = f"{words}, {'valid' if valid else 'not valid'} ({len(points)})"
                axes.plot(*zip(*points, strict=True), marker, linestyle="none", markersize=4.5, label=label, **fill)
    wrong = [point for name, *_ in kinds for point in _points(settings, name, True, only_wrong=True)]
    if wrong:
        style: dict[str, Any] = {"mfc": "none", "mec": INK, "markersize": 10, "linestyle": "none"}
        axes.plot(*zip(*wrong, strict=True), "o", label="valid and wrong", **style)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1 / _WIDEST / 1.3, _WIDEST * 1.3)
    axes.set_yticks([0.1, 0.5, 1, 2, 10], ["0.1", "0.5", "1", "2", "10"])
    axes.minorticks_off()
    axes.set_title(f"{title}: {len(wrong)} valid and wrong")
    axes.set_xlabel("true risk (loss on fresh data)")


def _points(settings: Sequence[Setting], name: str, valid: bool, only_wrong: bool = False) -> list[tuple[float, float]]:
    found = []
    for setting in settings:
        answer = setting["answers"].get(name)
        if answer is None or answer["valid"] is not valid or answer["value"] is None:
            continue
        truth = truth_of(setting, answer)[0]
        if math.isfinite(truth) and truth > 0 and (not only_wrong or is_wrong(setting, answer)):
            found.append((truth, min(max(answer["value"] / truth, 1 / _WIDEST), _WIDEST)))
    return found
