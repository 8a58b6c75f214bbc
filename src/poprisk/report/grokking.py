"""Grokking, shown from its saved result: accuracy along training, steps to 95%, and what became of the paper's 4.9×."""

import math
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk.errors import MissingExtraError
from poprisk.experiments.comparison.arms import ARMS
from poprisk.experiments.comparison.reading import curve, final, find_row, reached, row, steps_to
from poprisk.experiments.grokking import ADAMW, PAPER_RULE, RULES, SHARED, TUNED, shared_label
from poprisk.experiments.grokking_task import TEST_ACCURACY, TRAIN_ACCURACY
from poprisk.experiments.statistics import paired_difference
from poprisk.report.claims import Claim
from poprisk.report.comparison_page import GATES
from poprisk.report.figure_style import BLUE, FAINT, GREEN, ORANGE, PURPLE, SKY, STYLE
from poprisk.report.seed_curves import draw_seeds

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the grokking figure") from None

Saved = Mapping[str, Any]
PAPER_STEPS = {"adamw": 29_450, "population risk": 5_950}
"""To 95% held-out accuracy, from the caption of the paper's figure."""
PAPER_SPEED_UP = PAPER_STEPS["adamw"] / PAPER_STEPS["population risk"]
_COLOURS = dict(zip(RULES, (BLUE, ORANGE, GREEN, PURPLE), strict=True))
_TEST, _TRAIN = TEST_ACCURACY.name, TRAIN_ACCURACY.name
_DEFAULTS = ARMS["defaults"].label


@dataclass(frozen=True)
class SpeedUp:
    """How many times fewer steps one row needs than another, paired by seed: a geometric mean with its t-interval.

    Attributes:
        ratio: Steps of the first over steps of the second; above 1 the second is quicker.
        low: Lower end of the 95% interval; None where there is none.
        high: Its upper end.
        at_least: Whether some seeds of the first never arrived and count as if they had at the last step.
    """

    ratio: float
    low: float | None
    high: float | None
    at_least: bool

    @property
    def words(self) -> str:
        """As in a sentence.

        >>> SpeedUp(1.2, 1.1, 1.32, False).words, SpeedUp(3.0, None, None, True).words
        ('1.2× [1.1, 1.3]', 'at least 3.0×')
        """
        interval = "" if self.low is None or self.high is None else f" [{self.low:.1f}, {self.high:.1f}]"
        return f"{'at least ' if self.at_least else ''}{self.ratio:.1f}×{interval}"


def speed_up(slow: Sequence[int | None], fast: Sequence[int | None], budget: int) -> SpeedUp | None:
    """The speed-up of the second over the first, or None where the second did not always arrive.

    Args:
        slow: Steps to the target by seed, None where it was never met.
        fast: The same seeds of what is said to be quicker.
        budget: Steps of a training.

    >>> round(speed_up([400, 200], [100, 50], 1000).ratio, 6)
    4.0
    >>> speed_up([400, None], [100, 100], 1000).at_least, speed_up([400, 200], [100, None], 1000)
    (True, None)
    """
    there = [step for step in fast if step is not None]
    if len(there) < len(fast):
        return None
    logs = [math.log(budget if step is None else step) for step in slow]
    difference = paired_difference(logs, [math.log(step) for step in there])
    low, high = (None if end is None else math.exp(end) for end in (difference.low, difference.high))
    return SpeedUp(math.exp(difference.value), low, high, None in slow)


def draw_grokking(saved: Saved) -> Figure:
    """Accuracy along training for each shared weight decay and after tuning, and steps to 95% of every optimizer.

    Args:
        saved: What ``poprisk.store.load_result(path, "grokking")`` gives.
    """
    studies, decays = saved["result"]["studies"], saved["config"]["weight_decays"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(10.8, 4.6 * len(decays)), 9.0), layout="constrained")
        parts: Any = figure.subfigures(2, 1, height_ratios=(1, 1.2))
        above, below = parts
        panels = [*above.subplots(1, len(decays), squeeze=False)[0], *below.subplots(1, 2)]
        letters = iter(string.ascii_uppercase)
        for decay, axes in zip(decays, panels, strict=False):
            rows = {rule: row(studies[SHARED], shared_label(rule, decay)) for rule in RULES}
            title = f"{next(letters)}  Shared settings, weight decay {decay:g}"
            _draw_accuracy(axes, studies[SHARED], rows, _COLOURS, title)
        rows, colours = _tuned_rows(studies[TUNED])
        title = f"{next(letters)}  Each tuned with {saved['config']['trials']} trials"
        _draw_accuracy(panels[-2], studies[TUNED], rows, colours, title)
        _draw_steps(panels[-1], studies[TUNED], f"{next(letters)}  Steps to {_target(studies[TUNED])}, tuned")
    return figure


