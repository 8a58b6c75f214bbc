"""Tables of a fair comparison, from its saved result: each row with its settings, its ends, its gain over AdamW."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk._core.statistics import mean_over_seeds, paired_difference
from poprisk_lab.engine import reading
from poprisk_lab.engine.arms import ARMS, USUAL
from poprisk_lab.engine.reading import StoredMetric, StoredRow, StoredStudy
from poprisk_lab.engine.statistics import bootstrap_difference
from poprisk_lab.pages.gate_choice import chosen_gate, searched_gates
from poprisk_lab.pages.template import render_block

Saved = Mapping[str, Any]
ADAMW = "adamw"
DEFAULTS = "defaults"
DEFAULTS_LABEL = ARMS[DEFAULTS].label
GIVEN_ADAMW = "best given AdamW, chosen in its favour"
"""What stands in for a tuned AdamW where none was searched: of the given rows the one with the best mean last step."""
MINUS = "−"  # as long as the plus above it
_WORDS = {"lr": "lr", "weight_decay": "decay", "beta2": "β2", "alpha": "α", "rho": "ρ", "lamb": "lamb"}


@dataclass(frozen=True)
class Diverged:
    """How many members of each side diverged, of how many pairs."""

    first: int
    second: int
    pairs: int

    @property
    def words(self) -> str:
        """Which side it was.

        >>> Diverged(1, 0, 3).words, Diverged(0, 2, 3).words, Diverged(1, 2, 3).words
        ('diverged (1 of 3)', 'no gain: the other side diverged (2 of 3)', 'both diverged (1 and 2 of 3)')
        """
        if self.first and self.second:
            return f"both diverged ({self.first} and {self.second} of {self.pairs})"
        if self.first:
            return f"diverged ({self.first} of {self.pairs})"
        return f"no gain: the other side diverged ({self.second} of {self.pairs})"


@dataclass(frozen=True)
class Gain:
    """How much better one list of seeds is than another, pair by pair: more is better, whichever way the metric goes.

    Attributes:
        value: Mean over the pairs; NaN where a member diverged, which no mean should hide.
        interval: Student's, 95%; None for one pair.
        bootstrap: The percentile bootstrap's, 95%; None for one pair.
        diverged: Which side diverged; None where none did.
    """

    value: float
    interval: tuple[float, float] | None
    bootstrap: tuple[float, float] | None
    diverged: Diverged | None = None

    @property
    def verdict(self) -> str:
        """``better``, ``worse``, or ``unclear`` where Student's interval holds zero or does not exist.

        One diverged seed makes the first side worse. The second side's makes the first better only if all its seeds
        diverged, and none of the first: a run that failed once proves little.

        >>> [Gain(math.nan, None, None, Diverged(*counts, 3)).verdict for counts in ((1, 0), (0, 3), (0, 1), (1, 1))]
        ['worse', 'better', 'unclear', 'unclear']
        """
        if self.diverged is not None:
            return _verdict_of(self.diverged)
        if self.interval is None or self.interval[0] <= 0 <= self.interval[1]:
            return "unclear"
        return "better" if self.interval[0] > 0 else "worse"


def _verdict_of(diverged: Diverged) -> str:
    if diverged.first:
        return "unclear" if diverged.second else "worse"
    return "better" if diverged.second == diverged.pairs else "unclear"


def gain(first: Sequence[float], second: Sequence[float], higher_is_better: bool) -> Gain:
    """The gain of the first over the second; without a number where a member diverged, and saying which side's.

    >>> gained = gain([0.2, 0.3], [0.4, 0.4], higher_is_better=False)
    >>> round(gained.value, 3), gained.verdict
    (0.15, 'unclear')
    >>> gain([0.2, math.nan], [0.4, 0.4], higher_is_better=False).diverged
    Diverged(first=1, second=0, pairs=2)
    """
    failed = [sum(not math.isfinite(value) for value in side) for side in (first, second)]
    if any(failed):
        return Gain(math.nan, None, None, Diverged(failed[0], failed[1], len(first)))
    better, worse = (first, second) if higher_is_better else (second, first)
    student = paired_difference(better, worse)
    if student.low is None or student.high is None:
        return Gain(student.value, None, None)
    drawn = bootstrap_difference(better, worse)
    ends = None if drawn.low is None or drawn.high is None else (drawn.low, drawn.high)
    return Gain(student.value, (student.low, student.high), ends)


def adamw_reference(study: StoredStudy) -> StoredRow | None:
    """The tuned AdamW; where none was searched, the given AdamW with the best mean last step on the report's seeds.

    The choice is made on the reported values, so it favours AdamW. None where there is no AdamW at all.
    """
    tuned = reading.find_row(study, ADAMW)
    if tuned is not None:
        return tuned
    given = [row for row in compared_rows(study) if row["arm"] == ADAMW and not row["chosen_for"]]
    return given[0] if given else None


def adamw_checkpoints(study: StoredStudy) -> list[float] | None:
    """Each seed's best checkpoint of the AdamW tuned for that; of the best given one where none was searched."""
    if reading.find_row(study, ADAMW) is not None:
        return reading.oracle(study)
    row, metric = adamw_reference(study), reading.primary(study)
    return None if row is None else reading.best(row, metric["name"], metric["higher_is_better"])


