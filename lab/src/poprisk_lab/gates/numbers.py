"""What the page on gate variants shows: the tables and counts of the stored results, as slots of ``page.md.jinja``."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk._core.store import load_result
from poprisk.errors import DataError
from poprisk_lab.engine import reading
from poprisk_lab.gates.arms import IDEAS
from poprisk_lab.gates.controls import NO_CONTROLS, control_slots
from poprisk_lab.gates.evidence import KIND as EVIDENCE
from poprisk_lab.gates.evidence_numbers import task_words, turning_rows, twin_counts, twins_rows
from poprisk_lab.gates.limits import detection_steps
from poprisk_lab.gates.plan import ADAMW, KIND, KNOWN, STRICT
from poprisk_lab.gates.verdict import (
    ALLOWED_SLOWDOWN,
    SHARE_OF_WAY,
    Clean,
    Noisy,
    Outcome,
    judge_clean,
    judge_noisy,
    outcomes,
    rates_of,
    row_of,
    task_names,
)
from poprisk_lab.pages.template import render_blocks
from poprisk_lab.pages.wording import table

Saved = Mapping[str, Any]


def lines(saved: Saved) -> Iterator[RenderableType]:
    """Every rule with what it lost, and the verdict, for a terminal."""
    found = outcomes(studies_of(saved))
    shown = Table(
        title="Gates that resist noise and are fast?", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD
    )
    for i, column in enumerate(("", "score", "slowdown", "noisy tasks lost", "at AdamW's lr", "clean tasks lost")):
        shown.add_column(column, justify="left" if i == 0 else "right", overflow="fold")
    for outcome in found:
        counts = (outcome.lost_noisy, outcome.lost_unchanged, outcome.lost_clean)
        sizes = (len(outcome.noisy), len(outcome.noisy), len(outcome.clean))
        cells = [f"{len(lost)} of {size}" for lost, size in zip(counts, sizes, strict=True)]
        style = "bold" if outcome.meets_both else ""
        shown.add_row(outcome.label, _score(outcome), slowdown_words(outcome), *cells, style=style)
    yield shown
    words = sentences(found)
    yield Text(words["reading_note"])
    yield Text(words["verdict"], style="bold")


def studies_of(saved: Saved) -> Mapping[str, Any]:
    """The studies of a saved result."""
    return saved["result"]["studies"]


def lost_side(outcome: Outcome) -> str:
    """Which of the two requirements a rule failed: ``noise``, ``speed``, ``both`` or ``none``."""
    sides = [name for name, lost in (("noise", outcome.lost_noisy), ("speed", outcome.lost_clean)) if lost]
    return {0: "none", 1: sides[0] if sides else "", 2: "both"}[len(sides)]


def best_trade_off(found: Sequence[Outcome]) -> Outcome:
    """The variant that loses the fewest tasks; of several the one with the highest score.

    Raises:
        DataError: there is no variant in the result.
    """
    tried = [outcome for outcome in found if outcome.label not in KNOWN]
    if not tried:
        raise DataError("the result holds no variant, only the known rules: run the study with at least one variant")

    def place(outcome: Outcome) -> tuple[int, float]:
        return len(outcome.lost_noisy) + len(outcome.lost_clean), -_number(outcome.score)

    return min(tried, key=place)


def sentences(found: Sequence[Outcome]) -> dict[str, str]:
    """The verdict (which variants meet both requirements; if none, which comes closest) and how to read the tables."""
    tried = [outcome for outcome in found if outcome.label not in KNOWN]
    winners = [outcome for outcome in tried if outcome.meets_both]
    best = best_trade_off(found)
    lost = [f"{task_words(name)} (noise)" for name in best.lost_noisy]
    lost += [f"{task_words(name)} (speed)" for name in best.lost_clean]
    slots = {
        "counts": f"{len(tried)} variants, {len(best.noisy)} noisy and {len(best.clean)} clean tasks",
        "winners": _listed([outcome.label for outcome in winners]),
        "single": _listed([outcome.label for outcome in winners if not outcome.lost_unchanged]),
        "sides": {side: sum(lost_side(outcome) == side for outcome in tried) for side in ("noise", "speed", "both")},
        "best": {
            "label": best.label,
            "score": _score(best),
            "slowdown": slowdown_words(best),
            "lost": _listed(lost),
        },
        "share_of_way": SHARE_OF_WAY,
        "allowed_slowdown": ALLOWED_SLOWDOWN,
    }
    return render_blocks("poprisk_lab.gates", "sentences.md.jinja", slots)


def slowdown_words(outcome: Outcome) -> str:
    """The mean slowdown; a bound where a seed never got there."""
    every = all(clean.reached == clean.seeds for clean in outcome.clean.values())
    return f"{'' if every else '≥ '}{outcome.slowdown:.2f}"


def page_slots(results: Path) -> dict[str, Any]:
    """The slots from the stored ``gate_variants.json`` and ``gate_evidence.json``, and from results with controls."""
    variants, evidence = (
        load_result(results / f"{name}.json", kind)
        for name, kind in (("gate_variants", KIND), ("gate_evidence", EVIDENCE))
    )
    return slots(variants, evidence) | control_slots(results)


def slots(saved: Saved, evidence: Saved) -> dict[str, Any]:
    """What ``page.md.jinja`` asks for.

    Args:
        saved: The study of variants.
        evidence: What was observed while AdamW trained.
    """
    stored, watched = studies_of(saved), evidence["result"]
    found = outcomes(stored)
    return sentences(found) | {
        "ideas": ideas_table(found),
        "noisy": noisy_table(stored, found),
        "clean": clean_table(stored, found),
        "time": time_table(),
        "best": best_table(stored, best_trade_off(found)),
        "turning": table(*turning_rows(watched["turning"])),
        "twins": table(*twins_rows(watched["twins"])),
        "twin_counts": twin_counts(watched["twins"]),
        "allowed_slowdown": ALLOWED_SLOWDOWN,
        **NO_CONTROLS,
        **_sizes(stored),
    }


def ideas_table(found: Sequence[Outcome]) -> str:
    """Every variant: root, why it was expected to work, what it lost."""
    by_label = {outcome.label: outcome for outcome in found}
    head = ["variant", "root", "expected to work because", "score", "slowdown", "lost side", "tasks lost"]
    rows = []
    for idea in IDEAS:
        outcome = by_label.get(idea.label)
        if outcome is None:
            continue
        lost = ", ".join(map(task_words, (*outcome.lost_noisy, *outcome.lost_clean))) or "none"
        words = [f"**{idea.label}** (`{idea.arm}`)", idea.root, idea.expected]
        rows.append([*words, _score(outcome), slowdown_words(outcome), lost_side(outcome), lost])
    return table(head, rows, words=3)


def noisy_table(stored: Mapping[str, Any], found: Sequence[Outcome]) -> str:
    """The last step on each noisy task at the best rate and, in brackets, at AdamW's own."""
    names = task_names(stored)[0]
    specs = {name: reading.primary(stored[name])["spec"] for name in names}
    head = ["last step", *(f"{task_words(name)} ({_direction(stored[name])})" for name in names)]
    rows = [
        [outcome.label, *(_noisy_cell(outcome.noisy[n], outcome.unchanged[n], specs[n]) for n in names)]
        for outcome in found
    ]
    return table(head, rows)