def _draw_accuracy(axes: Axes, study: Saved, rows: Saved, colours: Mapping[str, str], title: str) -> None:
    steps = study["evaluation_steps"]
    for name, each in rows.items():
        label = f"{name}: {reached(study, each, _TEST)} reach {_target(study)}"
        draw_seeds(axes, steps, curve(each, _TEST), label, colours[name], linewidth=2)
        draw_seeds(axes, steps, curve(each, _TRAIN), "", colours[name], linewidth=1, linestyle=":", alpha=0.6)
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
    names = {"adamw": BLUE, **({gate: ORANGE} if gate else {}), "grokfast": GREEN, _DEFAULTS: SKY}
    found = {name: _quickest(study, name) for name in names}
    rows = {each["label"]: each for each in found.values() if each is not None}
    return rows, {each["label"]: names[name] for name, each in found.items() if each is not None}


def _draw_steps(axes: Axes, study: Saved, title: str) -> None:
    """Bars of mean steps to the target; a seed that missed it counts as the whole training, and its bar is hatched."""
    bars = []
    for name in (*study["arms"], _DEFAULTS):
        each = _quickest(study, name)
        if each is not None:
            bars.append((_mean_steps(study, each), None in steps_to(study, each, _TEST), each))
    bars.sort(key=lambda bar: bar[0], reverse=True)
    for place, (length, missed, each) in enumerate(bars):
        face: dict[str, Any] = (
            {"color": "none", "edgecolor": _family(each), "hatch": "////"} if missed else {"color": _family(each)}
        )
        axes.barh(place, length, height=0.72, **face)
        words = reached(study, each, _TEST) if missed else f"{length:,.0f}"
        axes.annotate(words, (length, place), (3, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(bars)), [each["label"] for *_, each in bars], fontsize=8.5)
    axes.set_xlim(0, 1.18 * study["task"]["steps"])
    axes.set_ylim(-0.6, len(bars) - 0.4)
    axes.set_title(title)
    axes.set_xlabel("steps, mean over seeds\nhatched: only k of n seeds reached it")
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _family(each: Saved) -> str:
    arm = ARMS[each["arm"]]
    if arm.gated:
        return SKY if arm.name == "defaults" else ORANGE
    return BLUE if arm.rule == "adamw" and arm.control is None else FAINT


def _target(study: Saved) -> str:
    return f"{study['task']['metrics'][0]['target']:.0%}"


def _quickest(study: Saved, name: str) -> Any:
    """The row chosen for its time to the target; where no trial met it, the one with the best accuracy."""
    return find_row(study, name, "target") or find_row(study, name, "best")


def _mean_steps(study: Saved, each: Saved) -> float:
    budget = study["task"]["steps"]
    steps = [budget if step is None else step for step in steps_to(study, each, _TEST)]
    return math.fsum(steps) / len(steps)


def best_gate(study: Saved) -> str | None:
    """The gate whose chosen trial met the target first on the *tuning* seeds; None if none did."""
    waits = {}
    for name in set(GATES) & set(study["arms"]):
        searched = study["arms"][name]
        chosen = searched["chosen"]["target"]
        if chosen is not None:
            tuning = {"label": name, "curves": {_TEST: searched["trials"][chosen]["curve"]}}
            waits[name] = _mean_steps(study, tuning)
    return min(waits, key=lambda name: (waits[name], name), default=None)


def grokking_lines(saved: Saved) -> Iterator[RenderableType]:
    """Every row's steps to the target and its last accuracy, then the verdict, for a terminal."""
    studies = saved["result"]["studies"]
    for name, study in studies.items():
        table = Table(title=f"{name}: {study['task']['description']}", title_justify="left", title_style="")
        table.add_column("optimizer", overflow="fold")
        for head in (f"steps to {_target(study)}", "reached", "last accuracy", "diverged"):
            table.add_column(head, justify="right")
        for each in _one_row_an_arm(study):
            missed = None in steps_to(study, each, _TEST)
            steps = f"{'≥ ' if missed else ''}{_mean_steps(study, each):,.0f}"
            table.add_row(each["label"], steps, reached(study, each, _TEST), _mean(each), str(each["failures"]))
        yield table
    yield Text(claims_grokking(saved)[0].sentence, style="bold")


def _one_row_an_arm(study: Saved) -> list[Any]:
    given = [each for each in study["rows"] if not each["chosen_for"]]
    found = [_quickest(study, name) for name in study["arms"]]
    return given + [each for each in found if each is not None]


