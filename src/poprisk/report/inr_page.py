"""Table and verdicts of the INR experiment, from its saved result: no number of ours is typed by hand."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk.experiments.comparison import reading
from poprisk.experiments.comparison.reading import StoredRow, StoredStudy
from poprisk.experiments.inr import ADAMW, SHARED
from poprisk.experiments.inr_task import CLEAN_PSNR, HIGH_POWER, NOISY_PSNR
from poprisk.report.claims import Claim
from poprisk.report.comparison_page import DEFAULTS, Gain, gain, gain_words, hyper_words, mean_words
from poprisk.report.gate_choice import chosen_gate

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
        "checkpoint of the AdamW tuned for that, Student's 95% interval in brackets, the bootstrap's in parentheses."
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
    reference = reading.oracle(study)
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
            gain_words(gain(last, reference, higher_is_better=True), SPEC),
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
    return Claim(
        claim="INR: no early stopping; the last step is at or beyond AdamW's best step (fig. inr_denoising)",
        paper="AdamW peaks and degrades, the gate keeps improving (no figure given)",
        paper_conditions=(
            f"paper's rule at AdamW's lr, last step over AdamW's best, dB: {_by_image(shared)}; "
            f"PopRiskAdamW's defaults: {_by_image(given)}"
        ),
        equal_tuning=(
            f"last step over the tuned AdamW's best checkpoint, dB: the tuned gate {_by_image(tuned)}; "
            f"PopRiskAdamW's defaults {_by_image(defaults)}"
        ),
        sentence=(
            f"{_verdict(shared)} at AdamW's lr: on average the last step is at or beyond AdamW's best step for "
            f"{_count(shared)} with the paper's rule and for {_count(given)} with PopRiskAdamW's defaults; against the "
            f"best checkpoint of a tuned AdamW, for {_count(tuned)} with the tuned gate and for {_count(defaults)} "
            "with the defaults."
        ),
    )


def _power_claim(studies: Mapping[str, StoredStudy]) -> Claim:
    shared = {i: _power_ratio(reading.row(s, ADAMW), reading.row(s, SHARED)) for i, s in studies.items()}
    given = {i: _power_ratio(reading.row(s, ADAMW), defaults_row(s)) for i, s in studies.items()}
    tuned = {i: _power_ratio(reading.find_row(s, "adamw"), chosen_gate(s, "last")) for i, s in studies.items()}
    verdict = "Held" if min(shared.values()) >= BAR else "Not held"
    return Claim(
        claim="INR: residual power at high frequencies 8.5× lower at the last step (fig. inr_denoising)",
        paper=f"{PAPER_RATIO:g}× lower",
        paper_conditions=f"paper's rule {_times(shared)} times lower; PopRiskAdamW's defaults {_times(given)}",
        equal_tuning=f"tuned gate against tuned AdamW: {_times(tuned)} times lower",
        sentence=(
            f"{verdict} at AdamW's lr (bar {BAR:g}×): AdamW's power is {_times(shared)} times that of the paper's rule "
            f"and {_times(given)} times that of PopRiskAdamW's defaults; after equal tuning {_times(tuned)} times that "
            "of the gate."
        ),
    )


def control_sentence(study: StoredStudy) -> str:
    """What the defaults and the paper's rule cost on the photograph without noise."""
    tuned, defaults = reading.find_row(study, "adamw"), defaults_row(study)
    adamw = reading.row(study, ADAMW) if tuned is None else tuned
    costs = gain(reading.final(defaults, CLEAN_PSNR), reading.final(adamw, CLEAN_PSNR), higher_is_better=True)
    return (
        f"Without noise the last PSNR is {mean_words(reading.final(defaults, CLEAN_PSNR), SPEC)} dB with "
        f"PopRiskAdamW's defaults, {mean_words(reading.final(adamw, CLEAN_PSNR), SPEC)} with the tuned AdamW "
        f"(difference {gain_words(costs, SPEC, bootstrap=False)}) and "
        f"{mean_words(reading.final(reading.row(study, SHARED), CLEAN_PSNR), SPEC)} with the paper's rule at "
        f"AdamW's lr."
    )


def _beyond_best(row: StoredRow, adamw: StoredRow) -> Gain | None:
    best = reading.best(adamw, CLEAN_PSNR, higher_is_better=True)
    return gain(reading.final(row, CLEAN_PSNR), best, higher_is_better=True)


def _beyond_oracle(study: StoredStudy, row: StoredRow | None) -> Gain | None:
    if row is None or reading.find_row(study, "adamw") is None:
        return None
    return gain(reading.final(row, CLEAN_PSNR), reading.oracle(study), higher_is_better=True)


def _power_ratio(adamw: StoredRow | None, gate: StoredRow | None) -> float:
    """How many times the first row's mean power at the last step is the second's; NaN where one is not there."""
    if adamw is None or gate is None:
        return math.nan
    noisy, kept = (math.fsum(reading.final(row, HIGH_POWER)) for row in (adamw, gate))
    return noisy / kept


def _verdict(gains: Mapping[str, Gain | None]) -> str:
    """Held if no photograph falls short; undecided if none does so beyond doubt."""
    short = [g for g in gains.values() if g is None or g.value < 0]
    if not short:
        return "Held"
    if all(g is not None and g.verdict == "unclear" for g in short):
        return "Undecided"
    return "Not held" if len(short) == len(gains) else "Partly held"


def _count(gains: Mapping[str, Gain | None]) -> str:
    beyond = sum(g is not None and g.value >= 0 for g in gains.values())
    return f"{beyond} of {len(gains)} photographs"


def _by_image(gains: Mapping[str, Gain | None]) -> str:
    return ", ".join(f"{image} {gain_words(g, SPEC, bootstrap=False)}" for image, g in gains.items())


def _times(ratios: Mapping[str, float]) -> str:
    """Each photograph's ratio.

    >>> _times({"astronaut": 8.54, "coffee": 2.0})
    '8.5 (astronaut), 2.0 (coffee)'
    """
    return ", ".join(f"{ratio:.1f} ({image})" for image, ratio in ratios.items())
