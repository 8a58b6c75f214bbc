"""Noisy DPO, shown from its saved result: the paper's three panels, its table, and what became of its claims."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk._core.statistics import bootstrap_difference, first_step_reaching, median_steps
from poprisk.cli._demonstration.figure_style import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, SKY, STYLE
from poprisk.errors import MissingExtraError
from poprisk_lab.engine.reading import StoredRow, StoredStudy, curve, final, find_row, row
from poprisk_lab.pages.claims import Claim
from poprisk_lab.pages.comparison import (
    Gain,
    adamw_reference,
    adamw_words,
    best_gate,
    comparison_lines,
    gain,
    gain_words,
    mean_words,
    signed,
)
from poprisk_lab.pages.gate_choice import budget_words, fixed_gate, tuned_gate_words
from poprisk_lab.pages.paired_ratio import LEAST_PAIRS, looked_before
from poprisk_lab.pages.seed_curves import draw_seeds, mean_and_range
from poprisk_lab.paper.dpo.study import DEFAULTS, PAPER_RULE, SHARED_ADAMW, SUGGESTED
from poprisk_lab.paper.dpo.task import ACCURACY, DRIFT, MARGIN

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError:
    raise MissingExtraError("matplotlib", "report", "the DPO figure") from None

Saved = Mapping[str, Any]
Values = list[float | None]
"""One value a seed; None where a level was never held."""
LEVELS = (0.54, 0.55, 0.56, 0.58, 0.60)
"""The accuracies of the paper's table that must be held to the end."""
_GIVEN = {SHARED_ADAMW: (BLUE, "-"), PAPER_RULE: (ORANGE, "-"), SUGGESTED: (GREEN, "-."), DEFAULTS: (SKY, "-.")}
_TUNED_ADAMW = "AdamW, tuned"
_HELD = {"better": "Held", "worse": "Not held", "unclear": "Undecided"}


@dataclass(frozen=True)
class TableRow:
    """A row of the paper's table: what it measures, and what the paper found for AdamW and for its own rule."""

    name: str
    measure: Callable[[StoredStudy, StoredRow], Values]
    higher_is_better: bool
    paper: tuple[float | None, float] | None = None
    """None for AdamW is the paper's "not reached"; None for both is a row that the paper does not have."""
    spec: str = ".3f"

    @property
    def counts_steps(self) -> bool:
        """Whether it is a time, known to the evaluation before it only."""
        return self.spec == ".0f"


def sustained(values: Sequence[float]) -> list[float]:
    """The lowest value from each evaluation onward; NaN spoils what comes before it.

    >>> sustained([0.5, 0.7, 0.6, 0.8])
    [0.5, 0.6, 0.6, 0.8]
    """
    held: list[float] = []
    for value in reversed(values):
        held.append(value if not held else (math.nan if math.isnan(held[-1] + value) else min(held[-1], value)))
    return held[::-1]


def steps_to_hold(study: StoredStudy, each: StoredRow, level: float) -> list[int | None]:
    """The first evaluated step from which each seed's accuracy never again falls below the level."""
    values = curve(each, ACCURACY)
    return _hold(study, values, [level] * len(values))


def _hold(study: StoredStudy, values: Sequence[Sequence[float]], levels: Sequence[float]) -> list[int | None]:
    """The same with a level for each seed."""
    steps = study["evaluation_steps"]
    return [first_step_reaching(sustained(v), steps, level, True) for v, level in zip(values, levels, strict=True)]


def _over_run(metric: str, reduce: Callable[[list[float]], float]) -> Callable[[StoredStudy, StoredRow], Values]:
    return lambda _, each: [
        math.nan if any(math.isnan(v) for v in values) else reduce(values) for values in curve(each, metric)
    ]


def _holds(level: float) -> Callable[[StoredStudy, StoredRow], Values]:
    return lambda study, each: [None if s is None else float(s) for s in steps_to_hold(study, each, level)]


def _holds_adamw(study: StoredStudy, each: StoredRow) -> Values:
    """The level of each seed is what the AdamW with shared hyper-parameters ends at with that seed."""
    found = _hold(study, curve(each, ACCURACY), final(row(study, SHARED_ADAMW), ACCURACY))
    return [None if step is None else float(step) for step in found]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


