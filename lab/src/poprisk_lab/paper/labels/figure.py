"""The figure of wrong labels on real images, drawn from a saved result of ``labels`` or ``cifar``."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk._core.statistics import mean_over_seeds
from poprisk.errors import MissingExtraError
from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredRow, StoredStudy
from poprisk_lab.figure_style import BEST_GATE, PALE, STYLE, WIDTH, colour_of, marker_of
from poprisk_lab.pages.comparison import ADAMW, DEFAULTS, DEFAULTS_LABEL, best_gate
from poprisk_lab.pages.seed_curves import draw_seeds, mean_and_range
from poprisk_lab.paper.labels.numbers import ACCURACY, ADAMW_GIVEN, data_and_share

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of wrong labels") from None

Saved = Mapping[str, Any]
_SHOWN_SHARE = 0.4  # the learning curves are those of the share nearest to this
_BEST = "AdamW, best checkpoint (chosen on the test set)"
_GATE = "best of the gates searched, tuned"


def _look(arm: str, line: str) -> dict[str, Any]:
    return {"color": colour_of(arm), "marker": marker_of(arm), "linestyle": line}


_LOOKS: dict[str, dict[str, Any]] = {
    ADAMW_GIVEN: _look(ADAMW, "--"),
    "AdamW tuned": _look(ADAMW, "-"),
    _BEST: _look(ADAMW, ":"),
    _GATE: _look(BEST_GATE, "-."),
    DEFAULTS_LABEL: _look(DEFAULTS, "-"),
}


def draw(saved: Saved) -> Figure:
    """For each data set the last step against the share of wrong labels, and learning curves near 40% wrong.

    ``AdamW tuned`` is tuned for its last step. Its best checkpoint, of another tuning, takes the test set to find: it
    is what the last step of the others is held against. The gate shown ended best of all searched on the tuning seeds.
    Bars are standard errors over the report seeds, bands their range.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "labels")`` gives, or the same of ``cifar``.
    """
    groups: dict[str, list[StoredStudy]] = {}
    for study in saved["result"]["studies"].values():
        groups.setdefault(data_and_share(study)[0], []).append(study)
    with matplotlib.rc_context(STYLE):
        alone = len(groups) == 1  # side by side then, not one above the other
        figure = Figure(figsize=(WIDTH, 4.4) if alone else (max(WIDTH, 4.8 * len(groups)), 7.6), layout="constrained")
        panels = figure.subplots(1 if alone else 2, max(2, len(groups)), squeeze=False).reshape(2, -1)
        for (name, studies), ends, curves in zip(groups.items(), *panels, strict=True):
            _draw_ends(ends, name, sorted(studies, key=lambda study: data_and_share(study)[1]))
            _draw_curves(curves, name, min(studies, key=lambda study: abs(data_and_share(study)[1] - _SHOWN_SHARE)))
        there = {words for words in _LOOKS for study in saved["result"]["studies"].values() if _row(study, words)}
        figure.legend(handles=_legend(there), loc="outside lower center", ncols=3)
    return figure


def _draw_ends(axes: Axes, name: str, studies: Sequence[StoredStudy]) -> None:
    shares = [data_and_share(study)[1] for study in studies]
    for words, look in _LOOKS.items():
        points = [(x, y) for x, study in zip(shares, studies, strict=True) if (y := _end(study, words)) is not None]
        means = [(x, mean_over_seeds(values)) for x, values in points if all(math.isfinite(v) for v in values)]
        axes.errorbar(
            [100 * x for x, _ in means],
            [100 * mean.value for _, mean in means],
            yerr=[100 * (mean.standard_error or 0.0) for _, mean in means],
            markersize=5.5,
            mfc="none" if words == _BEST else look["color"],
            linewidth=1.6,
            capsize=2,
            **look,
        )
    axes.set_title(f"{name[0].upper()}{name[1:]}: last step")
    axes.set_xlabel("wrong training labels (%)")
    axes.set_ylabel("test accuracy (%)")
    axes.set_xticks([100 * share for share in shares], [f"{100 * share:.0f}" for share in shares])
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def _end(study: StoredStudy, words: str) -> list[float] | None:
    """Each seed's last step; of the one tuned for its best checkpoint, that checkpoint."""
    row = _row(study, words)
    if row is None:
        return None
    return reading.best(row, ACCURACY, higher_is_better=True) if words == _BEST else reading.final(row, ACCURACY)


def _row(study: StoredStudy, words: str) -> StoredRow | None:
    if words == _GATE:
        return best_gate(study)
    if words == _BEST:
        return reading.find_row(study, ADAMW, "best")
    return reading.find_row(study, ADAMW if words == "AdamW tuned" else words)


def _draw_curves(axes: Axes, name: str, study: StoredStudy) -> None:
    """Means over the seeds with their range; a hollow marker at the best step of the mean, a full one at the last."""
    steps, share = study["evaluation_steps"], data_and_share(study)[1]
    late: list[float] = []
    for words, look in _LOOKS.items():
        row = _row(study, words)
        if row is None:
            continue
        curves = [[100 * value for value in values] for values in reading.curve(row, ACCURACY)]
        colour, marker, line = look["color"], look["marker"], look["linestyle"]
        draw_seeds(axes, steps, curves, words, colour, linestyle=line, linewidth=1.8)
        mean = mean_and_range(curves)[0]
        late += [value for value in mean[len(mean) // 2 :] if math.isfinite(value)]
        finite = [i for i, value in enumerate(mean) if math.isfinite(value)]
        if finite:
            top = max(finite, key=lambda i, m=mean: m[i])
            axes.plot(steps[top], mean[top], marker, mfc="white", mec=colour, markersize=7)
            axes.plot(steps[finite[-1]], mean[finite[-1]], marker, color=colour, markersize=5.5, clip_on=False)
    if late:  # the climb from chance would leave no room for what differs at the end
        span = max(max(late) - min(late), 1.0)
        axes.set_ylim(max(0.0, min(late) - span), max(late) + 0.5 * span)
    axes.set_title(f"{name[0].upper()}{name[1:]}: learning curves, " + (f"{share:.0%} wrong" if share else "clean"))
    axes.set_xlabel("step (hollow: best, full: last)")
    axes.set_ylabel("test accuracy (%)")
    axes.grid(axis="y", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def _legend(there: set[str]) -> list[Line2D]:
    return [
        Line2D([], [], mfc="none" if words == _BEST else look["color"], label=words, **look)
        for words, look in _LOOKS.items()
        if words in there
    ]
