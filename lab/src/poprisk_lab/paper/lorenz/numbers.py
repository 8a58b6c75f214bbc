"""Numbers of the Lorenz study, from its saved result: tables for a terminal, and the verdicts on three claims."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from poprisk_lab.engine.reading import StoredRow, StoredStudy, best, final, row
from poprisk_lab.pages.claims import VerdictRow, verdict_row
from poprisk_lab.pages.comparison import (
    Gain,
    adamw_checkpoints,
    adamw_reference,
    adamw_words,
    comparison_lines,
    gain,
)
from poprisk_lab.pages.gate_choice import tuned_gates
from poprisk_lab.pages.template import render_block
from poprisk_lab.pages.wording import short
from poprisk_lab.paper.lorenz.study import DEFAULTS, PAPER_RULE, SHARED_ADAMW
from poprisk_lab.paper.lorenz.task import HELD_OUT, VALID_TIME

Saved = Mapping[str, Any]
PACKAGE = "poprisk_lab.paper.lorenz"
_MSE, _TIME = HELD_OUT.name, VALID_TIME.name
_LABELS = {"adamw": SHARED_ADAMW, "rule": PAPER_RULE, "defaults": DEFAULTS}
_HELD = {"better": "Held", "worse": "Not held", "unclear": "Undecided"}


def reference_study(saved: Saved) -> StoredStudy:
    """The study at the noise level that is shown."""
    return next(s for noise, s in noise_levels(saved) if noise == saved["config"]["reference"])


def noise_levels(saved: Saved) -> list[tuple[float, StoredStudy]]:
    """Each level of the noise with its study, the lowest first."""
    studies = saved["result"]["studies"].values()
    return sorted(((study["task"]["config"]["noise"], study) for study in studies), key=lambda level: level[0])


def lines(saved: Saved) -> Iterator[RenderableType]:
    """The tables of every noise level, then the verdicts, for a terminal."""
    yield from comparison_lines(saved)
    for claim in claims(saved):
        yield Text(claim.verdict, style="bold")


def claims(saved: Saved) -> list[VerdictRow]:
    """Final below AdamW's best checkpoint, final error at every noise level, and how long a roll-out holds."""
    return [_checkpoint_claim(saved), _levels_claim(saved), _rollout_claim(saved)]


def _checkpoint_claim(saved: Saved) -> VerdictRow:
    study = reference_study(saved)
    adamw, paper, defaults = (row(study, label) for label in (SHARED_ADAMW, PAPER_RULE, DEFAULTS))
    checkpoint = best(adamw, _MSE, False)
    tuned_checkpoint = adamw_checkpoints(study) or checkpoint
    slots = {
        "labels": _LABELS,
        "noise": f"{saved['config']['reference']:g}",
        "adamw": {"best": _mean(checkpoint), "last": _mean(final(adamw, _MSE))},
        "rule_last": _mean(final(paper, _MSE)),
        "tuned_best": _mean(tuned_checkpoint),
        "defaults_last": _mean(final(defaults, _MSE)),
        "adamw_words": adamw_words(study),
        "shared": _against(paper, checkpoint),
        "tuned": _against(defaults, tuned_checkpoint),
        "gates": [
            {"label": label, "last": _mean(final(each, _MSE)), **_against(each, tuned_checkpoint)}
            for label, each in tuned_gates(study, "last").items()
        ],
    }
    return verdict_row(PACKAGE, slots, "checkpoint")


def _levels_claim(saved: Saved) -> VerdictRow:
    levels = noise_levels(saved)
    shared = {noise: _last_gain(study, PAPER_RULE, SHARED_ADAMW) for noise, study in levels}
    tuned = {noise: _gain_of_defaults(study) for noise, study in levels}
    slots = {
        "labels": _LABELS,
        "levels": [
            {
                "noise": f"{noise:g}",
                **{name: _mean(final(row(study, label), _MSE)) for name, label in _LABELS.items()},
                "tuned_label": _adamw(study)["label"],
                "tuned": _mean(final(_adamw(study), _MSE)),
            }
            for noise, study in levels
        ],
        "adamw_words": adamw_words(levels[0][1]),
        "shared_outcomes": _outcomes(shared),
        "tuned_outcomes": _outcomes(tuned),
    }
    return verdict_row(PACKAGE, slots, "levels")