def _mean(each: Saved) -> str:
    values = final(each, _TEST)
    return f"{math.fsum(values) / len(values):.3f}"


def claims_grokking(saved: Saved) -> list[Claim]:
    """The paper's 4.9 times fewer steps, beside ours with shared hyper-parameters and with equal tuning."""
    studies, decays = saved["result"]["studies"], saved["config"]["weight_decays"]
    speeds = [_shared_speed_up(studies[SHARED], decay) for decay in decays]
    found = [f"at weight decay {decay:g} {_shared_verdict(studies[SHARED], decay)}" for decay in decays]
    return [
        Claim(
            claim="Population-risk training collapses the grokking delay (a·b⁻¹ mod 97, 25%; figure and abstract)",
            paper=f"{PAPER_STEPS['population risk']:,} against {PAPER_STEPS['adamw']:,} steps to 95%: "
            f"{PAPER_SPEED_UP:.1f}× fewer",
            paper_conditions="; ".join(_shared_words(studies[SHARED], decay) for decay in decays),
            equal_tuning=_tuned_words(studies[TUNED]),
            sentence=f"{_verdict(speeds)}: with shared hyper-parameters {', '.join(found)} (the paper: "
            f"{PAPER_SPEED_UP:.1f}× fewer). With equal tuning: {_tuned_words(studies[TUNED])}.",
        )
    ]


def _shared_speed_up(study: Saved, decay: float) -> SpeedUp | None:
    slow, fast = (steps_to(study, row(study, shared_label(rule, decay)), _TEST) for rule in (ADAMW, PAPER_RULE))
    return speed_up(slow, fast, study["task"]["steps"])


def _shared_verdict(study: Saved, decay: float) -> str:
    speed = _shared_speed_up(study, decay)
    if speed is not None:
        return f"the paper's rule needs {_fewer(speed)} than AdamW"
    adamw, rule = (reached(study, row(study, shared_label(name, decay)), _TEST) for name in (ADAMW, PAPER_RULE))
    return f"the paper's rule arrives in {rule} seeds and AdamW in {adamw}"


def _shared_words(study: Saved, decay: float) -> str:
    rows = {rule: row(study, shared_label(rule, decay)) for rule in RULES}
    return f"weight decay {decay:g}: " + ", ".join(f"{rule} {_steps_words(study, r)}" for rule, r in rows.items())


def _tuned_words(study: Saved) -> str:
    adamw, gate = _quickest(study, "adamw"), best_gate(study)
    if adamw is None:
        return "every trial of AdamW diverged"
    words = f"AdamW {_steps_words(study, adamw)}"
    if gate is None:
        return f"{words}; no gate reached the target on the tuning seeds"
    chosen = row(study, gate, "target")
    speed = speed_up(steps_to(study, adamw, _TEST), steps_to(study, chosen, _TEST), study["task"]["steps"])
    words += f", the best gate ({chosen['label']}) {_steps_words(study, chosen)}"
    return words if speed is None else f"{words}, {_fewer(speed)}"


def _steps_words(study: Saved, each: Saved) -> str:
    steps = steps_to(study, each, _TEST)
    there = [step for step in steps if step is not None]
    if not there:
        return f"not in {study['task']['steps']:,} steps ({reached(study, each, _TEST)})"
    among = "" if len(there) == len(steps) else " where it did"
    return f"{math.fsum(there) / len(there):,.0f} steps{among} ({reached(study, each, _TEST)})"


def _fewer(speed: SpeedUp) -> str:
    """How many times fewer steps, or how many times more."""
    if speed.ratio < 1 and not speed.at_least:
        slower = SpeedUp(1 / speed.ratio, speed.high and 1 / speed.high, speed.low and 1 / speed.low, False)
        return f"{slower.words} more steps"
    return f"{speed.words} fewer steps"


def _verdict(speeds: Sequence[SpeedUp | None]) -> str:
    """Held if a speed-up of the paper's size lies within an interval, and that interval lies above 1."""
    known = [speed for speed in speeds if speed is not None]
    if any(speed.low is None for speed in known):
        return "Undecided, one seed"
    above = [speed for speed in known if speed.low is not None and speed.low > 1]
    if any(speed.at_least or (speed.high or 0) >= PAPER_SPEED_UP for speed in above):
        return "Held"
    if above:
        return "Held in direction, not in size"
    undecided = any(speed.high is not None and speed.high >= 1 for speed in known)
    return "Undecided" if undecided else "Not held"
