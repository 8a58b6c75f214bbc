"""The figure of the grokking study, from its saved result: accuracy along training and steps to 95%."""

import string
from collections.abc import Mapping
from typing import Any

from poprisk.errors import MissingExtraError
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.reading import curve, find_row, reached, steps_to
from poprisk_lab.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SKY, STYLE
from poprisk_lab.pages.gate_choice import tuned_gate_words
from poprisk_lab.pages.seed_curves import draw_seeds
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
_COLOURS = dict(zip(RULES, (BLUE, ORANGE, GREEN, PURPLE, SKY, INK), strict=True))


def draw(saved: Saved) -> Figure:
    """Accuracy along training for each shared weight decay and after tuning, and steps to 95% of every optimizer.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "grokking")`` gives.
    """
    studies, decays = saved["result"]["studies"], saved["config"]["weight_decays"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(10.8, 4.6 * len(decays)), 9.0), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(1, 1.2))
        above, below = parts
        panels = [*above.subplots(1, len(decays), squeeze=False)[0], *below.subplots(1, 2)]
        letters = iter(string.ascii_uppercase)
        for decay, axes in zip(decays, panels, strict=False):
            given = {rule: find_row(studies[SHARED], shared_label(rule, decay)) for rule in RULES}
            rows = {rule: each for rule, each in given.items() if each is not None}
            title = f"{next(letters)}  Shared settings, weight decay {decay:g}"
            _draw_accuracy(axes, studies[SHARED], rows, _COLOURS, title)
        rows, colours = _tuned_rows(studies[TUNED])
        title = f"{next(letters)}  Each tuned with {saved['config']['trials']} trials"
        _draw_accuracy(panels[-2], studies[TUNED], rows, colours, title)
        _draw_steps(panels[-1], studies[TUNED], f"{next(letters)}  Steps to {target(studies[TUNED])}, tuned")
    return figure


def _draw_accuracy(axes: Axes, study: Saved, rows: Saved, colours: Mapping[str, str], title: str) -> None:
    steps = study["evaluation_steps"]
    for name, each in rows.items():
        label = f"{name}: {reached(study, each, TEST)} reach {target(study)}"
        draw_seeds(axes, steps, curve(each, TEST), label, colours[name], linewidth=2)
        draw_seeds(axes, steps, curve(each, TRAIN), "", colours[name], linewidth=1, linestyle=":", alpha=0.6)
    axes.plot([], [], color=FAINT, linewidth=1, linestyle=":", label="dotted: training accuracy")
    axes.axhline(TEST_ACCURACY.target or 1, color=FAINT, linewidth=0.8, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(steps[0], steps[-1])
    axes.set_ylim(0, 1.55)  # the legend's place
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out accuracy")
    axes.legend(loc="upper left")


def _tuned_rows(study: Saved) -> tuple[dict[str, Any], dict[str, str]]:
    """AdamW, the best gate, GrokFast and the defaults, as far as they are there, and their colours."""
    gate = best_gate(study)
    names = {"adamw": BLUE, **({gate: ORANGE} if gate else {}), "grokfast": GREEN, DEFAULTS: SKY}
    found = {name: quickest(study, name) for name in names}
    words = {
        name: f"{each['label']} ({tuned_gate_words(study)})" if name == gate else each["label"]
        for name, each in found.items()
        if each is not None
    }
    return {words[name]: found[name] for name in words}, {words[name]: names[name] for name in words}


def _draw_steps(axes: Axes, study: Saved, title: str) -> None:
    """Bars of mean steps to the target; a seed that missed it counts as the whole training, and its bar is hatched."""
    bars = []
    for name in (*study["arms"], DEFAULTS):
        each = quickest(study, name)
        if each is not None:
            bars.append((mean_steps(study, each), None in steps_to(study, each, TEST), each))
    bars.sort(key=lambda bar: bar[0], reverse=True)
    for place, (length, missed, each) in enumerate(bars):
        face: dict[str, Any] = (
            {"color": "none", "edgecolor": _family(each), "hatch": "////"} if missed else {"color": _family(each)}
        )
        axes.barh(place, length, height=0.72, **face)
        words = _missed_words(study, each) if missed else f"{length:,.0f}"
        axes.annotate(words, (length, place), (3, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(bars)), [each["label"] for *_, each in bars], fontsize=8.5)
    axes.set_xlim(0, 1.36 * study["task"]["steps"])
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_title(title)
    axes.set_xlabel("steps, mean over seeds\nhatched: only k of n seeds reached it")
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _missed_words(study: Saved, each: Saved) -> str:
    """How many seeds reached the target, and that none did."""
    none = all(step is None for step in steps_to(study, each, TEST))
    return f"{'not reached, ' if none else ''}{reached(study, each, TEST)}"


def _family(each: Saved) -> str:
    arm = ARMS[each["arm"]]
    if arm.gated:
        return SKY if arm.name == "defaults" else ORANGE
    return BLUE if arm.rule == "adamw" and arm.control is None else FAINT
