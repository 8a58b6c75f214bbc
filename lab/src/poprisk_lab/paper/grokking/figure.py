"""Grokking, shown from its saved result: accuracy along training, steps to 95%, and what became of the paper's 4.9×."""

import math
import string
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk.cli._demonstration.figure_style import BLUE, FAINT, GREEN, ORANGE, PURPLE, SKY, STYLE
from poprisk.errors import MissingExtraError
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.reading import curve, final, find_row, reached, row, steps_to
from poprisk_lab.pages.claims import Claim
from poprisk_lab.pages.gate_choice import chosen_gate, fixed_gate, searched_gates, tuned_gate_words, tuned_gates
from poprisk_lab.pages.paired_ratio import Ratio, steps_ratio
from poprisk_lab.pages.seed_curves import draw_seeds
from poprisk_lab.paper.grokking.study import ADAMW, PAPER_RULE, RULES, SHARED, TUNED, shared_label
from poprisk_lab.paper.grokking.task import TEST_ACCURACY, TRAIN_ACCURACY

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
BAR = PAPER_SPEED_UP / 2
"""The claim holds if the whole interval of our speed-up is at half the paper's or above."""
_COLOURS = dict(zip(RULES, (BLUE, ORANGE, GREEN, PURPLE), strict=True))
_TEST, _TRAIN = TEST_ACCURACY.name, TRAIN_ACCURACY.name
_DEFAULTS = ARMS["defaults"].label


def draw_grokking(saved: Saved) -> Figure:
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
    words = {
        name: f"{each['label']} ({tuned_gate_words(study)})" if name == gate else each["label"]
        for name, each in found.items()
        if each is not None
    }
    return {words[name]: found[name] for name in words}, {words[name]: names[name] for name in words}


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
        words = _missed_words(study, each) if missed else f"{length:,.0f}"
        axes.annotate(words, (length, place), (3, 0), textcoords="offset points", va="center", fontsize=8.5)
    axes.set_yticks(range(len(bars)), [each["label"] for *_, each in bars], fontsize=8.5)
    axes.set_xlim(0, 1.36 * study["task"]["steps"])
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
    """The row chosen for its time to the target; where no trial met it, for its best accuracy, or else its last.

    So that an optimizer that never gets there is shown as such, and does not drop out.
    """
    return find_row(study, name, "target") or find_row(study, name, "best") or find_row(study, name)


def _missed_words(study: Saved, each: Saved) -> str:
    """How many seeds reached the target, and that none did."""
    none = all(step is None for step in steps_to(study, each, _TEST))
    return f"{'not reached, ' if none else ''}{reached(study, each, _TEST)}"


def _mean_steps(study: Saved, each: Saved) -> float:
    budget = study["task"]["steps"]
    steps = [budget if step is None else step for step in steps_to(study, each, _TEST)]
    return math.fsum(steps) / len(steps)


def best_gate(study: Saved) -> str | None:
    """The arm of the gate whose chosen trial met the target first on the *tuning* seeds; None if none did."""
    chosen = chosen_gate(study, "target")
    return None if chosen is None else chosen["arm"]


