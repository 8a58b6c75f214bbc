"""Numbers of the noisy DPO study, from its saved result: the paper's table with our columns, and the verdicts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk_lab.engine.reading import StoredRow, StoredStudy, curve, final, find_row, row
from poprisk_lab.engine.statistics import bootstrap_difference, first_step_reaching, median_steps
from poprisk_lab.pages.claims import VerdictRow, verdict_row
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
from poprisk_lab.pages.template import render_block
from poprisk_lab.paper.dpo.study import DEFAULTS, PAPER_RULE, SHARED_ADAMW, SUGGESTED
from poprisk_lab.paper.dpo.task import ACCURACY, DRIFT, MARGIN

Saved = Mapping[str, Any]
PACKAGE = "poprisk_lab.paper.dpo"
Values = list[float | None]
"""One value a seed; None where a level was never held."""
LEVELS = (0.54, 0.55, 0.56, 0.58, 0.60)
"""The accuracies of the paper's table that must be held to the end."""
TUNED_ADAMW = "AdamW, tuned"
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


def noisy_study(saved: Saved) -> StoredStudy:
    """The study with the largest share of swapped pairs."""
    return max(saved["result"]["studies"].values(), key=lambda study: study["task"]["config"]["noise"])


def clean_study(saved: Saved) -> StoredStudy | None:
    """The control without swaps, if it was run."""
    found = (study for study in saved["result"]["studies"].values() if study["task"]["config"]["noise"] == 0)
    return next(found, None)


def shown_rows(study: StoredStudy) -> dict[str, StoredRow]:
    """The rows of the table and of the figure, by their words: what was given, the tuned AdamW, the best gate."""
    found = {label: row(study, label) for label in (SHARED_ADAMW, PAPER_RULE, SUGGESTED, DEFAULTS)}
    tuned, gate = find_row(study, "adamw"), best_gate(study)
    if tuned is not None:
        found[TUNED_ADAMW] = tuned
    if gate is not None:
        found[tuned_gate_words(study)] = gate
    return found


def lines(saved: Saved) -> Iterator[RenderableType]:
    """The paper's table with our columns, the tables of the comparison, and the verdicts, for a terminal."""
    study = noisy_study(saved)
    shown = shown_rows(study)
    table = Table(title=study["task"]["description"], title_justify="left", title_style="bold")
    for column, words in enumerate(["", "paper: AdamW", "paper: pop. risk", *shown]):
        table.add_column(words, justify="right" if column else "left", overflow="fold")
    for line in ROWS:
        cells = [_words(line, line.measure(study, each)) for each in shown.values()]
        table.add_row(line.name, *_paper_cells(line), *cells)
    yield table
    yield from comparison_lines(saved)
    yield Text(f"{_tally(study)} {_pairs_claim(study).verdict}", style="bold")


def _tally(study: StoredStudy) -> str:
    """How many rows of the paper's table held."""
    rows = [line for line in ROWS if line.paper]
    found = {
        words: [_HELD[_compare(study, line, first, second)[0]] for line in rows]
        for words, first, second in _matches(study)
    }
    return render_block(PACKAGE, "tally", {"found": found})


def claims(saved: Saved) -> list[VerdictRow]:
    """Every row of the paper's table, what the evaluation pairs alone leave open, and the control without swaps."""
    study, clean = noisy_study(saved), clean_study(saved)
    found = [*(_row_claim(study, line) for line in ROWS), _pairs_claim(study)]
    return found if clean is None else [*found, _clean_claim(clean)]


def _row_claim(study: StoredStudy, line: TableRow) -> VerdictRow:
    (_, paper, adamw), (words, contender, reference) = _matches(study)
    shown = {each["label"]: each for each in (reference, contender, *_beside(study))}
    slots = {
        "name": line.name,
        "paper": _paper_slots(line),
        "shared_values": {e["label"]: _words(line, line.measure(study, e)) for e in (adamw, paper)},
        "tuned_values": {name: _words(line, line.measure(study, e)) for name, e in shown.items()},
        "conditions": words,
        "shared": _judged(study, line, paper, adamw),
        "tuned": _judged(study, line, contender, reference),
        "fixed": _fixed(study, line),
    }
    return verdict_row(PACKAGE, slots, "row")


