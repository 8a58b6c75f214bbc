"""Numbers of the INR study, from its saved result: tables for a terminal, and the verdicts on two claims."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredRow, StoredStudy
from poprisk_lab.pages.claims import VerdictRow, verdict_row
from poprisk_lab.pages.comparison import (
    DEFAULTS,
    Gain,
    adamw_checkpoints,
    adamw_reference,
    adamw_words,
    gain,
    gain_words,
    hyper_words,
    mean_words,
)
from poprisk_lab.pages.gate_choice import budget_words, chosen_gate, fixed_gate
from poprisk_lab.pages.paired_ratio import Ratio, paired_ratio
from poprisk_lab.pages.template import render_block
from poprisk_lab.paper.inr.study import ADAMW, SHARED
from poprisk_lab.paper.inr.task import CLEAN_PSNR, HIGH_POWER, NOISY_PSNR

Saved = Mapping[str, Any]
PACKAGE = "poprisk_lab.paper.inr"
SPEC = ".2f"
PAPER_RATIO = 8.5
BAR = 5.0  # "at least 5x lower"


def noisy_studies(saved: Saved) -> dict[str, StoredStudy]:
    """The studies with noise by their photograph's name, in stored order."""
    studies = saved["result"]["studies"].values()
    return {s["task"]["config"]["image"]: s for s in studies if s["task"]["config"]["noise"] > 0}


def clean_study(saved: Saved) -> StoredStudy:
    """The control without noise."""
    return next(s for s in saved["result"]["studies"].values() if s["task"]["config"]["noise"] == 0)


def defaults_row(study: StoredStudy) -> StoredRow:
    """PopRiskAdamW as it comes."""
    return next(row for row in reading.rows(study) if row["arm"] == DEFAULTS)


def lines(saved: Saved) -> Iterator[RenderableType]:
    """A table for each photograph and for the control, and the verdicts."""
    for study in saved["result"]["studies"].values():
        yield _table(study)
    yield Text(render_block(PACKAGE, "note", {}))
    for claim in claims(saved):
        yield Text(claim.verdict, style="bold")
    yield Text(control_sentence(clean_study(saved)), style="bold")


def _table(study: StoredStudy) -> Table:
    table = Table(title=study["task"]["description"], title_justify="left", title_style="bold")
    head = [
        "",
        "hyper-parameters",
        "last PSNR",
        "best PSNR",
        "at step",
        "PSNR of the fit",
        "high-frequency power",
        "gain",
    ]
    for column, words in enumerate(head):
        table.add_column(words, justify="left" if column < 2 else "right", overflow="fold")
    reference = adamw_checkpoints(study)
    for row in reading.rows(study):
        if row["chosen_for"] and "last" not in row["chosen_for"]:
            continue
        last = reading.final(row, CLEAN_PSNR)
        steps = [step for step in reading.best_step(study, row, CLEAN_PSNR) if step is not None]
        table.add_row(
            row["label"],
            hyper_words(study, row),
            mean_words(last, SPEC),
            mean_words(reading.best(row, CLEAN_PSNR, higher_is_better=True), SPEC),
            f"{min(steps)}-{max(steps)}" if steps else "–",
            mean_words(reading.final(row, NOISY_PSNR), SPEC),
            mean_words(reading.final(row, HIGH_POWER), ".1e"),
            "–" if reference is None else gain_words(gain(last, reference, higher_is_better=True), SPEC),
            style="bold" if row["arm"] == DEFAULTS else "",
        )
    return table


def claims(saved: Saved) -> list[VerdictRow]:
    """The paper's claims on its INR beside ours: no early stopping, and less fine noise in the picture."""
    studies = noisy_studies(saved)
    return [_stopping_claim(studies), _power_claim(studies)]


def _stopping_claim(studies: Mapping[str, StoredStudy]) -> VerdictRow:
    shared = {image: _beyond_best(reading.row(s, SHARED), reading.row(s, ADAMW)) for image, s in studies.items()}
    given = {image: _beyond_best(defaults_row(s), reading.row(s, ADAMW)) for image, s in studies.items()}
    gains = {
        "shared": shared,
        "given": given,
        "defaults": {image: _beyond_oracle(s, defaults_row(s)) for image, s in studies.items()},
        "tuned": {image: _beyond_oracle(s, chosen_gate(s, "last")) for image, s in studies.items()},
        "fixed": {image: _beyond_oracle(s, fixed_gate(s, "last")) for image, s in studies.items()},
    }
    slots = {name: {"gains": _by_image(found), "held": _count(found)} for name, found in gains.items()}
    more = {"state": _verdict(shared), "adamw": _adamws(studies), "budget": _budgets(studies)}
    return verdict_row(PACKAGE, {**slots, **more}, "stopping")


def _power_claim(studies: Mapping[str, StoredStudy]) -> VerdictRow:
    shared = {i: _times_less(reading.row(s, ADAMW), reading.row(s, SHARED)) for i, s in studies.items()}
    given = {i: _times_less(reading.row(s, ADAMW), defaults_row(s)) for i, s in studies.items()}
    tuned = {i: _times_less(adamw_reference(s), chosen_gate(s, "last")) for i, s in studies.items()}
    fixed = {i: _times_less(adamw_reference(s), fixed_gate(s, "last")) for i, s in studies.items()}
    verdicts = {bar: _together([less.verdict(bar) for less in shared.values()]) for bar in (BAR, PAPER_RATIO)}
    slots = {
        "shared": _times(shared),
        "given": _times(given),
        "tuned": _times(tuned),
        "fixed": _times(fixed),
        "state": verdicts[BAR],
        "paper_state": verdicts[PAPER_RATIO],
        "bar": BAR,
        "paper_ratio": PAPER_RATIO,
        "adamw": _adamws(studies),
        "budget": _budgets(studies),
    }
    return verdict_row(PACKAGE, slots, "power")