def clean_table(stored: Mapping[str, Any], found: Sequence[Outcome]) -> str:
    """The slowdown on each clean task."""
    names = task_names(stored)[1]
    rows = [[outcome.label, *(_clean_cell(outcome.clean[name]) for name in names)] for outcome in found]
    return table(["slowdown", *map(task_words, names)], rows)


def time_table() -> str:
    """Fewest batches in which a signal can be told from noise at all, alone and judged together."""
    together = (1, 64, 10_000)
    head = ["signal-to-noise ratio of a batch", *(f"{k:,} weight{'s' * (k > 1)}" for k in together)]
    rows = [
        [f"{ratio:g}", *(f"{max(1, math.ceil(detection_steps(ratio, 1e-3, k))):,}" for k in together)]
        for ratio in (1.0, 0.3, 0.1, 0.03, 0.01)
    ]
    return table(head, rows)


def best_table(stored: Mapping[str, Any], best: Outcome) -> str:
    """The best trade-off beside AdamW and the strict gate, task by task."""
    head = [f"'{best.label}'", "AdamW", "strict gate", "at its best rate", "at AdamW's rate", "verdict"]
    rows = []
    for name in task_names(stored)[0]:
        spec = reading.primary(stored[name])["spec"]
        rivals = [judge_noisy(stored, name, label).value for label in (ADAMW, STRICT)]
        values = [*rivals, best.noisy[name].value, best.unchanged[name].value]
        lead, error = best.noisy[name].lead, best.noisy[name].error
        verdict = f"{'held' if best.noisy[name].holds else '**lost**'}: {lead:+{spec}} ± {error:{spec}}"
        rows.append([f"{task_words(name)}, last step", *(f"{value:{spec}}" for value in values), verdict])
    for name, clean in best.clean.items():
        strict = judge_clean(stored, name, STRICT)
        verdict = "held" if clean.holds else "**lost**"
        rows.append([f"{task_words(name)}, slowdown", "1", _bound(strict), "", _bound(clean), verdict])
    return table(head, rows)


def _noisy_cell(best: Noisy, unchanged: Noisy, spec: str) -> str:
    def words(found: Noisy) -> str:
        value = f"{found.value:{spec}}" if math.isfinite(found.value) else "diverged"
        return value if found.holds else f"*{value}*"

    return f"{words(best)} ({words(unchanged)})"


def _clean_cell(found: Clean) -> str:
    missed = "" if found.reached == found.seeds else f" ({found.reached} of {found.seeds})"
    value = f"{_bound(found)}{missed}"
    return value if found.holds else f"*{value}*"


def _sizes(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Seeds, learning rates and the strict gate's options, from the stored rows."""
    seeds = sorted({len(row["seeds"]) for study in stored.values() for row in study["rows"]})
    noisy, clean = task_names(stored)
    tried = rates_of(stored, noisy[0], ADAMW)
    return {
        "seeds": " or ".join(map(str, seeds)),
        "shared_rates": ", ".join(f"{rate:g}" for rate in tried),
        "own_rates": ", ".join(f"{task_words(name)} {rates_of(stored, name, ADAMW)[0]:g}" for name in clean),
        "strict": row_of(stored, noisy[0], STRICT, tried[0])["hyper"],
    }


def _bound(found: Clean) -> str:
    return f"{'' if found.reached == found.seeds else '≥ '}{found.slowdown:.2f}"


def _direction(study: Mapping[str, Any]) -> str:
    metric = reading.primary(study)
    return f"{metric['name']}, {'more' if metric['higher_is_better'] else 'less'} is better"


def _score(outcome: Outcome) -> str:
    return "–" if math.isnan(outcome.score) else f"{outcome.score:.2f}"


def _number(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