def _rollout_claim(saved: Saved) -> VerdictRow:
    study = reference_study(saved)
    times = {name: final(row(study, label), _TIME) for name, label in _LABELS.items()}
    times["tuned"] = final(_adamw(study), _TIME)
    slots = {
        "labels": _LABELS,
        "noise": f"{saved['config']['reference']:g}",
        "times": {name: f"{math.fsum(values) / len(values):.2f}" for name, values in times.items()},
        "adamw_words": adamw_words(study),
        "shared_state": _HELD[gain(times["rule"], times["adamw"], higher_is_better=True).verdict],
        "tuned_state": _HELD[gain(times["defaults"], times["tuned"], higher_is_better=True).verdict],
    }
    return verdict_row(PACKAGE, slots, "rollout")


def _against(each: StoredRow, checkpoint: Sequence[float]) -> dict[str, str]:
    """The verdict on the last step of a row against a checkpoint, and its error relative to it."""
    gained = gain(final(each, _MSE), checkpoint, higher_is_better=False)
    return {
        "state": _HELD[gained.verdict],
        "relative": render_block(PACKAGE, "relative", {"gain": _relative(gained, checkpoint)}),
    }


def _relative(gained: Gain, reference: Sequence[float]) -> dict[str, Any]:
    """A gain in percent of the reference's mean, with Student's interval; who diverged where a side did."""
    if gained.diverged is not None:
        failed = gained.diverged
        return {"failed": failed.first, "adamw_failed": failed.second, "pairs": failed.pairs}
    scale = math.fsum(reference) / len(reference)
    ends = None if gained.interval is None else [-end / scale for end in reversed(gained.interval)]
    return {
        "failed": 0,
        "adamw_failed": 0,
        "change": f"{abs(gained.value) / scale:.0%}",
        "direction": "less" if gained.value > 0 else "more",
        "interval": "" if ends is None else f"[{ends[0]:+.0%}, {ends[1]:+.0%}]",
    }


def _outcomes(gains: Mapping[float, Gain]) -> str:
    """At which noise levels the error is lower, at which higher, at which neither, and who diverged where."""
    found: dict[str, list[str]] = {}
    for noise, gained in gains.items():
        found.setdefault(_outcome(gained), []).append(f"{noise:g}")
    return render_block(PACKAGE, "outcomes", {"found": sorted(found.items())})


def _outcome(gained: Gain) -> str:
    if gained.diverged is not None:
        sides = (("it", gained.diverged.first), ("AdamW", gained.diverged.second))
        failed = " and ".join(f"{side} diverged in {count}" for side, count in sides if count)
        return f"not known ({failed} of {gained.diverged.pairs} seeds)"
    return {"better": "lower", "worse": "higher", "unclear": "not clearly different"}[gained.verdict]


def _adamw(study: StoredStudy) -> StoredRow:
    """The tuned AdamW, or the best that was given."""
    return adamw_reference(study) or row(study, SHARED_ADAMW)


def _gain_of_defaults(study: StoredStudy) -> Gain:
    return gain(final(row(study, DEFAULTS), _MSE), final(_adamw(study), _MSE), higher_is_better=False)


def _last_gain(study: StoredStudy, first: str, second: str) -> Gain:
    return gain(final(row(study, first), _MSE), final(row(study, second), _MSE), higher_is_better=False)


def _mean(values: Sequence[float]) -> str:
    mean = math.fsum(values) / len(values)
    return "diverged" if math.isnan(mean) else short(mean)
