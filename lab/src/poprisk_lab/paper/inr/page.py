"""Table and verdicts of the INR experiment, from its saved result: no number of ours is typed by hand."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredRow, StoredStudy
from poprisk_lab.pages.claims import Claim
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
from poprisk_lab.paper.inr.study import ADAMW, SHARED
from poprisk_lab.paper.inr.task import CLEAN_PSNR, HIGH_POWER, NOISY_PSNR

Saved = Mapping[str, Any]
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


def inr_lines(saved: Saved) -> Iterator[RenderableType]:
    """A table for each photograph and for the control, and the verdicts."""
    for study in saved["result"]["studies"].values():
        yield _table(study)
    yield Text(
        "PSNR in dB, power as mean square: mean ± standard error over seeds. 'gain': the last step against the best "
        "checkpoint of the AdamW tuned for that, Student's 95% interval in brackets, the bootstrap's in parentheses. "
        "Whoever picks the best of several gates has had several times AdamW's trials."
    )
    for claim in claims_inr(saved):
        yield Text(claim.sentence, style="bold")
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


def claims_inr(saved: Saved) -> list[Claim]:
    """The paper's claims on its INR beside ours: no early stopping, and less fine noise in the picture."""
    studies = noisy_studies(saved)
    return [_stopping_claim(studies), _power_claim(studies)]


def _stopping_claim(studies: Mapping[str, StoredStudy]) -> Claim:
    shared = {image: _beyond_best(reading.row(s, SHARED), reading.row(s, ADAMW)) for image, s in studies.items()}
    given = {image: _beyond_best(defaults_row(s), reading.row(s, ADAMW)) for image, s in studies.items()}
    defaults = {image: _beyond_oracle(s, defaults_row(s)) for image, s in studies.items()}
    tuned = {image: _beyond_oracle(s, chosen_gate(s, "last")) for image, s in studies.items()}
    fixed = {image: _beyond_oracle(s, fixed_gate(s, "last")) for image, s in studies.items()}
    return Claim(
        claim="INR: no early stopping; the last step is at or beyond AdamW's best step (fig. inr_denoising)",
        paper="AdamW peaks and degrades, the gate keeps improving (no figure given)",
        paper_conditions=(
            f"paper's rule at AdamW's lr, last step over AdamW's best, dB: {_by_image(shared)}; "
            f"PopRiskAdamW's defaults: {_by_image(given)}"
        ),
        equal_tuning=(
            f"last step over the best checkpoint of {_adamws(studies)}, dB: the best tuned gate "
            f"({_budgets(studies)}) {_by_image(tuned)}; the gate fixed in advance {_by_image(fixed)}; "
            f"PopRiskAdamW's defaults {_by_image(defaults)}"
        ),
        sentence=(
            f"{_verdict(shared)} at AdamW's lr (the whole interval must be at or beyond AdamW's best step): so it is "
            f"for {_count(shared)} with the paper's rule and for {_count(given)} with PopRiskAdamW's defaults; against "
            f"the best checkpoint of {_adamws(studies)}, for {_count(tuned)} with the best tuned gate "
            f"({_budgets(studies)}), for {_count(fixed)} with the gate fixed in advance and for {_count(defaults)} "
            "with the defaults."
        ),
    )


def _power_claim(studies: Mapping[str, StoredStudy]) -> Claim:
    shared = {i: _times_less(reading.row(s, ADAMW), reading.row(s, SHARED)) for i, s in studies.items()}
    given = {i: _times_less(reading.row(s, ADAMW), defaults_row(s)) for i, s in studies.items()}
    tuned = {i: _times_less(adamw_reference(s), chosen_gate(s, "last")) for i, s in studies.items()}
    fixed = {i: _times_less(adamw_reference(s), fixed_gate(s, "last")) for i, s in studies.items()}
    verdicts = {bar: _together([less.verdict(bar) for less in shared.values()]) for bar in (BAR, PAPER_RATIO)}
    return Claim(
        claim=f"INR: residual power at high frequencies {PAPER_RATIO:g}× lower at the last step (fig. inr_denoising)",
        paper=f"{PAPER_RATIO:g}× lower",
        paper_conditions=f"paper's rule {_times(shared)} lower; PopRiskAdamW's defaults {_times(given)}",
        equal_tuning=f"against {_adamws(studies)}: the best tuned gate ({_budgets(studies)}) {_times(tuned)} lower; "
        f"the gate fixed in advance {_times(fixed)}",
        sentence=(
            f"{verdicts[BAR]} at AdamW's lr at the bar of {BAR:g}×, {verdicts[PAPER_RATIO].lower()} at the paper's "
            f"{PAPER_RATIO:g}× (the whole interval must be at the bar or above): AdamW's power is {_times(shared)} "
            f"that of the paper's rule and {_times(given)} that of PopRiskAdamW's defaults; after tuning "
            f"{_times(tuned)} that of the best gate ({_budgets(studies)}) and {_times(fixed)} that of the gate fixed "
            "in advance."
        ),
    )


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
    return (
        f"Without noise the last PSNR is {mean_words(reading.final(defaults, CLEAN_PSNR), SPEC)} dB with "
        f"PopRiskAdamW's defaults, {mean_words(reading.final(adamw, CLEAN_PSNR), SPEC)} with {adamw_words(study)} "
        f"(difference {gain_words(costs, SPEC, bootstrap=False)}) and "
        f"{mean_words(reading.final(reading.row(study, SHARED), CLEAN_PSNR), SPEC)} with the paper's rule at "
        f"AdamW's lr."
    )


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
