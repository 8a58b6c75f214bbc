"""The figure of the noisy DPO study, from its saved result: the three panels of the paper's figure."""

from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.engine.reading import StoredRow, StoredStudy, curve
from poprisk_lab.figure_style import FAINT, STYLE, WIDTH, colour_of
from poprisk_lab.pages.seed_curves import draw_seeds, mean_and_range
from poprisk_lab.paper.dpo.numbers import TUNED_ADAMW, noisy_study, shown_rows, sustained
from poprisk_lab.paper.dpo.study import DEFAULTS, PAPER_RULE, SHARED_ADAMW, SUGGESTED
from poprisk_lab.paper.dpo.task import ACCURACY, DRIFT

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the DPO figure") from None

Saved = Mapping[str, Any]
_LINES = {SHARED_ADAMW: "-", PAPER_RULE: "-", SUGGESTED: ":", DEFAULTS: "-", TUNED_ADAMW: "--"}
"""Line styles: the settings of an optimizer have its colour. The tuned gate is dashed, as the tuned AdamW is."""


def draw(saved: Saved) -> Figure:
    """Sustained accuracy and reward drift along training, and the one against the other.

    Lines are means over the seeds, bands the range of the seeds, dots the last step.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "dpo")`` gives.
    """
    study = noisy_study(saved)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
        held, drift, phase = figure.subplots(1, 3)
        _draw_held(held, study)
        _draw_drift(drift, study)
        _draw_phase(phase, study)
        handles, labels = held.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def _rows(study: StoredStudy) -> dict[str, tuple[StoredRow, str, str]]:
    """What is drawn, by its words, with colour and line; the tuned gate says which gate it is."""
    found = {}
    for words, each in shown_rows(study).items():
        name = words if words in _LINES else f"{each['label']}, tuned"
        found[name] = (each, colour_of(each["arm"]), _LINES.get(words, "--"))
    return found


def _draw_held(axes: Axes, study: StoredStudy) -> None:
    for words, (each, colour, line) in _rows(study).items():
        held = [sustained(values) for values in curve(each, ACCURACY)]
        draw_seeds(axes, study["evaluation_steps"], held, words, colour, linestyle=line, linewidth=1.8)
    low, high = axes.get_ylim()
    for label, level in ("accuracies 0.55 and 0.60", 0.55), (None, 0.60):
        if low < level < high:
            axes.axhline(level, color=FAINT, linestyle=":", linewidth=1, label=label)
    axes.set_title("A  Sustained accuracy")
    axes.set_xlabel("step")
    axes.set_ylabel("lowest reward accuracy from here on")


def _draw_drift(axes: Axes, study: StoredStudy) -> None:
    for words, (each, colour, line) in _rows(study).items():
        draw_seeds(axes, study["evaluation_steps"], curve(each, DRIFT), words, colour, linestyle=line, linewidth=1.8)
    axes.set_yscale("log")
    axes.set_title("B  Reward drift")
    axes.set_xlabel("step")
    axes.set_ylabel("mean |reward| of an answer")


def _draw_phase(axes: Axes, study: StoredStudy) -> None:
    for each, colour, line in _rows(study).values():
        drift, accuracy = (mean_and_range(curve(each, metric))[0] for metric in (DRIFT, ACCURACY))
        axes.plot(drift, accuracy, color=colour, linestyle=line, linewidth=1.3)
        axes.plot(drift[-1:], accuracy[-1:], "o", color=colour, markersize=6)
    axes.set_xscale("log")
    axes.set_title("C  Accuracy against drift")
    axes.set_xlabel("mean |reward| of an answer")
    axes.set_ylabel("reward accuracy")
