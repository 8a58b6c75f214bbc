"""The figure of the grokking study, from its saved result: accuracy along training and steps to 95%."""

import string
from collections.abc import Mapping, Sequence
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.direct_labels import End, label_ends
from poprisk_lab.engine.reading import curve, find_row, reached, steps_to
from poprisk_lab.figure_style import FAINT, SMALL, STYLE, WIDTH, colour_of
from poprisk_lab.pages.gate_choice import tuned_gate_words
from poprisk_lab.pages.seed_curves import draw_seeds, mean_and_range, thinned
from poprisk_lab.paper.grokking.numbers import DEFAULTS, TEST, TRAIN, best_gate, mean_steps, quickest, target
from poprisk_lab.paper.grokking.study import RULES, SHARED, TUNED, shared_label
from poprisk_lab.paper.grokking.task import TEST_ACCURACY

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the grokking figure") from None

Saved = Mapping[str, Any]
_BREAK = ",\n"
_STRETCHES = 40  # of a curve: accuracies jitter from one measurement to the next


def draw(saved: Saved) -> Figure:
    """Accuracy along training for each shared weight decay and after tuning, and steps to 95% of every optimizer.

    Accuracies are means over 40 stretches of the axis.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "grokking")`` gives.
    """
    studies, decays = saved["result"]["studies"], saved["config"]["weight_decays"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH * max(1.0, len(decays) / 2), 7.6), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(1, 1.05))
        above, below = parts
        panels = [*above.subplots(1, len(decays), squeeze=False)[0], *below.subplots(1, 2)]
        letters = iter(string.ascii_uppercase)
        for decay, axes in zip(decays, panels, strict=False):
            given = {rule: find_row(studies[SHARED], shared_label(rule, decay)) for rule in RULES}
            rows = {rule: each for rule, each in given.items() if each is not None}
            title = f"{next(letters)}  Shared settings, weight decay {decay:g}"
            _draw_accuracy(axes, studies[SHARED], rows, title)
        title = f"{next(letters)}  Each tuned with {saved['config']['trials']} trials"
        _draw_accuracy(panels[-2], studies[TUNED], _tuned_rows(studies[TUNED]), title)
        _draw_steps(panels[-1], studies[TUNED], f"{next(letters)}  Steps to {target(studies[TUNED])}, tuned")
    return figure


def _draw_accuracy(axes: Axes, study: Saved, rows: Saved, title: str) -> None:
    steps = study["evaluation_steps"]
    ends = []
    for name, each in rows.items():
        colour = colour_of(each["arm"])
        at, train = _thinned(steps, curve(each, TRAIN))
        axes.plot(at, mean_and_range(train)[0], color=colour, linewidth=1.2, linestyle=":")
        at, test = _thinned(steps, curve(each, TEST))
        draw_seeds(axes, at, test, each["label"], colour, linewidth=2)
        words = f"{name.replace(', ', _BREAK)}: {reached(study, each, TEST)}"
        ends.append(End(words, mean_and_range(test)[0][-1], colour))
    axes.axhline(TEST_ACCURACY.target or 1, color=FAINT, linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(steps[0], steps[-1])
    axes.set_ylim(-0.01, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_title(title)
    axes.set_xlabel(f"step (k of n: seeds that reach {target(study)}, the grey line)")
    axes.set_ylabel("accuracy (dotted: training)")
    label_ends(axes, ends)


def _thinned(steps: Sequence[int], curves: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    found = [thinned(steps, values, _STRETCHES) for values in curves]
    return found[0][0], [values for _, values in found]


def _tuned_rows(study: Saved) -> dict[str, Any]:
    """AdamW, the best gate, GrokFast and the defaults, as far as they are there."""
    gate = best_gate(study)
    found = {name: quickest(study, name) for name in ("adamw", *([gate] if gate else []), "grokfast", DEFAULTS)}
    return {
        f"{each['label']} ({tuned_gate_words(study)})" if name == gate else each["label"]: each
        for name, each in found.items()
        if each is not None
    }


def _draw_steps(axes: Axes, study: Saved, title: str) -> None:
    """Bars of mean steps to the target; a seed that missed it counts as the whole training, and its bar is hatched."""
    bars = []
    for name in (*study["arms"], DEFAULTS):
        each = quickest(study, name)
        if each is not None:
            bars.append((mean_steps(study, each), None in steps_to(study, each, TEST), each))
    bars.sort(key=lambda bar: bar[0], reverse=True)
    for place, (length, missed, each) in enumerate(bars):
        colour = colour_of(each["arm"])
        face: dict[str, Any] = {"color": "none", "edgecolor": colour, "hatch": "////"} if missed else {"color": colour}
        axes.barh(place, length, height=0.72, **face)
        words = _missed_words(study, each) if missed else f"{length:,.0f}"
        axes.annotate(words, (length, place), (3, 0), textcoords="offset points", va="center", fontsize=SMALL)
    axes.set_yticks(range(len(bars)), [each["label"] for *_, each in bars], fontsize=SMALL)
    axes.set_xlim(0, 1.5 * study["task"]["steps"])
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_title(title)
    axes.set_xlabel("steps, mean over seeds\nhatched: only k of n seeds reached it")
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _missed_words(study: Saved, each: Saved) -> str:
    """How many seeds reached the target, and that none did."""
    none = all(step is None for step in steps_to(study, each, TEST))
    return f"{'not reached, ' if none else ''}{reached(study, each, TEST)}"