ROWS = (
    TableRow("final reward accuracy", lambda _, each: list(final(each, ACCURACY)), True, (0.566, 0.641)),
    TableRow("mean trajectory accuracy", _over_run(ACCURACY, _mean), True, (0.549, 0.625)),
    TableRow("worst-step accuracy", _over_run(ACCURACY, min), True, (0.510, 0.589)),
    TableRow("mean absolute reward drift", _over_run(DRIFT, _mean), False, (0.41, 0.14)),
    *(
        TableRow(f"steps to sustained accuracy ≥ {level:.2f}", _holds(level), False, paper, ".0f")
        for level, paper in zip(LEVELS, ((225, 75), (225, 75), (338, 100), (None, 125), (None, 175)), strict=True)
    ),
    TableRow("steps to sustain AdamW's final accuracy", _holds_adamw, False, spec=".0f"),
    TableRow("final reward margin", lambda _, each: list(final(each, MARGIN)), True),
)
"""The paper's table, and two rows more."""


def draw_dpo(saved: Saved) -> Figure:
    """Sustained accuracy and reward drift along training, and the one against the other.

    Lines are means over the seeds, bands the range of the seeds, dots the last step.

    Args:
        saved: What ``poprisk._core.store.load_result(path, "dpo")`` gives.
    """
    study = noisy_study(saved)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.4, 4.6), layout="constrained")
        held, drift, phase = figure.subplots(1, 3)
        _draw_held(held, study)
        _draw_drift(drift, study)
        _draw_phase(phase, study)
        handles, labels = held.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def noisy_study(saved: Saved) -> StoredStudy:
    """The study with the largest share of swapped pairs."""
    return max(saved["result"]["studies"].values(), key=lambda study: study["task"]["config"]["noise"])


def clean_study(saved: Saved) -> StoredStudy | None:
    """The control without swaps, if it was run."""
    found = (study for study in saved["result"]["studies"].values() if study["task"]["config"]["noise"] == 0)
    return next(found, None)


def _rows(study: StoredStudy) -> dict[str, tuple[StoredRow, str, str]]:
    """What is drawn, by its words, with colour and line."""
    found = {label: (row(study, label), *look) for label, look in _GIVEN.items()}
    tuned, gate = find_row(study, "adamw"), best_gate(study)
    if tuned is not None:
        found[_TUNED_ADAMW] = (tuned, INK, "--")
    if gate is not None:
        found[tuned_gate_words(study)] = (gate, PURPLE, "--")
    return found


def _draw_held(axes: Axes, study: StoredStudy) -> None:
    for words, (each, colour, line) in _rows(study).items():
        held = [sustained(values) for values in curve(each, ACCURACY)]
        draw_seeds(axes, study["evaluation_steps"], held, words, colour, linestyle=line, linewidth=1.8)
    low, high = axes.get_ylim()
    for level in (0.55, 0.60):
        if low < level < high:
            axes.axhline(level, color=FAINT, linestyle=":", linewidth=1)
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


def dpo_lines(saved: Saved) -> Iterator[RenderableType]:
    """The paper's table with our columns, the tables of the comparison, and the verdicts, for a terminal."""
    study = noisy_study(saved)
    shown = _rows(study)
    table = Table(title=study["task"]["description"], title_justify="left", title_style="bold")
    for column, words in enumerate(["", "paper: AdamW", "paper: pop. risk", *shown]):
        table.add_column(words, justify="right" if column else "left", overflow="fold")
    for line in ROWS:
        cells = [_words(line, line.measure(study, each)) for each, _, _ in shown.values()]
        table.add_row(line.name, *_paper_cells(line), *cells)
    yield table
    yield from comparison_lines(saved)
    yield Text(f"{_tally(study)} {_pairs_claim(study).sentence}", style="bold")


def _tally(study: StoredStudy) -> str:
    """How many rows of the paper's table held."""
    rows = [line for line in ROWS if line.paper]
    found = {
        words: [_HELD[_compare(study, line, first, second)[0]] for line in rows]
        for words, first, second in _matches(study)
    }
    return " ".join(
        f"{words}: {verdicts.count('Held')} of the {len(rows)} rows of the paper's table held, "
        f"{verdicts.count('Not held')} did not, {verdicts.count('Undecided')} undecided."
        for words, verdicts in found.items()
    )


