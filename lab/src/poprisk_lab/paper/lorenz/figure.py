"""The figure of the Lorenz study, from its saved result: the four panels of the paper's figure."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.direct_labels import End, label_ends
from poprisk_lab.engine.reading import StoredRow, StoredStudy, best, curve, final, find_row, row
from poprisk_lab.figure_style import BEST_GATE, FAINT, INK, SMALL, STYLE, WIDTH, colour_of, text_colour
from poprisk_lab.pages.comparison import best_gate
from poprisk_lab.pages.gate_choice import tuned_gate_words
from poprisk_lab.pages.seed_curves import draw_seeds, mean_and_range
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
_GIVEN = (SHARED_ADAMW, PAPER_RULE, SNR, DEFAULTS)
_TUNED_ADAMW = "AdamW, tuned"


def draw(saved: Saved) -> Figure:
    """Held-out error along training, best against final, final across noise levels, and roll-outs in the x-z plane.

    Curves and bars are means over the seeds; bands are the range of the seeds, dots the seeds themselves.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "lorenz")`` gives.
    """
    study, noise = reference_study(saved), saved["config"]["reference"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 9.2), layout="constrained")
        parts: Any = figure.subfigures(3, 1, height_ratios=(1, 1.15, 0.9))
        above, middle, below = parts
        curves = above.subplots()
        bars, levels = middle.subplots(1, 2, width_ratios=(1.25, 1))
        planes = below.subplots(1, 3)
        _draw_curves(curves, study, f"A  Held-out error, noise {noise:g}")
        _draw_best_and_final(bars, study, f"B  Best and final, noise {noise:g}")
        _draw_levels(levels, saved)
        _draw_planes(planes, study)
    return figure


def _rows(study: StoredStudy) -> dict[str, StoredRow]:
    """What is drawn: the given rows and the tuned ones, by their words."""
    found = {label: row(study, label) for label in _GIVEN}
    tuned, gate = find_row(study, "adamw"), best_gate(study)
    if tuned is not None:
        found[_TUNED_ADAMW] = tuned
    if gate is not None:
        found[tuned_gate_words(study)] = gate
    return found


def _line(words: str) -> str:
    return "-" if words in _GIVEN else "--"


def _colour(words: str, each: StoredRow) -> str:
    """That of its optimizer; the best gate is another one at each noise level."""
    return colour_of(each["arm"] if words in (*_GIVEN, _TUNED_ADAMW) else BEST_GATE)


def _draw_curves(axes: Axes, study: StoredStudy, title: str) -> None:
    ends = []
    for words, each in _rows(study).items():
        colour, line, curves = _colour(words, each), _line(words), curve(each, _MSE)
        draw_seeds(axes, study["evaluation_steps"], curves, words, colour, linestyle=line, linewidth=1.8)
        ends.append(End(words.replace(" at ", "\nat "), mean_and_range(curves)[0][-1], colour, line))
    axes.set_yscale("log")
    axes.set_xlim(0, study["evaluation_steps"][-1])
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("one-step MSE on true states")
    label_ends(axes, ends)


def _draw_best_and_final(axes: Axes, study: StoredStudy, title: str) -> None:
    """Two bars a row, with a dot a seed; the line is the best checkpoint of the AdamW with shared hyper-parameters."""
    rows = _rows(study)
    for place, (words, each) in enumerate(reversed(rows.items())):
        colour = _colour(words, each)
        for offset, values, alpha in ((0.2, best(each, _MSE, False), 0.4), (-0.2, final(each, _MSE), 1.0)):
            mean = math.fsum(values) / len(values)
            if math.isnan(mean):
                axes.text(0.02, place + offset, "diverged", transform=axes.get_yaxis_transform(), va="center")
                continue
            axes.barh(place + offset, mean, height=0.38, color=colour, alpha=alpha)
            axes.plot(values, [place + offset] * len(values), ".", color=INK, markersize=3)
    checkpoint = best(rows[SHARED_ADAMW], _MSE, False)
    axes.axvline(math.fsum(checkpoint) / len(checkpoint), color=INK, linestyle=":", linewidth=1.3)
    axes.set_yticks(range(len(rows)), list(reversed(rows)), fontsize=SMALL)
    for tick, (words, each) in zip(axes.get_yticklabels(), reversed(rows.items()), strict=True):
        tick.set_color(text_colour(_colour(words, each)))
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter("{x:.1g}")
    axes.set_title(title)
    axes.set_xlabel(
        f"one-step MSE; pale: best step, full: last step;\ndots: seeds; dotted: best checkpoint\nof {SHARED_ADAMW}"
    )


def _draw_levels(axes: Axes, saved: Saved) -> None:
    levels = noise_levels(saved)
    for words, each in _rows(levels[0][1]).items():
        shown = [(noise, _rows(study).get(words)) for noise, study in levels]
        points = [(noise, final(found, _MSE)) for noise, found in shown if found is not None]
        means = [math.fsum(values) / len(values) for _, values in points]
        look: Any = {"marker": "o", "markersize": 4, "color": _colour(words, each)}
        axes.plot([noise for noise, _ in points], means, _line(words), **look)
    axes.locator_params(axis="x", nbins=5)
    axes.set_yscale("log")
    axes.set_title("C  Final error across noise")
    axes.set_xlabel("sensor noise (standard deviations)")
    axes.set_ylabel("final one-step MSE")


def _draw_planes(planes: Sequence[Axes], study: StoredStudy) -> None:
    """Roll-outs from one true state, the truth from there behind them in grey."""
    shown = {"AdamW": SHARED_ADAMW, "paper's rule": PAPER_RULE, "PopRiskAdamW": DEFAULTS}
    for axes, (words, label) in zip(planes, shown.items(), strict=True):
        portrait = study["portraits"][label]
        colour_here = colour_of(row(study, label)["arm"])
        for states, colour, width in ((portrait["truth"], FAINT, 0.5), (portrait["rollout"], colour_here, 0.8)):
            axes.plot([state[0] for state in states], [state[2] for state in states], color=colour, linewidth=width)
        axes.set_xlim(-25, 25)
        axes.set_ylim(-5, 55)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(words)
    planes[0].set_title("D  Roll-outs, x against z (grey: truth)")