def adamw_words(study: StoredStudy) -> str:
    """Which AdamW the others are compared with, in words."""
    row = adamw_reference(study)
    if row is None:
        return "no AdamW"
    return "the tuned AdamW" if row["chosen_for"] else f"{row['label']} ({GIVEN_ADAMW})"


def gain_over_adamw(study: StoredStudy, row: StoredRow) -> Gain | None:
    """The last step of a row against that of :func:`adamw_reference`; None where there is no AdamW."""
    metric, reference = reading.primary(study), adamw_reference(study)
    if reference is None:
        return None
    name = metric["name"]
    return gain(reading.final(row, name), reading.final(reference, name), metric["higher_is_better"])


def gain_over_oracle(study: StoredStudy, row: StoredRow) -> Gain | None:
    """The last step of a row against :func:`adamw_checkpoints`; None where there is no AdamW."""
    metric, checkpoints = reading.primary(study), adamw_checkpoints(study)
    if checkpoints is None:
        return None
    return gain(reading.final(row, metric["name"]), checkpoints, metric["higher_is_better"])


def compared_rows(study: StoredStudy) -> list[StoredRow]:
    """What was given, and what each arm chose for its last step, the best first and the diverged at the end."""
    metric = reading.primary(study)
    sign = -1.0 if metric["higher_is_better"] else 1.0

    def place(row: StoredRow) -> tuple[bool, float]:
        mean = math.fsum(reading.final(row, metric["name"])) / len(row["seeds"])
        return (math.isnan(mean), 0.0 if math.isnan(mean) else sign * mean)

    shown = [row for row in reading.rows(study) if not row["chosen_for"] or "last" in row["chosen_for"]]
    return sorted(shown, key=place)


def best_gate(study: StoredStudy) -> StoredRow | None:
    """The searched gate whose chosen trial ended best on the tuning seeds; the report seeds chose nothing.

    It is the best of k gates, searched with k times AdamW's trials: say so where it is shown
    (:func:`poprisk_lab.pages.gate_choice.budget_words`), with the gate fixed in advance beside it.
    """
    return chosen_gate(study, "last")


def comparison_lines(saved: Saved) -> Iterator[RenderableType]:
    """A table for each study and what it was measured on, for a terminal."""
    for study in saved["result"]["studies"].values():
        head, *rows = comparison_table(study)
        table = Table(title=study["task"]["description"], title_justify="left", title_style="bold")
        for column, words in enumerate(head):
            table.add_column(words, justify="left" if column < 2 else "right", overflow="fold")
        for row, cells in zip(compared_rows(study), rows, strict=True):
            table.add_row(*cells, style="bold" if row["arm"] == DEFAULTS else "")
        yield table
    yield Text(table_note(saved))


def table_note(saved: Saved) -> str:
    """How to read the columns of the tables."""
    studies = saved["result"]["studies"].values()
    slots = {
        "seeds": max(len(row["seeds"]) for study in studies for row in study["rows"]),
        "trials": sorted({len(arm["trials"]) for study in studies for arm in study["arms"].values()}),
        "given": [study["task"]["name"] for study in studies if ADAMW not in study["arms"]],
        "given_adamw": GIVEN_ADAMW,
        "several": any(len(searched_gates(study)) > 1 for study in studies),
    }
    return render_block("poprisk_lab.pages", "note", slots, "comparison.md.jinja")


