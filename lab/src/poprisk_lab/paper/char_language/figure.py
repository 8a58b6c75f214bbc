"""The figure of the character language model, from its saved result."""

import math
from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.engine import reading
from poprisk_lab.engine.figure import draw_study
from poprisk_lab.engine.reading import StoredStudy
from poprisk_lab.figure_style import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, STYLE
from poprisk_lab.pages.comparison import (
    ADAMW,
)
from poprisk_lab.paper.char_language.study import (
    ADAMW_INHERITED,
    CALIBRATED_INHERITED,
    DEFAULTS,
    PAPER_INHERITED,
    SNR_INHERITED,
)
from poprisk_lab.paper.char_language.task import HELD_OUT

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of the language model") from None

Saved = Mapping[str, Any]
_CURVES = {
    ADAMW: (INK, "-"),
    ADAMW_INHERITED: (INK, "--"),
    DEFAULTS: (BLUE, "-"),
    "soft": (SKY, "-"),
    PAPER_INHERITED: (ORANGE, "--"),
    SNR_INHERITED: (GREEN, "--"),
    CALIBRATED_INHERITED: (PURPLE, "--"),
}


def draw(saved: Saved) -> Figure:
    """For each text: held-out loss along the way, and the last step of every optimizer.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "char_language")`` gives.
    """
    studies = saved["result"]["studies"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12.6, 6.9 * len(studies)), layout="constrained")
        panels = figure.subplots(len(studies), 2, squeeze=False)
        for i, (study, (curves, forest)) in enumerate(zip(studies.values(), panels, strict=True)):
            _draw_curves(curves, study, f"{'AC'[i]}  Held-out loss, {_title(study)}")
            draw_study(forest, study, f"{'BD'[i]}  Last step, {_title(study)}")
    return figure


def _title(study: StoredStudy) -> str:
    noise = study["task"]["config"]["noise"]
    return f"{noise:.0%} wrong targets" if noise else "clean text"


def _draw_curves(axes: Axes, study: StoredStudy, title: str) -> None:
    steps = study["evaluation_steps"]
    for name, (colour, line) in _CURVES.items():
        row = reading.find_row(study, name)
        if row is None:
            continue
        columns = list(zip(*reading.curve(row, HELD_OUT), strict=True))
        mean = [math.fsum(values) / len(values) for values in columns]
        axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], color=colour, alpha=0.15, lw=0)
        tuned = f"{row['label']}, tuned" if row["chosen_for"] else row["label"]
        axes.plot(steps, mean, color=colour, linestyle=line, linewidth=2, label=tuned)
    target = reading.primary(study)["target"]
    if target is not None:
        axes.axhline(target, color=INK, linewidth=0.8, linestyle=":", zorder=0)
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss (nats per character)")
    axes.set_xlim(0, steps[-1])
    seeds = len(study["rows"][0]["seeds"])
    range_words = "" if seeds == 1 else f"mean and range of {seeds} seeds"
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, title=range_words, title_fontsize=9.5)
