"""Numbers of the study of a teacher's labels, from its saved result: tables for a terminal, and the verdicts."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredStudy
from poprisk_lab.pages.claims import VerdictRow, verdict_row
from poprisk_lab.pages.comparison import (
    DEFAULTS_LABEL,
    Gain,
    adamw_checkpoints,
    adamw_reference,
    adamw_words,
    comparison_lines,
    gain,
    gain_over_adamw,
    gain_over_oracle,
    gain_words,
    mean_words,
)
from poprisk_lab.pages.template import render_block

Saved = Mapping[str, Any]
PACKAGE = "poprisk_lab.paper.teacher"
ALLOWED_NOISY, ALLOWED_CLEAN = 0.005, 0.01
"""What the defaults may lose: half a point to AdamW's best checkpoint under noise, a point to its last step without."""
_PAPER_RULE, _ADAMW_GIVEN = "paper's rule at AdamW's lr", "AdamW, lr 1e-3"


def lines(saved: Saved) -> Iterator[RenderableType]:
    """The tables of all optimizers, then the verdicts, for a terminal."""
    yield from comparison_lines(saved)
    for claim in claims(saved):
        yield Text(claim.verdict, style="bold")


def claims(saved: Saved) -> list[VerdictRow]:
    """For each share of wrong labels: the defaults' last step against the tuned AdamW's last and best one."""
    return [_claim(study) for study in saved["result"]["studies"].values()]


def _claim(study: StoredStudy) -> VerdictRow:
    noise, metric = study["task"]["config"]["noise"], reading.primary(study)["name"]
    defaults, tuned = reading.row(study, DEFAULTS_LABEL), adamw_reference(study)
    given, paper = reading.row(study, _ADAMW_GIVEN), reading.row(study, _PAPER_RULE)
    gained = gain_over_oracle(study, defaults) if noise else gain_over_adamw(study, defaults)
    shared = gain(reading.final(paper, metric), reading.final(given, metric), higher_is_better=True)
    slots = {
        "noise": noise,
        "given": {"label": _ADAMW_GIVEN, "last": _percent(reading.final(given, metric))},
        "rule": {"label": _PAPER_RULE, "last": _percent(reading.final(paper, metric)), "gain": points(shared)},
        "adamw": {
            "words": adamw_words(study),
            "last": _percent(reading.final(tuned, metric) if tuned else None),
            "best": _percent(adamw_checkpoints(study)),
        },
        "defaults": {"label": DEFAULTS_LABEL, "last": _percent(reading.final(defaults, metric))},
        **verdict_slots(gained, ALLOWED_NOISY if noise else ALLOWED_CLEAN),
    }
    return verdict_row(PACKAGE, slots)


def verdict_slots(gained: Gain | None, allowed: float) -> dict[str, Any]:
    """Whether the interval excludes a loss of more than allowed, and the numbers behind it, for ``verdict.md.jinja``.

    A run of the defaults that diverged counts against them; AdamW's count for them only if all its seeds diverged.
    """
    return {
        "state": _state(gained, allowed),
        "points": points(gained),
        "limit": f"{100 * allowed:.1f}",
        "diverged": None if gained is None else gained.diverged,
        "one_seed": gained is not None and gained.diverged is None and gained.interval is None,
        "is_compared": gained is not None,
    }


def verdict(gained: Gain | None, allowed: float, against: str) -> str:
    """The verdict on the defaults in a sentence.

    >>> verdict(Gain(0.02, (0.01, 0.03), None), 0.005, "AdamW")
    'held: the defaults end +2.0 [+1.0, +3.0] points against AdamW; a loss of more than 0.5 is excluded.'
    >>> verdict(Gain(-0.02, (-0.03, -0.01), None), 0.005, "AdamW")
    'not held: the defaults end −2.0 [−3.0, −1.0] points against AdamW, more than 0.5 behind.'
    """
    return render_block(PACKAGE, "sentence", {"against": against, **verdict_slots(gained, allowed)}, "verdict.md.jinja")


def _state(gained: Gain | None, allowed: float) -> str:
    if gained is not None and gained.diverged is not None:
        return {"better": "held", "worse": "not held", "unclear": "undecided"}[gained.verdict]
    if gained is None or gained.interval is None or gained.interval[0] < -allowed <= gained.interval[1]:
        return "undecided"
    return "held" if gained.interval[0] >= -allowed else "not held"


def points(gained: Gain | None) -> str:
    """A gain of accuracy in percentage points.

    >>> points(Gain(0.02, (-0.01, 0.05), None))
    '+2.0 [−1.0, +5.0] points'
    """
    if gained is None:
        return "–"
    if gained.diverged is not None:
        return gained.diverged.words
    interval = None if gained.interval is None else (100 * gained.interval[0], 100 * gained.interval[1])
    return gain_words(Gain(100 * gained.value, interval, None), ".1f") + " points"


def _percent(values: list[float] | None) -> str:
    return "–" if values is None else mean_words(values, ".1%")
