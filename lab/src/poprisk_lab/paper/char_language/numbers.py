"""Numbers of the character language model, from its saved result: tables for a terminal, and the verdicts."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredRow, StoredStudy
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
from poprisk_lab.paper.char_language.study import (
    ADAMW_INHERITED,
    DEFAULTS,
    PAPER_INHERITED,
    SNR_INHERITED,
)
from poprisk_lab.paper.char_language.task import HELD_OUT

Saved = Mapping[str, Any]
PACKAGE = "poprisk_lab.paper.char_language"


def lines(saved: Saved) -> Iterator[RenderableType]:
    """The tables of all optimizers, then the verdicts, for a terminal."""
    yield from comparison_lines(saved)
    for claim in claims(saved):
        yield Text(claim.verdict, style="bold")


def claims(saved: Saved) -> list[VerdictRow]:
    """How far the gate is behind or ahead on each text, at AdamW's learning rate and after equal tuning."""
    return [_claim(name, study) for name, study in saved["result"]["studies"].items()]


def _claim(name: str, study: StoredStudy) -> VerdictRow:
    shared = reading.row(study, ADAMW_INHERITED)
    reference = adamw_reference(study) or shared
    given = {label: reading.row(study, label) for label in (PAPER_INHERITED, SNR_INHERITED, DEFAULTS)}
    inherited = {label: _gain(study, row, shared) for label, row in given.items()}
    contenders = {**tuned_gates(study, "last"), DEFAULTS: reading.row(study, DEFAULTS)}
    tuned = {label: _gain(study, row, reference) for label, row in contenders.items()}
    slots = {
        "text": "Clean language model" if name == "char_clean" else "Language model with wrong targets",
        "shared": _loss(ADAMW_INHERITED, shared),
        "inherited": {label: gain_words(gained, ".3f", bootstrap=False) for label, gained in inherited.items()},
        "reference": _loss(reference["label"], reference),
        "tuned": {label: gain_words(gained, ".3f", bootstrap=False) for label, gained in tuned.items()},
        "paper_rule": _nats(inherited[PAPER_INHERITED]),
        "adamw": adamw_words(study),
        "distances": {label: _nats(gained) for label, gained in tuned.items()},
    }
    return verdict_row(PACKAGE, slots)


def _loss(label: str, row: StoredRow) -> dict[str, str]:
    return {"label": label, "loss": mean_words(reading.final(row, HELD_OUT), ".3f")}


def _gain(study: StoredStudy, row: StoredRow, reference: StoredRow) -> Gain:
    metric = reading.primary(study)
    ends = [reading.final(each, metric["name"]) for each in (row, reference)]
    return gain(ends[0], ends[1], higher_is_better=metric["higher_is_better"])


def _nats(gained: Gain) -> str:
    """Ahead or behind by how many nats, and how surely."""
    if gained.diverged is not None:
        return f"without a comparison ({gained.diverged.words})"
    words = f"{abs(gained.value):.3f} nats {'ahead' if gained.value > 0 else 'behind'}"
    if gained.interval is None:
        return f"{words} (one seed)"
    if gained.verdict == "unclear":
        return f"{words} (undecided: the 95% interval of the gain is {_ends(gained.interval)})"
    return f"{words} (95% interval of the gain {_ends(gained.interval)})"


def _ends(interval: tuple[float, float]) -> str:
    return f"{interval[0]:+.3f} to {interval[1]:+.3f}".replace("-", "−")
