"""Table and verdicts of the PINN experiment, from its saved result: no number of ours is typed by hand."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredRow, StoredStudy
from poprisk_lab.pages.claims import Claim
from poprisk_lab.pages.comparison import DEFAULTS, Gain, gain, gain_words, hyper_words, mean_words
from poprisk_lab.pages.gate_choice import GATES, tuned_gates
from poprisk_lab.pages.paired_ratio import Ratio, steps_ratio
from poprisk_lab.paper.pinn.study import ADAMW_RATES, FULL, NO_WARMUP, adamw_label
from poprisk_lab.paper.pinn.task import CLEAN, ERROR, NOISY

Saved = Mapping[str, Any]
SPEC = ".3f"
BAR = 2.0  # "at most half the iterations of the best tuned AdamW"
QUICKER = math.nextafter(1.0, 2.0)  # an interval that begins at 1 does not exclude that both are alike


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's table (tab:pinn_ablation); no iterations where the target was missed."""

    best: float
    iterations: int | None


PAPER = {
    FULL: PaperRow(0.249, 1400),
    NO_WARMUP: PaperRow(0.298, 2500),
    adamw_label(1e-3): PaperRow(0.405, None),
    adamw_label(1e-4): PaperRow(0.309, 3300),
    adamw_label(5e-5): PaperRow(0.336, 6100),
    adamw_label(1.5e-5): PaperRow(0.726, None),
}
ADAMW_ROWS = tuple(adamw_label(lr) for lr in ADAMW_RATES)


def pinn_lines(saved: Saved) -> Iterator[RenderableType]:
    """Both tables, each beside the paper's where it has one, and the verdicts."""
    studies = saved["result"]["studies"]
    for name, paper in ((NOISY, PAPER), (CLEAN, {})):
        yield _table(studies[name], paper)
    yield Text(
        "Iterations: the median of the seeds, a seed that never reached 0.40 counting as never. ℓ2: mean ± standard "
        "error over seeds. Names with 'for …' were searched, and chosen by that question on another seed; whoever "
        "picks the best of several gates has had several times AdamW's trials."
    )
    for claim in claims_pinn(saved):
        yield Text(claim.sentence, style="bold")
    yield Text(control_sentence(studies[CLEAN]), style="bold")


def _table(study: StoredStudy, paper: Mapping[str, PaperRow]) -> Table:
    table = Table(title=study["task"]["description"], title_justify="left", title_style="bold")
    head = ["", "hyper-parameters", "best ℓ2", "last ℓ2", "iterations to 0.40"]
    for column, words in enumerate(head + ["paper: best ℓ2", "paper: iterations"] * bool(paper)):
        table.add_column(words, justify="left" if column < 2 else "right", overflow="fold")
    for row in reading.rows(study):
        cells = [
            row_words(row),
            hyper_words(study, row),
            mean_words(reading.best(row, ERROR, higher_is_better=False), SPEC),
            mean_words(reading.final(row, ERROR), SPEC),
            iterations_words(study, row),
        ]
        published = paper.get(row["label"])
        if paper:
            cells += ["–", "–"] if published is None else [f"{published.best:.3f}", _paper_words(published)]
        table.add_row(*cells, style="bold" if row["arm"] == DEFAULTS else "")
    return table


def row_words(row: StoredRow) -> str:
    """A row's label, with what it was chosen for.

    >>> row_words({"label": "AdamW", "chosen_for": ["last", "best"]})
    'AdamW, for last and best'
    """
    return row["label"] + (f", for {' and '.join(row['chosen_for'])}" if row["chosen_for"] else "")


def iterations(study: StoredStudy, row: StoredRow) -> float:
    """The median over seeds of the first iteration at the target; infinite where more seeds missed than not."""
    return median(math.inf if step is None else step for step in reading.steps_to(study, row, ERROR))


def iterations_words(study: StoredStudy, row: StoredRow) -> str:
    """The median and how many seeds reached the target."""
    middle = iterations(study, row)
    words = f"{middle:,.0f}" if math.isfinite(middle) else f"> {study['task']['steps']:,}"
    return f"{words} ({reading.reached(study, row, ERROR)})"


