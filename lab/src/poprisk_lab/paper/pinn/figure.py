"""The figure of the PINN study, from its saved result."""

import math
from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.direct_labels import End, label_ends
from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredRow, StoredStudy
from poprisk_lab.figure_style import FAINT, INK, PALE, SMALL, STYLE, WIDTH, colour_of, text_colour
from poprisk_lab.pages.comparison import DEFAULTS
from poprisk_lab.pages.gate_choice import chosen_gate, tuned_gate_words
from poprisk_lab.pages.seed_curves import mean_and_range
from poprisk_lab.paper.pinn.numbers import ADAMW_ROWS, PAPER, iterations
from poprisk_lab.paper.pinn.study import FULL, NO_WARMUP, adamw_label
from poprisk_lab.paper.pinn.task import ERROR, NOISY, PERIOD

try:
    import matplotlib
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the PINN figure") from None

Saved = Mapping[str, Any]
_LINES: dict[str, Any] = {
    adamw_label(1e-3): ":",
    adamw_label(1e-4): "-",
    adamw_label(5e-5): "--",
    adamw_label(1.5e-5): "-.",
    FULL: "-",
    NO_WARMUP: "--",
}
"""Line styles of what was given: the settings of an optimizer have its colour."""
_TUNED_LINE = (0, (8, 1.5))


def draw(saved: Saved) -> Figure:
    """Error against iterations, iterations to the target, and error fields of the last step.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "pinn")`` gives.
    """
    study = saved["result"]["studies"][NOISY]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 9.6), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=(2.2, 1))
        top, bottom = halves
        curves, bars = top.subplots(2, 1, height_ratios=(1.15, 1))
        _draw_curves(curves, study)
        _draw_iterations(bars, study)
        _draw_fields(bottom, study)
    return figure


def _shown(study: StoredStudy) -> list[tuple[str, StoredRow, Any]]:
    """Words, row and line of everything that is drawn: the paper's rows, the defaults, and two tuned ones."""
    rows: list[tuple[str, StoredRow, Any]] = [
        (label, reading.row(study, label), _LINES[label]) for label in (FULL, NO_WARMUP, *ADAMW_ROWS)
    ]
    rows += [(row["label"], row, "-") for row in reading.rows(study) if row["arm"] == DEFAULTS]
    tuned, gate = _tuned(study), _tuned_gate(study)
    if tuned is not None:
        rows.append((f"{tuned['label']}, tuned", tuned, _TUNED_LINE))
    if gate is not None:
        rows.append((f"{gate['label']},\n{tuned_gate_words(study)}", gate, _TUNED_LINE))
    return rows


def _tuned(study: StoredStudy) -> StoredRow | None:
    questions = ("target", "best", "last")  # the last where none of its trials met the target
    return next((row for q in questions if (row := reading.find_row(study, "adamw", q)) is not None), None)


def _tuned_gate(study: StoredStudy) -> StoredRow | None:
    questions = ("target", "best", "last")
    return next((row for q in questions if (row := chosen_gate(study, q)) is not None), None)


def _draw_curves(axes: Axes, study: StoredStudy) -> None:
    steps, target = study["evaluation_steps"], reading.primary(study)["target"]
    ends = []
    for words, row, line in _shown(study):
        mean, low, high = mean_and_range(reading.curve(row, ERROR))
        colour = colour_of(row["arm"])
        axes.plot(steps, mean, linestyle=line, color=colour, linewidth=1.8, label=row["label"])
        if line == "-":
            axes.fill_between(steps, low, high, color=colour, alpha=0.1, lw=0)
        ends.append(End(words, mean[-1], colour, line))
    axes.axhline(target, color=FAINT, linewidth=1.2, linestyle="-.", zorder=0)
    axes.set_yscale("log")
    limits = axes.get_ylim()
    axes.set_yticks(
        [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0], ["0.01", "0.02", "0.05", "0.1", "0.2", "0.4", "0.7", "1"]
    )
    axes.set_ylim(*limits)
    axes.minorticks_off()
    axes.set_xlim(0, steps[-1])
    axes.set_title(f"A  Error on the grid, mean and range of {len(study['rows'][0]['seeds'])} seeds")
    axes.set_xlabel("iteration")
    axes.set_ylabel(f"relative ℓ2 error (grey: target {target:g})")
    label_ends(axes, ends)


def _draw_iterations(axes: Axes, study: StoredStudy) -> None:
    rows, most = _shown(study), study["task"]["steps"]
    for place, (words, row, _) in enumerate(reversed(rows)):
        middle, reached = iterations(study, row), reading.reached(study, row, ERROR)
        missed, colour = math.isinf(middle), colour_of(row["arm"])
        look: dict[str, Any] = {"color": PALE, "hatch": "///", "edgecolor": FAINT} if missed else {"color": colour}
        axes.barh(place, most if missed else middle, height=0.62, **look)
        note = f"{reached} reached" if missed else f"{middle:,.0f}  ({reached})"
        axes.annotate(note, (most, place), (5, 0), textcoords="offset points", va="center", fontsize=SMALL)
        published = PAPER.get(words)
        if published is not None and published.iterations is not None:
            axes.plot(published.iterations, place, "D", mfc="white", mec=INK, markersize=6)
    axes.set_yticks(range(len(rows)), [words for words, _, _ in reversed(rows)], fontsize=SMALL)
    axes.tick_params(axis="y", length=0)
    for tick, (_, row, _) in zip(axes.get_yticklabels(), reversed(rows), strict=True):
        tick.set_color(text_colour(colour_of(row["arm"])))
    axes.set_xlim(0, most)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_title(f"B  Iterations to {reading.primary(study)['target']:g}, median")
    axes.set_xlabel("iteration")
    keys = [
        Patch(facecolor=PALE, edgecolor=FAINT, hatch="///", label=f"missed in {most:,}"),
        Line2D([], [], marker="D", linestyle="none", mfc="white", mec=INK, label="the paper's"),
    ]
    axes.legend(handles=keys, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderaxespad=0)


def _draw_fields(figure: SubFigure, study: StoredStudy) -> None:
    """On one scale of colours, so that they can be compared; what a study pictured in stored order."""
    stored = {label: study["portraits"][label]["error_field"] for label in _pictured(study)}
    fields = {label: np.array(field, dtype=float) for label, field in stored.items()}  # null, of a diverged run, is NaN
    top = max((float(field.max()) for field in fields.values() if np.isfinite(field).all()), default=1.0)
    panels = figure.subplots(1, len(fields), sharey=True, squeeze=False)[0]
    picture = None
    for axes, letter, (label, field) in zip(panels, "CDEFGH", fields.items(), strict=False):
        extent = (0, PERIOD, 0, 1)
        picture = axes.imshow(field, origin="lower", aspect="auto", extent=extent, cmap="magma", vmin=0, vmax=top)
        axes.set_title(f"{letter}  {label}", fontsize=10)
        axes.set_xticks([0, math.pi, PERIOD], ["0", "π", "2π"])
        axes.set_xlabel("x")
    panels[0].set_ylabel("t")
    if picture is not None:
        seed, speed = study["rows"][0]["seeds"][0], study["task"]["config"]["speed"]
        words = f"|u − sin(x − {speed:g}t)|\nlast step, seed {seed}"
        figure.colorbar(picture, ax=list(panels), label=words, pad=0.01)


def _pictured(study: StoredStudy) -> list[str]:
    """The paper's two first, then whatever else was stored."""
    first = [label for label in (adamw_label(1e-4), FULL) if label in study["portraits"]]
    return first + [label for label in study["portraits"] if label not in first]