def comparison_table(study: StoredStudy) -> list[list[str]]:
    """Head and rows: label, hyper-parameters, last and best step, steps to the target, divergence, gains."""
    metric = reading.primary(study)
    waits = [] if metric["target"] is None else [f"steps to {metric['target']:g}"]
    head = [metric["name"], "hyper-parameters", "last step", "best step", *waits, "diverged"]
    head += ["gain over AdamW's last step", "gain over AdamW's best step"]
    return [head, *(_cells(study, metric, row) for row in compared_rows(study))]


def _cells(study: StoredStudy, metric: StoredMetric, row: StoredRow) -> list[str]:
    name, spec = metric["name"], metric["spec"]
    waits = [] if metric["target"] is None else [steps_words(study, row)]
    is_reference = row is adamw_reference(study)
    over_last = "–" if is_reference else gain_words(gain_over_adamw(study, row), spec)
    return [
        row["label"],
        hyper_words(study, row),
        mean_words(reading.final(row, name), spec),
        mean_words(reading.best(row, name, metric["higher_is_better"]), spec),
        *waits,
        f"{reading.failed(row)} of {len(row['seeds'])}" if reading.failed(row) else "no",
        over_last,
        gain_words(gain_over_oracle(study, row), spec),
    ]


def mean_words(values: Sequence[float], spec: str) -> str:
    """Mean ± standard error; how many diverged where one did.

    >>> mean_words([1.0, 3.0], ".1f"), mean_words([1.0, math.nan], ".1f")
    ('2.0 ± 1.0', 'diverged (1 of 2)')
    """
    diverged = sum(math.isnan(value) for value in values)
    if diverged:
        return f"diverged ({diverged} of {len(values)})"
    mean = mean_over_seeds(values)
    return f"{mean.value:{spec}}" + ("" if mean.standard_error is None else f" ± {mean.standard_error:{spec}}")


def gain_words(gained: Gain | None, spec: str, *, bootstrap: bool = True) -> str:
    """A gain with its intervals.

    >>> gain_words(Gain(0.5, (-0.25, 1.25), (0.1, 0.9)), ".2f")
    '+0.50 [−0.25, +1.25] (+0.10, +0.90)'
    >>> gain_words(None, ".2f")
    '–'
    """
    if gained is None:
        return "–"
    if gained.diverged is not None:
        return gained.diverged.words
    words = signed(gained.value, spec)
    if gained.interval is not None:
        words += f" [{', '.join(signed(end, spec) for end in gained.interval)}]"
    if bootstrap and gained.bootstrap is not None:
        words += f" ({', '.join(signed(end, spec) for end in gained.bootstrap)})"
    return words


def signed(value: float, spec: str) -> str:
    """With its sign, a proper minus, and none where nothing but zeros is left of the number.

    >>> signed(-0.5, ".1f"), signed(0.5, ".1f"), signed(-0.01, ".1f")
    ('−0.5', '+0.5', '0.0')
    """
    words = f"{value:+{spec}}"
    return words.replace("-", MINUS) if any(digit in words for digit in "123456789") else words[1:]


def steps_words(study: StoredStudy, row: StoredRow) -> str:
    """The median of the first steps at the target, over the seeds that met it, and how many did."""
    name = reading.primary(study)["name"]
    met = [step for step in reading.steps_to(study, row, name) if step is not None]
    return (
        f"{median(met):.0f} ({reading.reached(study, row, name)})"
        if met
        else f"– ({reading.reached(study, row, name)})"
    )


def hyper_words(study: StoredStudy, row: StoredRow) -> str:
    """What was chosen of what was searched; of a given setting the learning rate and all that is not usual."""
    hyper = row["hyper"]
    if row["chosen_for"]:
        names = [knob.removesuffix("_gap") for knob in study["arms"][row["arm"]]["search"]]
    else:
        names = [name for name in hyper if name == "lr" or hyper[name] != USUAL.get(name)]
    return ", ".join(f"{_WORDS.get(name, name)} {_number(hyper[name])}" for name in names if name in hyper)


def _number(value: float) -> str:
    """Three digits at most, an exponent without its zero; four where it is nearly one."""
    return f"{value:.4g}" if 0.9 <= value < 1 else f"{value:.2g}".replace("e-0", "e-")