def fastest(study: StoredStudy, rows: Sequence[StoredRow]) -> StoredRow:
    """The row with the fewest iterations to the target; of several, or of none, the one with the lowest error."""
    return min(rows, key=lambda row: (iterations(study, row), _mean(reading.best(row, ERROR, higher_is_better=False))))


def best_paper_adamw(study: StoredStudy) -> StoredRow:
    """AdamW at that of the paper's four learning rates which reaches the target first."""
    return fastest(study, [reading.row(study, label) for label in ADAMW_ROWS])


def claims_pinn(saved: Saved) -> list[Claim]:
    """The paper's claims on its PINN beside ours: the time to the target, the best error, the warm-up."""
    study = saved["result"]["studies"][NOISY]
    return [_speed_claim(study), _best_claim(study), _warmup_claim(study)]


def _speed_claim(study: StoredStudy) -> Claim:
    full, adamw, readings = reading.row(study, FULL), best_paper_adamw(study), _readings(study)
    quickest = fastest(study, readings)
    exploratory = f"the quickest of {len(readings)} given gates, picked on these seeds and so exploratory"
    shared = (
        f"{iterations_words(study, full)} against {iterations_words(study, adamw)} of {adamw['label']}, the best of "
        f"{len(ADAMW_ROWS)} rates, chosen in its favour; {exploratory} ({quickest['label']}): "
        f"{iterations_words(study, quickest)}"
    )
    sentence = (
        f"{_steps_verdict(study, full, adamw, BAR)} with AdamW's settings (bar: the whole interval at {BAR:g}× fewer "
        f"iterations or above): {_compared(study, full, adamw)}"
    )
    if quickest is not full:
        sentence += f"; {exploratory}: {_compared(study, quickest, adamw)}"
    gates, tuned = tuned_gates(study, "target"), reading.find_row(study, "adamw", "target")
    if not gates or tuned is None:
        missing = " and ".join(words for words, there in (("no gate", gates), ("no AdamW", tuned)) if not there)
        equal = f"{missing} of the trials reached 0.40 on the tuning seeds"
        sentence += f"; under tuning {equal}."
    else:
        ours = "; ".join(f"{words}: {iterations_words(study, row)}" for words, row in gates.items())
        equal = f"{ours}; AdamW: {iterations_words(study, tuned)}"
        sentence += "; under tuning " + "; ".join(
            f"{_steps_verdict(study, row, tuned, BAR).lower()} for {words}: {_compared(study, row, tuned)}"
            for words, row in gates.items()
        )
        sentence += "."
    return Claim(
        claim="PINN: relative ℓ2 ≤ 0.40 in 2.4× fewer iterations than the best AdamW (fig. pinn_convection)",
        paper="1,400 against 3,300 iterations: 2.36× fewer",
        paper_conditions=shared,
        equal_tuning=equal,
        sentence=sentence,
    )


def _best_claim(study: StoredStudy) -> Claim:
    full, four = reading.row(study, FULL), [reading.row(study, label) for label in ADAMW_ROWS]
    adamw = min(four, key=lambda row: _mean(_bests(row)))
    gained = gain(_bests(full), _bests(adamw), higher_is_better=False)
    shared = (
        f"{mean_words(_bests(full), SPEC)} against {mean_words(_bests(adamw), SPEC)} of {adamw['label']}; gain "
        f"{gain_words(gained, SPEC)}"
    )
    gates, tuned = tuned_gates(study, "best"), reading.find_row(study, "adamw", "best")
    equal, after = "nothing was searched", ""
    if gates and tuned is not None:
        gains = {words: gain(_bests(row), _bests(tuned), higher_is_better=False) for words, row in gates.items()}
        ours = "; ".join(
            f"{words}: {mean_words(_bests(row), SPEC)}, gain {gain_words(gains[words], SPEC)}"
            for words, row in gates.items()
        )
        equal = f"AdamW: {mean_words(_bests(tuned), SPEC)}; {ours}"
        after = "; under tuning " + "; ".join(
            f"that of {words} is {_gain_verdict(gained)}" for words, gained in gains.items()
        )
    return Claim(
        claim="PINN: a lower best error than every AdamW (tab. pinn_ablation)",
        paper="ℓ2 0.249 against 0.309",
        paper_conditions=shared,
        equal_tuning=equal,
        sentence=f"With everything shared the gate's best error is {_gain_verdict(gained)}{after}.",
    )