def _budgets(studies: Mapping[str, StoredStudy]) -> str:
    """What was spent on the gates, once where all photographs agree."""
    return _once(studies, budget_words)


def _adamws(studies: Mapping[str, StoredStudy]) -> str:
    return _once(studies, adamw_words)


def _once(studies: Mapping[str, StoredStudy], words: Callable[[StoredStudy], str]) -> str:
    found = {image: words(study) for image, study in studies.items()}
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    return "; ".join(f"{image}: {each}" for image, each in found.items())


def control_sentence(study: StoredStudy) -> str:
    """What the defaults and the paper's rule cost on the photograph without noise."""
    defaults, adamw = defaults_row(study), adamw_reference(study) or reading.row(study, ADAMW)
    costs = gain(reading.final(defaults, CLEAN_PSNR), reading.final(adamw, CLEAN_PSNR), higher_is_better=True)
    slots = {
        "defaults": mean_words(reading.final(defaults, CLEAN_PSNR), SPEC),
        "adamw": mean_words(reading.final(adamw, CLEAN_PSNR), SPEC),
        "adamw_words": adamw_words(study),
        "difference": gain_words(costs, SPEC, bootstrap=False),
        "rule": mean_words(reading.final(reading.row(study, SHARED), CLEAN_PSNR), SPEC),
    }
    return render_block(PACKAGE, "control", slots)


def _beyond_best(row: StoredRow, adamw: StoredRow) -> Gain:
    best = reading.best(adamw, CLEAN_PSNR, higher_is_better=True)
    return gain(reading.final(row, CLEAN_PSNR), best, higher_is_better=True)


def _beyond_oracle(study: StoredStudy, row: StoredRow | None) -> Gain | None:
    checkpoints = adamw_checkpoints(study)
    if row is None or checkpoints is None:
        return None
    return gain(reading.final(row, CLEAN_PSNR), checkpoints, higher_is_better=True)


@dataclass(frozen=True)
class _TimesLess:
    """How many times one row's power at the last step is another's; no ratio where a side diverged or is not there."""

    ratio: Ratio | None
    gate_diverged: bool = False
    adamw_diverged: bool = False

    @property
    def words(self) -> str:
        if self.ratio is not None:
            return self.ratio.words
        sides = (("the gate", self.gate_diverged), ("AdamW", self.adamw_diverged))
        return f"({' and '.join(who for who, failed in sides if failed)} diverged)" if any(s for _, s in sides) else "–"

    def verdict(self, bar: float) -> str:
        if self.ratio is not None:
            return self.ratio.verdict(bar)
        return "Not held" if self.gate_diverged and not self.adamw_diverged else "Undecided"


def _times_less(adamw: StoredRow | None, gate: StoredRow | None) -> _TimesLess:
    if adamw is None or gate is None:
        return _TimesLess(None)
    noisy, kept = (reading.final(row, HIGH_POWER) for row in (adamw, gate))
    failed = [any(not math.isfinite(value) for value in values) for values in (kept, noisy)]
    return _TimesLess(paired_ratio(noisy, kept), *failed)


def _verdict(gains: Mapping[str, Gain | None]) -> str:
    """Of all photographs together."""
    return _together([_state(gained) for gained in gains.values()])


def _state(gained: Gain | None) -> str:
    """Held where the whole interval is at zero or above, not held where it is below; a point estimate decides nothing.

    >>> [_state(Gain(0.1, ends, None)) for ends in ((0.0, 0.2), (-0.1, 0.3), (-0.3, -0.1), None)]
    ['Held', 'Undecided', 'Not held', 'Undecided']
    """
    if gained is None:
        return "Undecided"
    if gained.interval is None:  # one seed, or a side diverged
        return {"better": "Held", "worse": "Not held", "unclear": "Undecided"}[gained.verdict]
    return "Held" if gained.interval[0] >= 0 else "Not held" if gained.interval[1] < 0 else "Undecided"


def _together(states: list[str]) -> str:
    """One word for all photographs.

    >>> _together(["Held", "Held"]), _together(["Held", "Undecided"]), _together(["Not held", "Undecided"])
    ('Held', 'Undecided', 'Not held')
    >>> _together(["Held", "Not held"])
    'Partly held'
    """
    if "Not held" in states:
        return "Partly held" if "Held" in states else "Not held"
    return "Held" if set(states) == {"Held"} else "Undecided"


def _count(gains: Mapping[str, Gain | None]) -> str:
    states = [_state(gained) for gained in gains.values()]
    undecided = states.count("Undecided")
    return f"{states.count('Held')} of {len(states)} photographs" + (f" ({undecided} undecided)" if undecided else "")


def _by_image(gains: Mapping[str, Gain | None]) -> str:
    return ", ".join(f"{image} {gain_words(g, SPEC, bootstrap=False)}" for image, g in gains.items())


def _times(found: Mapping[str, _TimesLess]) -> str:
    """Each photograph's ratio with its interval.

    >>> _times({"astronaut": _TimesLess(Ratio(8.54, 7.0, 10.0, 3)), "coffee": _TimesLess(None, gate_diverged=True)})
    '8.5× [7.0, 10.0] (astronaut), (the gate diverged) (coffee)'
    """
    return ", ".join(f"{each.words} ({image})" for image, each in found.items())
