"""Numbers of the fine-tuning study, from its saved result: tables for a terminal, and the verdicts."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from poprisk_lab.engine.reading import StoredRow, StoredStudy, final, row
from poprisk_lab.pages.claims import VerdictRow, verdict_row
from poprisk_lab.pages.comparison import (
    Gain,
    adamw_reference,
    adamw_words,
    comparison_lines,
    gain,
    gain_words,
    mean_words,
)
from poprisk_lab.pages.gate_choice import tuned_gates
from poprisk_lab.paper.sft.study import CALIBRATED, DEFAULTS, PAPER_RULE, SHARED_ADAMW, SNR, SUGGESTED
from poprisk_lab.paper.sft.task import HELD_OUT

Saved = Mapping[str, Any]
PACKAGE = "poprisk_lab.paper.sft"


def title(study: StoredStudy) -> str:
    """The text that was trained on."""
    noise = study["task"]["config"]["noise"]
    return f"{noise:.0%} of the targets wrong" if noise else "clean text"


def lines(saved: Saved) -> Iterator[RenderableType]:
    """The tables of all optimizers, then the verdicts, for a terminal."""
    yield from comparison_lines(saved)
    for claim in claims(saved):
        yield Text(claim.verdict, style="bold")


def claims(saved: Saved) -> list[VerdictRow]:
    """How far each gate is ahead or behind on each text, at AdamW's learning rate and after equal tuning."""
    return [_claim(study) for study in saved["result"]["studies"].values()]


def _claim(study: StoredStudy) -> VerdictRow:
    shared = row(study, SHARED_ADAMW)
    reference = adamw_reference(study) or shared
    inherited = {label: _gain(row(study, label), shared) for label in (PAPER_RULE, CALIBRATED, SNR, SUGGESTED)}
    contenders = {**tuned_gates(study, "last"), DEFAULTS: row(study, DEFAULTS)}
    tuned = {label: _gain(each, reference) for label, each in contenders.items()}
    slots = {
        "text": title(study),
        "shared": _loss(SHARED_ADAMW, shared),
        "inherited": {label: gain_words(gained, ".3f", bootstrap=False) for label, gained in inherited.items()},
        "reference": _loss(reference["label"], reference),
        "tuned": {label: gain_words(gained, ".3f", bootstrap=False) for label, gained in tuned.items()},
        "paper_rule": _nats(inherited[PAPER_RULE]),
        "calibrated": _nats(inherited[CALIBRATED]),
        "adamw": adamw_words(study),
        "distances": {label: _nats(gained) for label, gained in tuned.items()},
    }
    return verdict_row(PACKAGE, slots)


def _loss(label: str, each: StoredRow) -> dict[str, str]:
    return {"label": label, "loss": mean_words(final(each, HELD_OUT), ".3f")}


def _gain(first: StoredRow, second: StoredRow) -> Gain:
    return gain(final(first, HELD_OUT), final(second, HELD_OUT), higher_is_better=False)


def _nats(gained: Gain) -> str:
    if gained.diverged is not None:
        return f"without a comparison ({gained.diverged.words})"
    words = f"{abs(gained.value):.3f} nats {'ahead' if gained.value > 0 else 'behind'}"
    return f"{words} (undecided)" if gained.verdict == "unclear" else words
