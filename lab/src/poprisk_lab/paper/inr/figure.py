"""The figure of the INR study, from its saved result."""

import math
from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.direct_labels import End, label_ends
from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredRow, StoredStudy
from poprisk_lab.figure_style import FAINT, INK, PALE, SMALL, STYLE, WIDTH, colour_of, text_colour
from poprisk_lab.pages.gate_choice import chosen_gate, tuned_gate_words
from poprisk_lab.pages.seed_curves import mean_and_range
from poprisk_lab.paper.inr.numbers import defaults_row, noisy_studies
from poprisk_lab.paper.inr.pixels import unpacked_pixels
from poprisk_lab.paper.inr.study import ADAMW, FASTER, SHARED, SHARED_SNR
from poprisk_lab.paper.inr.task import CLEAN_PSNR

try:
    import matplotlib
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Circle
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the INR figure") from None

Saved = Mapping[str, Any]
_Shown = list[tuple[str, StoredRow, Any]]
"""Words, row and line style."""
_TUNED_LINE = (0, (8, 1.5))


def draw(saved: Saved) -> Figure:
    """PSNR against steps, best against last, residual spectra, and the pictures themselves.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "inr")`` gives.
    """
    studies = noisy_studies(saved)
    image, study = next(iter(studies.items()))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 8.8 + 1.6 * len(studies)), layout="constrained")
        thirds: Any = figure.subfigures(3, 1, height_ratios=(5.9, 2.5, 0.4 + 1.6 * len(studies)))
        curves, ends = thirds[0].subplots(2, 1, height_ratios=(1.35, 1))
        _draw_curves(curves, study, image)
        _draw_ends(ends, study)
        _draw_spectra(thirds[1], study)
        _draw_gallery(thirds[2], studies)
    return figure


def _shown(study: StoredStudy) -> _Shown:
    """The given rows, then AdamW and the gate after equal tuning."""
    rows: _Shown = [
        (ADAMW, reading.row(study, ADAMW), "-"),
        (SHARED, reading.row(study, SHARED), "-"),
        (SHARED_SNR, reading.row(study, SHARED_SNR), "-"),
        (FASTER, reading.row(study, FASTER), "--"),
        (defaults_row(study)["label"], defaults_row(study), "-"),
    ]
    tuned, gate = reading.find_row(study, "adamw"), chosen_gate(study, "last")
    if tuned is not None:
        rows.append((f"{tuned['label']}, tuned", tuned, _TUNED_LINE))
    if gate is not None:
        rows.append((f"{gate['label']},\n{tuned_gate_words(study)}", gate, _TUNED_LINE))
    return rows


def _draw_curves(axes: Axes, study: StoredStudy, image: str) -> None:
    steps = study["evaluation_steps"]
    ends = []
    for words, row, line in _shown(study):
        mean, low, high = mean_and_range(reading.curve(row, CLEAN_PSNR))
        colour = colour_of(row["arm"])
        axes.plot(steps, mean, linestyle=line, color=colour, linewidth=1.8, label=row["label"])
        axes.fill_between(steps, low, high, color=colour, alpha=0.12, lw=0)
        ends.append(End(words, mean[-1], colour, line))
    axes.set_xscale("log")
    axes.set_xlim(steps[0], steps[-1])
    axes.set_title(f"A  {image.capitalize()}: mean and range of {len(study['rows'][0]['seeds'])} seeds")
    axes.set_xlabel("step")
    axes.set_ylabel("PSNR against the\nclean picture (dB)")
    label_ends(axes, ends)


