"""Teacher labels: verdicts on the last step under label noise, from the saved result."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredStudy
from poprisk_lab.pages.claims import Claim
from poprisk_lab.pages.comparison import (
    DEFAULTS_LABEL,
    Diverged,
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

Saved = Mapping[str, Any]
ALLOWED_NOISY, ALLOWED_CLEAN = 0.005, 0.01
"""What the defaults may lose: half a point to AdamW's best checkpoint under noise, a point to its last step without."""
_QUESTIONS = {
    True: "the last step is as good as AdamW's best checkpoint, chosen with the test set in hand",
    False: "the gate costs a point at most",
}
_PAPER_RULE, _ADAMW_GIVEN = "paper's rule at AdamW's lr", "AdamW, lr 1e-3"


def teacher_lines(saved: Saved) -> Iterator[RenderableType]:
    """The tables of all optimizers, then the verdicts."""
    yield from comparison_lines(saved)
    for claim in claims_teacher(saved):
        yield Text(claim.sentence, style="bold")


def claims_teacher(saved: Saved) -> list[Claim]:
    """For each share of wrong labels: the defaults' last step against the tuned AdamW's last and best one."""
    return [_claim(study) for study in saved["result"]["studies"].values()]


def _claim(study: StoredStudy) -> Claim:
    noise, metric = study["task"]["config"]["noise"], reading.primary(study)["name"]
    defaults, tuned = reading.row(study, DEFAULTS_LABEL), adamw_reference(study)
    what = f"Teacher labels, {noise:.0%} wrong" if noise else "Teacher labels, clean"
    gained = gain_over_oracle(study, defaults) if noise else gain_over_adamw(study, defaults)
    allowed = ALLOWED_NOISY if noise else ALLOWED_CLEAN
    against = f"the {'best checkpoint' if noise else 'last step'} of {adamw_words(study)}"
    given, paper = reading.row(study, _ADAMW_GIVEN), reading.row(study, _PAPER_RULE)
    shared = gain(reading.final(paper, metric), reading.final(given, metric), higher_is_better=True)
    return Claim(
        claim=f"{what}: {_QUESTIONS[bool(noise)]}",
        paper="no figure: the paper has no such experiment",
        paper_conditions=(
            f"{_ADAMW_GIVEN}: {_percent(reading.final(given, metric))}; {_PAPER_RULE}: "
            f"{_percent(reading.final(paper, metric))}, gain {points(shared)}"
        ),
        equal_tuning=(
            f"AdamW: last {_percent(reading.final(tuned, metric) if tuned else None)}, best "
            f"{_percent(adamw_checkpoints(study))}; "
            f"{DEFAULTS_LABEL}: last {_percent(reading.final(defaults, metric))}"
        ),
        sentence=f"{what}: {verdict(gained, allowed, against)}",
    )


def verdict(gained: Gain | None, allowed: float, against: str) -> str:
    """Whether the interval excludes a loss of more than allowed; who diverged has lost, ours at once.

    >>> verdict(Gain(0.02, (0.01, 0.03), None), 0.005, "AdamW")
    'held: the defaults end +2.0 [+1.0, +3.0] points against AdamW; a loss of more than 0.5 is excluded.'
    >>> verdict(Gain(-0.02, (-0.03, -0.01), None), 0.005, "AdamW")
    'not held: the defaults end −2.0 [−3.0, −1.0] points against AdamW, more than 0.5 behind.'
    """
    if gained is None:
        return "undecided: there is no AdamW to compare with."
    if gained.diverged is not None:
        return _diverged_verdict(gained.diverged, gained.verdict, against)
    words, limit = f"the defaults end {points(gained)} against {against}", f"{100 * allowed:.1f}"
    if gained.interval is None:
        return f"undecided: {words} (one seed)."
    if gained.interval[0] >= -allowed:
        return f"held: {words}; a loss of more than {limit} is excluded."
    if gained.interval[1] < -allowed:
        return f"not held: {words}, more than {limit} behind."
    return f"undecided: {words}; a loss of more than {limit} is not excluded."


def _diverged_verdict(failed: Diverged, verdict: str, against: str) -> str:
    """The defaults' divergence is held against them; AdamW's decides for them only if all its seeds diverged."""
    ours, theirs = (f"{count} of {failed.pairs} seeds" for count in (failed.first, failed.second))
    if failed.first and failed.second:
        return f"undecided: the defaults diverged in {ours}, and AdamW in {theirs}, so that {against} is no measure."
    if failed.first:
        return f"not held: the defaults diverged in {ours}, against {against}."
    held = "held" if verdict == "better" else "undecided"
    return f"{held}: AdamW diverged in {theirs}, the defaults in none, against {against}."


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
