"""The figure of the page on recipes: what a handful of recipes gain over tuned AdamW's best checkpoint on each task."""

from collections.abc import Sequence
from pathlib import Path

from poprisk.errors import MissingExtraError
from poprisk_lab.figure_style import AVERAGED, FAINT, INK, PALE, SMALL, STYLE, WIDTH, colour_of, text_colour
from poprisk_lab.recipes.judging import Judged, Recipe, judge, judge_all
from poprisk_lab.recipes.stored_tasks import StoredTask, stored_tasks
from poprisk_lab.recipes.wording import average_words, task_words

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the figure of the recipes") from None

_FAR = 60.0
"""Gains beyond this are drawn at the edge."""
_TICKS = (-30, -3, 0, 3, 30)


def draw(results: Path) -> Figure:
    """One panel for each recipe, one line for each task, noisy tasks first; the zero line is the oracle.

    Args:
        results: Folder with the stored results.
    """
    tasks = stored_tasks(results)
    winner = judge_all(tasks)[0][0]
    shown = sorted((task for task in tasks if task.name in winner.gains), key=lambda task: task.clean)
    panels = [(title, judge(recipe, tasks), colour) for title, recipe, colour in chosen(winner.recipe)]
    panels = [panel for panel in panels if panel[1].gains]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.6 + 0.27 * (len(shown) + 1)), layout="constrained")
        rows = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (title, judged, colour) in zip(rows, panels, strict=True):
            _panel(axes, judged, shown, colour)
            axes.set_title(title, color=text_colour(colour), fontsize=9)
        _name_tasks(rows[0], shown)
        figure.supxlabel("gain over tuned AdamW's best checkpoint, picked on the test set (points or %)", fontsize=11)
    return figure


def chosen(winner: Recipe) -> list[tuple[str, Recipe, str]]:
    """The recipes of the figure with their titles and colours: the winner, what it leaves out, and plain AdamW."""
    mean = average_words(winner.average).replace("mean of ", "mean of\n")
    other = Recipe("adamw", winner.average, "kept" if winner.moment == "last" else "last")
    when = {"last": "last step", "kept": "KeepBest's choice"}
    found = [
        (
            f"by the rule:\n{mean},\n{when.get(winner.moment, winner.moment + ' on block')}",
            winner,
            colour_of(AVERAGED),
        ),
        (f"AdamW,\n{mean},\n{when[other.moment]}", other, colour_of(AVERAGED)),
        ("AdamW,\nlast step", Recipe("adamw"), colour_of("adamw")),
        ("AdamW, cosine,\nlast step", Recipe("adamw_cosine"), colour_of("adamw_cosine")),
        ("SNR gate,\nliteral defaults,\nlast step", Recipe("literal"), colour_of("defaults")),
    ]
    return [each for k, each in enumerate(found) if each[1] not in [one[1] for one in found[:k]]]


def _panel(axes: Axes, judged: Judged, shown: Sequence[StoredTask], colour: str) -> None:
    axes.axvline(0, color=FAINT, linewidth=1)
    for place, task in _places(shown):
        gain = judged.gains.get(task.name)
        if gain is None:
            continue
        value = _inside(gain.oracle.value)
        low, high = (value if end is None else _inside(end) for end in (gain.oracle.low, gain.oracle.high))
        axes.plot([low, high], [place, place], color=colour, linewidth=1.6, alpha=0.55, solid_capstyle="butt")
        filled = colour if gain.at_oracle else "white"
        axes.plot(value, place, "o", color=colour, markerfacecolor=filled, markersize=5.5, markeredgewidth=1.4)
    axes.set_xscale("symlog", linthresh=3, linscale=1.0)
    axes.set_xlim(-_FAR * 1.15, _FAR * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(_TICKS))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:+g}".replace("-", "−") if x else "0"))
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=PALE, linewidth=0.8)
    axes.set_axisbelow(True)


def _name_tasks(axes: Axes, shown: Sequence[StoredTask]) -> None:
    places = _places(shown)
    noisy = sum(not task.clean for task in shown)
    names = [(place, task_words(task), text_colour(FAINT) if task.clean else INK) for place, task in places]
    if 0 < noisy < len(shown):
        names.append((noisy, "clean tasks:", INK))
    axes.set_yticks([place for place, *_ in names], [words for _, words, _ in names], fontsize=SMALL)
    axes.set_ylim(len(shown) + 1 - 0.4, -0.6)
    for label, (_, _, colour) in zip(axes.get_yticklabels(), names, strict=True):
        label.set_color(colour)


def _places(shown: Sequence[StoredTask]) -> list[tuple[int, StoredTask]]:
    """One line for each task, with a gap before the clean ones."""
    noisy = sum(not task.clean for task in shown)
    return [(k if k < noisy else k + 1, task) for k, task in enumerate(shown)]


def _inside(value: float) -> float:
    return max(-_FAR, min(_FAR, value))
