"""Numbers of the studies of wrong labels on images, from a saved result of ``labels`` or ``cifar``.

The claims are ours, not the paper's: under wrong labels, PopRiskAdamW at its defaults ends no worse than the best
checkpoint of a tuned AdamW, which takes the test set to choose; on clean labels it ends where a tuned AdamW ends.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk_lab.data.cifar import WRONG_SHARES
from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredRow, StoredStudy
from poprisk_lab.pages.claims import VerdictRow, verdict_row
from poprisk_lab.pages.comparison import (
    DEFAULTS_LABEL,
    Gain,
    adamw_checkpoints,
    adamw_reference,
    adamw_words,
    best_gate,
    gain,
    gain_over_adamw,
    gain_over_oracle,
    gain_words,
    mean_words,
)
from poprisk_lab.pages.gate_choice import budget_words, fixed_gate
from poprisk_lab.pages.template import render_block
from poprisk_lab.paper.labels.study import SETTINGS
from poprisk_lab.paper.labels.task import TITLES
from poprisk_lab.paper.teacher.numbers import ALLOWED_CLEAN, ALLOWED_NOISY, verdict

Saved = Mapping[str, Any]
PACKAGE = "poprisk_lab.paper.labels"
ADAMW_GIVEN, PAPER_RULE = (setting.label for setting in SETTINGS[1:3])
ACCURACY = "test accuracy"
_SPEC = ".1%"


def data_and_share(study: StoredStudy) -> tuple[str, float]:
    """The data set in words, and the share of its training labels that is wrong.

    >>> data_and_share({"task": {"config": {"task": "LabelTask", "data": "mnist", "noise": 0.2}}})
    ('MNIST', 0.2)
    >>> data_and_share({"task": {"config": {"task": "CifarTask", "labels": "worse", "folder": "data/cifar10"}}})
    ('CIFAR-10N', 0.4021)
    """
    config = study["task"]["config"]
    if config["task"] == "CifarTask":
        return "synthetic images" if config["folder"] is None else "CIFAR-10N", WRONG_SHARES[config["labels"]]
    return TITLES[config["data"]], config["noise"]


def lines(saved: Saved) -> Iterator[RenderableType]:
    """One line for each task, and the verdicts."""
    head, *rows = accuracy_table(saved)
    seeds = max(len(row["seeds"]) for study in saved["result"]["studies"].values() for row in study["rows"])
    table = Table(title=render_block(PACKAGE, "title", {"seeds": seeds}), title_justify="left", title_style="")
    for column, words in enumerate(head):
        table.add_column(words, justify="left" if column == 0 else "right", overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    yield table
    yield Text(render_block(PACKAGE, "note", {}))
    for claim in claims(saved):
        yield Text(claim.verdict, style="bold")


def accuracy_table(saved: Saved) -> list[list[str]]:
    """Head, and for each task: AdamW given and tuned, its best checkpoint, the defaults, two gates, the gain."""
    head = ["data, wrong labels", ADAMW_GIVEN, "AdamW tuned", "AdamW, best checkpoint", DEFAULTS_LABEL]
    return [
        [*head, "best searched gate", "gate fixed in advance", "defaults over best checkpoint (points)"],
        *(_cells(s) for s in saved["result"]["studies"].values()),
    ]


def _cells(study: StoredStudy) -> list[str]:
    defaults, gate, fixed = reading.row(study, DEFAULTS_LABEL), best_gate(study), fixed_gate(study, "last")
    return [
        what(study),
        _last(reading.row(study, ADAMW_GIVEN)),
        _adamw_last(study),
        _checkpoint(study),
        _last(defaults),
        _last(gate) if gate is None else f"{_last(gate)} ({gate['label']}; {budget_words(study)})",
        _last(fixed) if fixed is None else f"{_last(fixed)} ({fixed['label']})",
        _points(gain_over_oracle(study, defaults)),
    ]


def claims(saved: Saved) -> list[VerdictRow]:
    """For each data set and share of wrong labels: the defaults' last step against AdamW's best checkpoint.

    On clean labels against its last step. A loss of half a point (clean: a point) is allowed, and the interval must
    exclude a larger one.
    """
    return [_claim(study) for study in saved["result"]["studies"].values()]


def _claim(study: StoredStudy) -> VerdictRow:
    noisy = data_and_share(study)[1] > 0
    defaults, given, paper = (reading.row(study, label) for label in (DEFAULTS_LABEL, ADAMW_GIVEN, PAPER_RULE))
    gained = gain_over_oracle(study, defaults) if noisy else gain_over_adamw(study, defaults)
    against = f"the {'best checkpoint' if noisy else 'last step'} of {adamw_words(study)}"
    shared = gain(reading.final(paper, ACCURACY), reading.final(given, ACCURACY), higher_is_better=True)
    slots = {
        "data": what(study),
        "noisy": noisy,
        "given": {"label": ADAMW_GIVEN, "last": _last(given)},
        "rule": {"label": PAPER_RULE, "last": _last(paper), "gain": _points(shared)},
        "adamw": {"last": _adamw_last(study), "best": _checkpoint(study), "words": adamw_words(study)},
        "defaults": {"label": DEFAULTS_LABEL, "last": _last(defaults), "gain": _points(gained)},
        "verdict": verdict(gained, ALLOWED_NOISY if noisy else ALLOWED_CLEAN, against),
    }
    return verdict_row(PACKAGE, slots)


def what(study: StoredStudy) -> str:
    """Data set and share of wrong labels in words."""
    data, share = data_and_share(study)
    return f"{data}, {share:.0%} wrong" if share else f"{data}, clean"


def _last(row: StoredRow | None) -> str:
    return "–" if row is None else mean_words(reading.final(row, ACCURACY), _SPEC)


def _adamw_last(study: StoredStudy) -> str:
    """Of the tuned AdamW, or of the best given one, and then it is said."""
    row = adamw_reference(study)
    return _last(row) + ("" if row is None or row["chosen_for"] else f" ({adamw_words(study)})")


def _checkpoint(study: StoredStudy) -> str:
    checkpoints = adamw_checkpoints(study)
    return "–" if checkpoints is None else mean_words(checkpoints, _SPEC)


def _points(gained: Gain | None) -> str:
    """A gain in percentage points, with Student's interval and the bootstrap's."""
    if gained is None:
        return "–"
    if gained.diverged is not None:
        return gained.diverged.words
    ends = [None if pair is None else (100 * pair[0], 100 * pair[1]) for pair in (gained.interval, gained.bootstrap)]
    return gain_words(Gain(100 * gained.value, ends[0], ends[1]), ".1f")