def _draw_ends(axes: Axes, study: StoredStudy) -> None:
    """Best and last joined by a line: its length is what early stopping would have saved."""
    rows = list(reversed(_shown(study)))
    for place, (_, row, _) in enumerate(rows):
        last, best = (_mean(values) for values in (reading.final(row, CLEAN_PSNR), _bests(row)))
        colour = colour_of(row["arm"])
        axes.plot([last, best], [place, place], color=colour, linewidth=2.5, alpha=0.4)
        axes.plot(best, place, "o", mfc="white", mec=colour, mew=1.6, markersize=8)
        axes.plot(last, place, "o", color=colour, markersize=5)
    reference = _mean(_bests(reading.row(study, ADAMW)))
    axes.axvline(reference, color=FAINT, linestyle="--", linewidth=1.1, zorder=0)
    axes.set_yticks(range(len(rows)), [words for words, _, _ in rows], fontsize=SMALL)
    axes.tick_params(axis="y", length=0)
    for tick, (_, row, _) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_color(text_colour(colour_of(row["arm"])))
    axes.grid(axis="x", color=PALE)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_title("B  Best and last step")
    axes.set_xlabel("PSNR against the clean picture (dB), mean over seeds")
    keys = [
        Line2D([], [], marker="o", linestyle="none", mfc="white", mec=INK, mew=1.6, markersize=8, label="best"),
        Line2D([], [], marker="o", linestyle="none", color=INK, markersize=5, label="last"),
        Line2D([], [], color=FAINT, linestyle="--", label=f"best of {ADAMW}"),
    ]
    place: Any = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0}
    axes.legend(handles=keys, ncols=3, handletextpad=0.3, columnspacing=1, **place)


def _draw_spectra(figure: SubFigure, study: StoredStudy) -> None:
    labels = [ADAMW, SHARED, defaults_row(study)["label"]]
    spectra = [np.array(study["portraits"][label]["spectrum"], dtype=float) for label in labels]
    finite = [spectrum for spectrum in spectra if np.isfinite(spectrum).all()]  # null, of a diverged run, is NaN
    high = max((float(spectrum.max()) for spectrum in finite), default=0.0)
    low = max(min((float(spectrum.min()) for spectrum in finite), default=-1.0), high - 6)
    panels = figure.subplots(1, len(labels), sharey=True)
    picture = None
    for axes, letter, label, spectrum in zip(panels, "CDE", labels, spectra, strict=True):
        extent = (-0.5, 0.5, -0.5, 0.5)
        picture = axes.imshow(spectrum, extent=extent, cmap="viridis", vmin=low, vmax=high)
        ring = study["portraits"][label]["ring"]
        axes.add_patch(Circle((0, 0), ring, fill=False, edgecolor="white", linestyle="--", linewidth=1.4))
        axes.set_title(f"{letter}  {label}", fontsize=10)
        axes.set_xticks([-0.5, 0, 0.5])
        axes.set_yticks([-0.5, 0, 0.5])
        axes.set_xlabel("cycles per pixel")
    if picture is not None:
        figure.colorbar(picture, ax=list(panels), label="log₁₀ power\nof the residual", pad=0.01)


def _draw_gallery(figure: SubFigure, studies: Mapping[str, StoredStudy]) -> None:
    """One row a photograph: clean, noisy, and the last step of every row that was pictured."""
    stored = [study["portraits"] for study in studies.values()]
    labels = [label for label in stored[0] if all(label in portraits for portraits in stored)]
    labels.sort(key=lambda label: (label not in (ADAMW, "AdamW"), label != ADAMW))
    panels = figure.subplots(len(studies), 2 + len(labels), squeeze=False)
    for line, study in zip(panels, studies.values(), strict=True):
        seed_place, first = 0, study["portraits"][labels[0]]
        pictures = [(first["clean"], ""), (first["noisy"], "")]
        for label in labels:
            value = reading.final(reading.row(study, label), CLEAN_PSNR)[seed_place]
            pictures.append((study["portraits"][label]["fitted"], f"{value:.2f} dB"))
        for axes, (picture, words) in zip(line, pictures, strict=True):
            axes.imshow(unpacked_pixels(picture), interpolation="nearest")
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            axes.set_xlabel(words, fontsize=9, labelpad=2)
    heads = ["clean", "noisy", *("AdamW, tuned" if label == "AdamW" else label for label in labels)]
    for axes, words in zip(panels[0], heads, strict=True):
        axes.set_title(words.replace(", ", ",\n").replace(" at ", "\nat "), fontsize=9, loc="center")


def _bests(row: StoredRow) -> list[float]:
    return reading.best(row, CLEAN_PSNR, higher_is_better=True)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