def grokking_lines(saved: Saved) -> Iterator[RenderableType]:
    """Every row's steps to the target and its last accuracy, then the verdict, for a terminal."""
    studies = saved["result"]["studies"]
    for name, study in studies.items():
        table = Table(title=f"{name}: {study['task']['description']}", title_justify="left", title_style="")
        table.add_column("optimizer", overflow="fold")
        for head in (f"steps to {_target(study)}", "reached", "last accuracy", "diverged"):
            table.add_column(head, justify="right")
        for each in _one_row_an_arm(study):
            found = steps_to(study, each, _TEST)
            steps = f"{'≥ ' if None in found else ''}{_mean_steps(study, each):,.0f}"
            steps = steps if any(step is not None for step in found) else "not reached"
            table.add_row(each["label"], steps, reached(study, each, _TEST), _mean(each), str(each["failures"]))
        yield table
    yield Text("≥: a seed that missed the target counts as the whole training, so that the mean is a lower bound.")
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
    judged = [_shared_verdict(studies[SHARED], decay) for decay in decays]
    return [
        Claim(
            claim="Population-risk training collapses the grokking delay (a·b⁻¹ mod 97, 25%; figure and abstract)",
            paper=f"{PAPER_STEPS['population risk']:,} against {PAPER_STEPS['adamw']:,} steps to 95%: "
            f"{PAPER_SPEED_UP:.1f}× fewer",
            paper_conditions="; ".join(_shared_words(studies[SHARED], decay) for decay in decays),
            equal_tuning=_tuned_words(studies[TUNED]),
            sentence=f"With shared hyper-parameters (bar: the whole interval at {BAR:.1f}× fewer steps or above, half "
            f"the paper's {PAPER_SPEED_UP:.1f}×): {'; '.join(judged)}. With tuning: {_tuned_words(studies[TUNED])}.",
        )
    ]


def _shared_verdict(study: Saved, decay: float) -> str:
    """One weight decay on its own: a verdict, and the numbers it rests on."""
    rows = [row(study, shared_label(rule, decay)) for rule in (ADAMW, PAPER_RULE)]
    slow, fast = (steps_to(study, each, _TEST) for each in rows)
    where, speed = f"at weight decay {decay:g}", steps_ratio(slow, fast, study["evaluation_steps"])
    if speed is not None:
        return f"{speed.verdict(BAR)} {where}, where the paper's rule needs {_fewer(speed)} than AdamW"
    if all(step is None for step in (*slow, *fast)):
        return f"Undecided {where}, where neither arrived in {study['task']['steps']:,} steps"
    adamw, rule = (reached(study, each, _TEST) for each in rows)
    verdict = "Undecided" if None in slow else "Not held"
    return f"{verdict} {where}, where the paper's rule arrives in {rule} seeds and AdamW in {adamw}"


def _shared_words(study: Saved, decay: float) -> str:
    rows = {rule: row(study, shared_label(rule, decay)) for rule in RULES}
    return f"weight decay {decay:g}: " + ", ".join(f"{rule} {_steps_words(study, r)}" for rule, r in rows.items())


def _tuned_words(study: Saved) -> str:
    adamw, gates = _quickest(study, "adamw"), tuned_gates(study, "target")
    if adamw is None:
        return "every trial of AdamW diverged"
    words = [f"AdamW {_steps_words(study, adamw)}"]
    words += [f"{gate} {_against(study, each, adamw)}" for gate, each in gates.items()]
    if not searched_gates(study):
        words.append("no gate was searched")
    elif fixed_gate(study, "target") is None:
        some = "the gate fixed in advance did not reach" if gates else "no gate reached"
        words.append(f"{some} the target on the tuning seeds")
    return "; ".join(words)


def _against(study: Saved, each: Saved, adamw: Saved) -> str:
    """A row's steps, and how many times fewer they are than AdamW's."""
    speed = steps_ratio(steps_to(study, adamw, _TEST), steps_to(study, each, _TEST), study["evaluation_steps"])
    return _steps_words(study, each) + ("" if speed is None else f", {_fewer(speed)}")


def _steps_words(study: Saved, each: Saved) -> str:
    steps = steps_to(study, each, _TEST)
    there = [step for step in steps if step is not None]
    if not there:
        return f"not reached in {study['task']['steps']:,} steps ({reached(study, each, _TEST)})"
    among = "" if len(there) == len(steps) else " where it did"
    return f"{math.fsum(there) / len(there):,.0f} steps{among} ({reached(study, each, _TEST)})"


def _fewer(speed: Ratio) -> str:
    """How many times fewer steps, or how many times more; a lower bound where AdamW did not always arrive."""
    if speed.at_least:
        return f"{speed.words} fewer steps (a lower bound: a run of AdamW that did not arrive counts as its length)"
    return f"{speed.inverse.words} more steps" if speed.value < 1 else f"{speed.words} fewer steps"
