"""The figure of the character language model, from its saved result."""

from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.direct_labels import End, label_ends
from poprisk_lab.engine import reading
from poprisk_lab.engine.figure import draw_studies, legend_handles, shared_rows
from poprisk_lab.engine.reading import StoredStudy
from poprisk_lab.figure_style import FAINT, SMALL, STYLE, WIDTH, colour_of, text_colour
from poprisk_lab.pages.comparison import ADAMW
from poprisk_lab.pages.seed_curves import draw_seeds, mean_and_range
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
_CURVES = (ADAMW, ADAMW_INHERITED, DEFAULTS, "soft", PAPER_INHERITED, SNR_INHERITED, CALIBRATED_INHERITED)


def draw(saved: Saved) -> Figure:
    """For each text: held-out loss along the way, and the last step of every optimizer.

    Dashed lines are settings that were given, solid ones were tuned or are the defaults.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "char_language")`` gives.
    """
    studies = list(saved["result"]["studies"].values())
    count = len(studies)
    with matplotlib.rc_context(STYLE):
        rows = 0.24 * len(shared_rows(studies)) + 1.2
        figure = Figure(figsize=(WIDTH, 4.2 + rows), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(3.8, rows))
        above, below = halves
        curves = above.subplots(1, count, squeeze=False, sharey=True)[0]
        for i, (axes, study) in enumerate(zip(curves, studies, strict=True)):
            _draw_curves(axes, study, f"{'ABCD'[i]}  Held-out loss, {_title(study)}", named=i == count - 1)
        curves[0].set_ylabel("held-out loss (nats per character)")
        titles = [f"{'ABCDEFGH'[count + i]}  Last step, {_title(study)}" for i, study in enumerate(studies)]
        draw_studies(below.subplots(1, count, squeeze=False, sharey=True)[0], studies, titles)
        figure.legend(handles=legend_handles(), loc="outside lower center", ncols=4, handletextpad=0.4)
    return figure


def _title(study: StoredStudy) -> str:
    noise = study["task"]["config"]["noise"]
    return f"{noise:.0%} wrong targets" if noise else "clean text"


def _draw_curves(axes: Axes, study: StoredStudy, title: str, *, named: bool) -> None:
    steps = study["evaluation_steps"]
    ends = []
    for name in _CURVES:
        row = reading.find_row(study, name)
        if row is None:
            continue
        colour, line = colour_of(row["arm"]), "-" if row["chosen_for"] or name == DEFAULTS else "--"
        curves = reading.curve(row, HELD_OUT)
        draw_seeds(axes, steps, curves, row["label"], colour, linestyle=line, linewidth=2)
        words = f"{row['label']}, tuned" if row["chosen_for"] else row["label"].replace(" at ", "\nat ")
        ends.append(End(words, mean_and_range(curves)[0][-1], colour, line))
    target = reading.primary(study)["target"]
    if target is not None:
        axes.axhline(target, color=FAINT, linewidth=0.8, linestyle=":", zorder=0)
        axes.text(0.01 * steps[-1], target, f"target {target:g}", color=text_colour(FAINT), fontsize=SMALL, va="top")
    axes.set_title(title)
    seeds = len(study["rows"][0]["seeds"])
    axes.set_xlabel("step" if seeds == 1 else f"step (mean and range of {seeds} seeds)")
    axes.set_xlim(0, steps[-1])
    axes.locator_params(axis="x", nbins=5)
    if named:
        label_ends(axes, ends)