def _matches(study: StoredStudy) -> list[tuple[str, StoredRow, StoredRow]]:
    """Who is compared with AdamW: the paper's rule with all shared, and the best gate after tuning.

    Where no gate was searched the defaults stand for it, and where no AdamW was, the given one for that.
    """
    adamw, gate = row(study, SHARED_ADAMW), best_gate(study)
    reference = adamw_reference(study) or adamw
    tuning = "With tuning" if reference["chosen_for"] else "With nothing searched"
    return [
        ("With shared hyper-parameters", row(study, PAPER_RULE), adamw),
        (f"{tuning} ({_contender_words(study)})", row(study, DEFAULTS) if gate is None else gate, reference),
    ]


def _contender_words(study: StoredStudy) -> str:
    """What stands for population-risk training in the second comparison, and against which AdamW."""
    gate = best_gate(study)
    what = f"{DEFAULTS}, no gate searched" if gate is None else f"{gate['label']}, {budget_words(study)}"
    return f"{what}, against {adamw_words(study)}"


def claims_dpo(saved: Saved) -> list[Claim]:
    """Every row of the paper's table, what the evaluation pairs alone leave open, and the control without swaps."""
    study, clean = noisy_study(saved), clean_study(saved)
    claims = [*(_row_claim(study, line) for line in ROWS), _pairs_claim(study)]
    return claims if clean is None else [*claims, _clean_claim(clean)]


def _row_claim(study: StoredStudy, line: TableRow) -> Claim:
    (_, paper, adamw), (words, contender, reference) = _matches(study)
    shown = {each["label"]: each for each in (reference, contender, *_beside(study))}
    shared, equal = _compare(study, line, paper, adamw), _compare(study, line, contender, reference)
    paper_adamw, paper_rule = _paper_cells(line)
    given = f"AdamW {paper_adamw}, population risk {paper_rule}" if line.paper else "not in the paper"
    return Claim(
        claim=f"Noisy DPO: {line.name}" + (" (table)" if line.paper else ""),
        paper=given + _ratio_words(line),
        paper_conditions="; ".join(f"{e['label']} {_words(line, line.measure(study, e))}" for e in (adamw, paper)),
        equal_tuning="; ".join(f"{name} {_words(line, line.measure(study, e))}" for name, e in shown.items()),
        sentence=f"{_HELD[shared[0]]} with shared hyper-parameters: {line.name}, the paper's rule against AdamW, "
        f"{shared[1]}. {_HELD[equal[0]]} {words[0].lower()}{words[1:]}: {equal[1]}.{_fixed_sentence(study, line)}",
    )


def _beside(study: StoredStudy) -> list[StoredRow]:
    """What is shown beside the best gate: the gate fixed in advance, where one was searched, and the defaults."""
    fixed = fixed_gate(study, "last")
    return [*([] if fixed is None else [fixed]), row(study, DEFAULTS)]


def _fixed_sentence(study: StoredStudy, line: TableRow) -> str:
    """The gate fixed in advance, which had AdamW's number of trials; nothing where it is the one chosen, or none."""
    fixed, reference = fixed_gate(study, "last"), adamw_reference(study)
    if fixed is None or reference is None or fixed is best_gate(study):
        return ""
    verdict, numbers = _compare(study, line, fixed, reference)
    return f" {_HELD[verdict]} by the gate fixed in advance ({fixed['label']}): {numbers}."


def _compare(study: StoredStudy, line: TableRow, ours: StoredRow, adamw: StoredRow) -> tuple[str, str]:
    """``better``, ``worse`` or ``unclear``, and the numbers in words."""
    first, second = line.measure(study, ours), line.measure(study, adamw)
    known = [[v for v in values if v is not None] for values in (first, second)]
    words = f"{_words(line, first)} against {_words(line, second)}"
    if len(known[0]) == len(first) and len(known[1]) == len(second):
        gained = gain(known[0], known[1], line.higher_is_better)
        if line.counts_steps:
            gained = _with_the_grid(gained, known[0], known[1], study["evaluation_steps"])
        return gained.verdict, f"{words}, gain {gain_words(gained, line.spec)}"
    several = len(first) >= LEAST_PAIRS
    if several and len(known[0]) == len(first) and not known[1]:
        return "better", words
    if several and len(known[1]) == len(second) and not known[0]:
        return "worse", words
    return "unclear", words