def _pairs_claim(study: StoredStudy) -> VerdictRow:
    """The same difference with the evaluation pairs resampled: what a few hundred pairs can tell apart."""
    (_, paper, adamw), (_, contender, reference) = _matches(study)
    count = len(study["portraits"][SHARED_ADAMW]["margins"])
    slots = {
        "shared": _pair_bootstrap(study, paper["label"], adamw["label"]),
        "tuned": _pair_bootstrap(study, contender["label"], reference["label"]),
        "contender": _contender_words(study),
        "count": count,
        "error": 100 * math.sqrt(0.25 / count),
    }
    return verdict_row(PACKAGE, slots, "pairs")


def _clean_claim(study: StoredStudy) -> VerdictRow:
    (_, paper, adamw), (words, contender, reference) = _matches(study)
    shown = {each["label"]: each for each in (reference, contender, *_beside(study))}
    outcome, numbers = _compare(study, ROWS[0], contender, reference)
    slots = {
        "shared_values": {e["label"]: mean_words(final(e, ACCURACY), ".3f") for e in (adamw, paper)},
        "tuned_values": {label: mean_words(final(each, ACCURACY), ".3f") for label, each in shown.items()},
        "searched": bool(reference["chosen_for"]),
        "contender": contender["label"],
        "outcome": outcome,
        "conditions": words,
        "numbers": numbers,
        "fixed": _fixed(study, ROWS[0]),
    }
    return verdict_row(PACKAGE, slots, "clean")


def _judged(study: StoredStudy, line: TableRow, ours: StoredRow, adamw: StoredRow) -> dict[str, str]:
    outcome, numbers = _compare(study, line, ours, adamw)
    return {"state": _HELD[outcome], "numbers": numbers}


def _fixed(study: StoredStudy, line: TableRow) -> dict[str, str] | None:
    """The gate fixed in advance, which had AdamW's number of trials; None where it is the one chosen, or none."""
    fixed, reference = fixed_gate(study, "last"), adamw_reference(study)
    if fixed is None or reference is None or fixed is best_gate(study):
        return None
    return {"label": fixed["label"], **_judged(study, line, fixed, reference)}


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


def _beside(study: StoredStudy) -> list[StoredRow]:
    """What is shown beside the best gate: the gate fixed in advance, where one was searched, and the defaults."""
    fixed = fixed_gate(study, "last")
    return [*([] if fixed is None else [fixed]), row(study, DEFAULTS)]


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


def _paper_slots(line: TableRow) -> dict[str, Any] | None:
    """The paper's numbers and their ratio; None for a row that the paper does not have."""
    if line.paper is None:
        return None
    adamw, rule = line.paper
    ratio = None if adamw is None else rule / adamw if line.higher_is_better else adamw / rule
    words = _paper_cells(line)
    return {"adamw": words[0], "rule": words[1], "ratio": ratio}


def _pair_bootstrap(study: StoredStudy, first: str, second: str) -> str:
    """Difference in points of accuracy, with the paired bootstrap's 95% interval over evaluation pairs."""
    portraits = study["portraits"]
    if first not in portraits or second not in portraits:
        return "not kept"
    right = [[float(m > 0) + 0.5 * (m == 0) for m in portraits[label]["margins"]] for label in (first, second)]
    found = bootstrap_difference(right[0], right[1], resamples=2000)
    low, high = (signed(100 * end, ".1f") for end in (found.low or 0.0, found.high or 0.0))
    return f"{signed(100 * found.value, '.1f')} ({low}, {high})"
