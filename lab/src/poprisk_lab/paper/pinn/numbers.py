"""Numbers of the PINN study, from its saved result: tables for a terminal, and the verdicts on three claims."""

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
from poprisk_lab.pages.claims import VerdictRow, verdict_row
from poprisk_lab.pages.comparison import DEFAULTS, Gain, gain, gain_words, hyper_words, mean_words
from poprisk_lab.pages.gate_choice import GATES, tuned_gates
from poprisk_lab.pages.paired_ratio import Ratio, steps_ratio
from poprisk_lab.pages.template import render_block
from poprisk_lab.paper.pinn.study import ADAMW_RATES, FULL, NO_WARMUP, adamw_label
from poprisk_lab.paper.pinn.task import CLEAN, ERROR, NOISY

Saved = Mapping[str, Any]
PACKAGE = "poprisk_lab.paper.pinn"
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


def lines(saved: Saved) -> Iterator[RenderableType]:
    """Both tables, each beside the paper's where it has one, and the verdicts."""
    studies = saved["result"]["studies"]
    for name, paper in ((NOISY, PAPER), (CLEAN, {})):
        yield _table(studies[name], paper)
    yield Text(render_block(PACKAGE, "note", {}))
    for claim in claims(saved):
        yield Text(claim.verdict, style="bold")
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


def claims(saved: Saved) -> list[VerdictRow]:
    """The paper's claims on its PINN beside ours: the time to the target, the best error, the warm-up."""
    study = saved["result"]["studies"][NOISY]
    return [_speed_claim(study), _best_claim(study), _warmup_claim(study)]


def _speed_claim(study: StoredStudy) -> VerdictRow:
    full, adamw, readings = reading.row(study, FULL), best_paper_adamw(study), _readings(study)
    quickest = fastest(study, readings)
    gates, tuned = tuned_gates(study, "target"), reading.find_row(study, "adamw", "target")
    is_tuned = bool(gates) and tuned is not None
    slots: dict[str, Any] = {
        "full": iterations_words(study, full),
        "adamw": {"label": adamw["label"], "iterations": iterations_words(study, adamw)},
        "rates": len(ADAMW_ROWS),
        "exploratory": render_block(PACKAGE, "exploratory", {"given_gates": len(readings)}),
        "quickest": {
            "label": quickest["label"],
            "iterations": iterations_words(study, quickest),
            "compared": None if quickest is full else _compared(study, quickest, adamw),
        },
        "state": _steps_verdict(study, full, adamw, BAR),
        "bar": BAR,
        "compared": _compared(study, full, adamw),
        "missing": [words for words, there in (("no gate", gates), ("no AdamW", tuned)) if not there],
        "tuned": iterations_words(study, tuned) if gates and tuned is not None else None,
        "gates": [_tuned_gate(study, label, row, tuned) for label, row in gates.items() if is_tuned and tuned],
    }
    slots["equal_tuning"] = render_block(PACKAGE, "speed_equal_tuning", slots)
    return verdict_row(PACKAGE, slots, "speed")


def _tuned_gate(study: StoredStudy, label: str, row: StoredRow, adamw: StoredRow) -> dict[str, str]:
    return {
        "label": label,
        "iterations": iterations_words(study, row),
        "state": _steps_verdict(study, row, adamw, BAR),
        "compared": _compared(study, row, adamw),
    }


def _best_claim(study: StoredStudy) -> VerdictRow:
    full, four = reading.row(study, FULL), [reading.row(study, label) for label in ADAMW_ROWS]
    adamw = min(four, key=lambda row: _mean(_bests(row)))
    gained = gain(_bests(full), _bests(adamw), higher_is_better=False)
    gates, tuned = tuned_gates(study, "best"), reading.find_row(study, "adamw", "best")
    slots = {
        "full": mean_words(_bests(full), SPEC),
        "adamw": {"label": adamw["label"], "best": mean_words(_bests(adamw), SPEC)},
        "gain": gain_words(gained, SPEC),
        "outcome": _outcome(gained),
        "tuned": None if tuned is None else mean_words(_bests(tuned), SPEC),
        "gates": [] if tuned is None else [_best_gate(label, row, tuned) for label, row in gates.items()],
    }
    return verdict_row(PACKAGE, slots, "best")


def _best_gate(label: str, row: StoredRow, adamw: StoredRow) -> dict[str, str]:
    gained = gain(_bests(row), _bests(adamw), higher_is_better=False)
    return {
        "label": label,
        "best": mean_words(_bests(row), SPEC),
        "gain": gain_words(gained, SPEC),
        "outcome": _outcome(gained),
    }


def _warmup_claim(study: StoredStudy) -> VerdictRow:
    full, without = reading.row(study, FULL), reading.row(study, NO_WARMUP)
    slots = {
        "full": iterations_words(study, full),
        "without": iterations_words(study, without),
        "state": _steps_verdict(study, full, without, QUICKER),
        "compared": _compared(study, full, without),
    }
    return verdict_row(PACKAGE, slots, "warmup")


def control_sentence(study: StoredStudy) -> str:
    """What the defaults cost without noise, against the better of the AdamWs there."""
    defaults = next(row for row in reading.rows(study) if row["arm"] == DEFAULTS)
    adamw = [row for row in reading.rows(study) if row["arm"] == "adamw"]
    best = min(adamw, key=lambda row: _mean(reading.final(row, ERROR)))
    slots = {
        "defaults": mean_words(reading.final(defaults, ERROR), ".4f"),
        "adamw": {"label": best["label"], "last": mean_words(reading.final(best, ERROR), ".4f")},
    }
    return render_block(PACKAGE, "control", slots)


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
    waits = [*reading.steps_to(study, quick, ERROR), *reading.steps_to(study, slow, ERROR)]
    slots = {
        "ratio": _ratio(study, quick, slow),
        "first": quick["label"],
        "second": slow["label"],
        "neither": all(step is None for step in waits),
        "first_reached": reading.reached(study, quick, ERROR),
        "second_reached": reading.reached(study, slow, ERROR),
    }
    return render_block(PACKAGE, "compared", slots)


def _outcome(gained: Gain) -> str:
    """Lower or higher than AdamW's, with the gain."""
    return render_block(PACKAGE, "outcome", {"gained": gained, "words": gain_words(gained, SPEC, bootstrap=False)})


def _paper_words(published: PaperRow) -> str:
    return "> 8,000" if published.iterations is None else f"{published.iterations:,}"