def _with_the_grid(gained: Gain, first: Sequence[float], second: Sequence[float], looks: Sequence[int]) -> Gain:
    """A gain in steps whose interval is no narrower than the evaluations allow.

    What was seen at one evaluation happened somewhere after the one before, so that equal differences in all seeds,
    whose Student interval has no width, are still known to an evaluation only.

    >>> _with_the_grid(Gain(25.0, (25.0, 25.0), (25.0, 25.0)), [25, 25], [50, 50], [25, 50, 75]).interval
    (0.0, 50.0)
    """
    if gained.interval is None:
        return gained
    earliest, latest = (
        math.fsum(after - before for after, before in zip(afters, befores, strict=True)) / len(first)
        for afters, befores in (
            ([looked_before(round(step), looks) for step in second], first),
            (second, [looked_before(round(step), looks) for step in first]),
        )
    )
    return Gain(gained.value, (min(gained.interval[0], earliest), max(gained.interval[1], latest)), None)


def _words(line: TableRow, values: Values) -> str:
    """Mean ± standard error; of steps the median, and how many seeds held the level."""
    if line.counts_steps:
        return str(median_steps([None if v is None else round(v) for v in values]))
    return mean_words([math.nan if v is None else v for v in values], line.spec)


def _paper_cells(line: TableRow) -> tuple[str, str]:
    if line.paper is None:
        return "–", "–"
    adamw, rule = line.paper
    return ("not reached" if adamw is None else f"{adamw:g}"), f"{rule:g}"


def _ratio_words(line: TableRow) -> str:
    if line.paper is None or line.paper[0] is None:
        return ""
    adamw, rule = line.paper[0], line.paper[1]
    ratio = rule / adamw if line.higher_is_better else adamw / rule
    return f" ({ratio:.2f}×)"


def _pairs_claim(study: StoredStudy) -> Claim:
    """The same difference with the evaluation pairs resampled: what a few hundred pairs can tell apart."""
    (_, paper, adamw), (_, contender, reference) = _matches(study)
    shared = _pair_bootstrap(study, paper["label"], adamw["label"])
    equal = _pair_bootstrap(study, contender["label"], reference["label"])
    count = len(study["portraits"][SHARED_ADAMW]["margins"])
    error = 100 * math.sqrt(0.25 / count)
    return Claim(
        claim="Noisy DPO: final reward accuracy, evaluation pairs resampled (first seed)",
        paper="not in the paper",
        paper_conditions=shared,
        equal_tuning=f"{_contender_words(study)}: {equal}",
        sentence=f"{count} evaluation pairs alone leave a standard error of up to {error:.1f} points on any accuracy; "
        f"the paper's rule minus AdamW, pairs resampled: {shared} points with shared hyper-parameters.",
    )


def _pair_bootstrap(study: StoredStudy, first: str, second: str) -> str:
    """Difference in points of accuracy, with the paired bootstrap's 95% interval over evaluation pairs."""
    portraits = study["portraits"]
    if first not in portraits or second not in portraits:
        return "not kept"
    right = [[float(m > 0) + 0.5 * (m == 0) for m in portraits[label]["margins"]] for label in (first, second)]
    found = bootstrap_difference(right[0], right[1], resamples=2000)
    low, high = (signed(100 * end, ".1f") for end in (found.low or 0.0, found.high or 0.0))
    return f"{signed(100 * found.value, '.1f')} ({low}, {high})"


def _clean_claim(study: StoredStudy) -> Claim:
    (_, paper, adamw), (words, contender, reference) = _matches(study)
    shown = {each["label"]: each for each in (reference, contender, *_beside(study))}
    verdict, numbers = _compare(study, ROWS[0], contender, reference)
    cost = {"better": "is better", "worse": "costs accuracy", "unclear": "is not clearly different"}[verdict]
    return Claim(
        claim="DPO without swapped pairs, the control: final reward accuracy",
        paper="not in the paper",
        paper_conditions="; ".join(f"{e['label']} {mean_words(final(e, ACCURACY), '.3f')}" for e in (adamw, paper)),
        equal_tuning=("" if reference["chosen_for"] else "nothing searched: ")
        + "; ".join(f"{label} {mean_words(final(each, ACCURACY), '.3f')}" for label, each in shown.items()),
        sentence=f"On clean preferences {contender['label']} {cost}: {words[0].lower()}{words[1:]}, {numbers}."
        f"{_fixed_sentence(study, ROWS[0])}",
    )