def _warmup_claim(study: StoredStudy) -> Claim:
    full, without = reading.row(study, FULL), reading.row(study, NO_WARMUP)
    return Claim(
        claim="PINN: an ungated warm-up makes the gate quicker (tab. pinn_ablation)",
        paper="1,400 against 2,500 iterations: 1.8× fewer",
        paper_conditions=f"{iterations_words(study, full)} against {iterations_words(study, without)}",
        equal_tuning="not searched",
        sentence=f"{_steps_verdict(study, full, without, QUICKER)} (bar: the whole interval above 1×): "
        f"{_compared(study, full, without)}.",
    )


def control_sentence(study: StoredStudy) -> str:
    """What the defaults cost without noise, against the better of the AdamWs there."""
    defaults = next(row for row in reading.rows(study) if row["arm"] == DEFAULTS)
    adamw = [row for row in reading.rows(study) if row["arm"] == "adamw"]
    best = min(adamw, key=lambda row: _mean(reading.final(row, ERROR)))
    return (
        f"Without noise the last ℓ2 is {mean_words(reading.final(defaults, ERROR), '.4f')} with PopRiskAdamW's "
        f"defaults and {mean_words(reading.final(best, ERROR), '.4f')} with {best['label']}."
    )


def _readings(study: StoredStudy) -> list[StoredRow]:
    """Every given row with a gate: what the paper might have meant, and the library's defaults."""
    return [row for row in reading.rows(study) if not row["chosen_for"] and row["arm"] in (*GATES, DEFAULTS)]


def _bests(row: StoredRow) -> list[float]:
    return reading.best(row, ERROR, higher_is_better=False)


def _mean(values: Sequence[float]) -> float:
    return math.inf if any(math.isnan(value) for value in values) else math.fsum(values) / len(values)


def _ratio(study: StoredStudy, quick: StoredRow, slow: StoredRow) -> Ratio | None:
    """How many times fewer iterations the first row takes, seed by seed; None where it did not always arrive."""
    waits = [reading.steps_to(study, row, ERROR) for row in (slow, quick)]
    return steps_ratio(waits[0], waits[1], study["evaluation_steps"])


def _steps_verdict(study: StoredStudy, quick: StoredRow, slow: StoredRow, bar: float) -> str:
    """By the interval of the paired ratio; not held where the first misses a target that the second always meets."""
    ratio = _ratio(study, quick, slow)
    if ratio is not None:
        return ratio.verdict(bar)
    return "Undecided" if None in reading.steps_to(study, slow, ERROR) else "Not held"


def _compared(study: StoredStudy, quick: StoredRow, slow: StoredRow) -> str:
    """A clause on two rows' iterations to the target."""
    ratio, first, second = _ratio(study, quick, slow), quick["label"], slow["label"]
    if ratio is None:
        waits = [*reading.steps_to(study, quick, ERROR), *reading.steps_to(study, slow, ERROR)]
        if all(step is None for step in waits):
            return f"neither {first} nor {second} reaches 0.40"
        return f"{first} reaches 0.40 in {reading.reached(study, quick, ERROR)} seeds, {second} in " + (
            reading.reached(study, slow, ERROR)
        )
    if ratio.at_least:
        return (
            f"{first} takes {ratio.words} fewer iterations than {second}, which reaches 0.40 in "
            f"{reading.reached(study, slow, ERROR)} seeds (a lower bound)"
        )
    if ratio.value >= 1:
        return f"{first} takes {ratio.words} fewer iterations than {second}"
    return f"{first} takes {ratio.inverse.words} the iterations of {second}"


def _gain_verdict(gained: Gain) -> str:
    if gained.diverged is not None:
        return f"not comparable, since a run diverged ({gained.diverged.words})"
    words = {"better": "lower than AdamW's", "worse": "higher than AdamW's", "unclear": "not told apart from AdamW's"}
    return f"{words[gained.verdict]} (gain {gain_words(gained, SPEC, bootstrap=False)})"


def _paper_words(published: PaperRow) -> str:
    return "> 8,000" if published.iterations is None else f"{published.iterations:,}"
