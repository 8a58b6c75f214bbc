"""Numbers of the study of defaults, from its saved result: tables for a terminal, and what its rule chooses."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk_lab.engine.arms import ARMS
from poprisk_lab.pages.template import render_block
from poprisk_lab.paper.default_choice.study import ALLOWED_COST, USUAL_RATE, Candidate, rank

Saved = Mapping[str, Any]
PACKAGE = "poprisk_lab.paper.default_choice"
SHOWN = 12
"""Candidates in each ranking."""
_NAME_WIDTH = 20  # two lines a candidate, so that the tasks fit beside it
GATE_WORDS = {
    "soft": "soft",
    "soft_calibrated": "soft calibrated",
    "hard": "hard",
    "hard_calibrated": "hard calibrated",
    "snr": "SNR",
}
"""What each candidate's gate is called, in the order of a legend."""


def lines(saved: Saved) -> Iterator[RenderableType]:
    """The best candidates within the allowed cost and regardless of it, task by task, and which one the rule takes."""
    found = ranked(saved)
    marked = library_default(found)
    within = _best([candidate for candidate in found if is_allowed(candidate)], marked)
    regardless = _best(found, marked)
    if within:
        yield _scores(f"Best candidates that cost at most {points(ALLOWED_COST)}", within, marked)
    yield _scores("Best candidates, whatever they cost", regardless, marked)
    both = {candidate.label: candidate for candidate in (*within, *regardless)}
    yield _costs("Costs of these on clean tasks", list(both.values()), marked)
    yield Text(render_block(PACKAGE, "note", {"usual_rate": USUAL_RATE}))
    yield Text(choice_sentence(found), style="bold")


def _best(found: Sequence[Candidate], marked: Candidate | None) -> list[Candidate]:
    """The first by score, and the present default wherever it stands among them."""
    order = sorted(found, key=lambda candidate: -candidate.score)
    return [candidate for place, candidate in enumerate(order) if place < SHOWN or candidate is marked]


def ranked(saved: Saved) -> list[Candidate]:
    """All candidates, the one to choose first."""
    return rank(saved["result"]["studies"])


def is_allowed(candidate: Candidate) -> bool:
    """Whether it costs no more than a default may; a run that diverged costs more than anything."""
    return candidate.cost <= ALLOWED_COST


def chosen(found: Sequence[Candidate]) -> Candidate | None:
    """What the rule takes of ranked candidates; None where each one costs too much."""
    return found[0] if found and is_allowed(found[0]) else None


def front(found: Sequence[Candidate]) -> list[Candidate]:
    """The candidates of which no other is as cheap and better, or as good and cheaper; the cheapest first."""
    kept: list[Candidate] = []
    for candidate in sorted(found, key=lambda one: (one.cost, -one.score)):
        if math.isfinite(candidate.cost) and (not kept or candidate.score > kept[-1].score):
            kept.append(candidate)
    return kept


def library_default(found: Sequence[Candidate]) -> Candidate | None:
    """The candidate that was ``PopRiskAdamW(params)`` in version 0.1; None where it was no candidate."""
    library = ARMS["defaults"]
    wanted = library.hyper({})
    for candidate in found:
        arm = ARMS[candidate.arm]
        same = (arm.rule, arm.calibrated, arm.per_tensor) == (library.rule, library.calibrated, library.per_tensor)
        given = arm.hyper(candidate.hyper)
        used = {*candidate.hyper, "gate_warmup"}  # a stored row leaves out what its rule does not read
        if same and all(given[name] == wanted[name] for name in used):
            return candidate
    return None


def words(candidate: Candidate) -> str:
    """A candidate in plain words.

    >>> words(Candidate("snr strength=3 lr=0.01", "snr", {}, {}, {}, frozenset()))
    'SNR strength=3 lr=0.01'
    """
    return GATE_WORDS.get(candidate.arm, candidate.arm) + candidate.label.removeprefix(candidate.arm)


def tasks_of(shown: Sequence[Candidate]) -> list[str]:
    """The noisy tasks that any of them was scored on: finalists have more than others."""
    return sorted({task for candidate in shown for task in candidate.scores})


def task_words(name: str) -> str:
    """The name of a task with places where a narrow column can break it.

    >>> task_words("lorenz_noise0.1"), task_words("digits-20")
    ('lorenz noise0.1', 'digits 20')
    """
    return name.replace("_", " ").replace("-", " ")


def points(cost: float) -> str:
    """A cost in points of accuracy.

    >>> points(0.01), points(-0.0036), points(float("inf"))
    ('1 point', '-0.4 points', 'a diverged run')
    """
    if not math.isfinite(cost):
        return "a diverged run"
    number = round(100 * cost, 1) + 0.0  # no minus before a nought
    return f"{number:g} point{'' if number == 1 else 's'}"


def choice_sentence(found: Sequence[Candidate]) -> str:
    """Which candidate the rule takes, and how the library's present default compares."""
    first, now = chosen(found), library_default(found)
    cheapest = min(found, key=lambda candidate: candidate.cost)
    slots = {
        "allowed": points(ALLOWED_COST),
        "chosen": None if first is None else _slots(first),
        "cheapest": _slots(cheapest),
        "present": None if now is None else {**_slots(now), "is_chosen": now is first},
    }
    return render_block(PACKAGE, "verdict", slots)


def _slots(candidate: Candidate) -> dict[str, str]:
    numbers = {"score": candidate.score, "tasks": len(candidate.scores), "cost": points(candidate.cost)}
    merits = render_block(PACKAGE, "merits", numbers)
    return {"label": words(candidate), "cost": points(candidate.cost), "merits": merits}


def _scores(title: str, shown: Sequence[Candidate], marked: Candidate | None) -> Table:
    tasks = tasks_of(shown)
    table = _table(title, ["mean", *map(task_words, tasks), "worst cost"])
    for candidate in shown:
        scores = [f"{candidate.scores[task]:.2f}" if task in candidate.scores else "–" for task in tasks]
        cells = [words(candidate), f"{candidate.score:.2f}", *scores, _percent(candidate.cost)]
        table.add_row(*cells, style="bold" if candidate is marked else "")
    return table


def _costs(title: str, shown: Sequence[Candidate], marked: Candidate | None) -> Table:
    every = {task for candidate in shown for task in candidate.costs}
    tasks = sorted(every, key=lambda task: (task not in shown[0].classified, task))
    table = _table(title, [task_words(task) + "*" * (task not in shown[0].classified) for task in tasks])
    for candidate in shown:
        cells = [words(candidate), *(_percent(candidate.costs[t]) if t in candidate.costs else "–" for t in tasks)]
        table.add_row(*cells, style="bold" if candidate is marked else "")
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0)
    table.add_column("", overflow="fold", min_width=_NAME_WIDTH)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table


def _percent(cost: float) -> str:
    """Two places where they matter."""
    if not math.isfinite(cost):
        return "diverged"
    return f"{round(100 * cost, 2) + 0.0:.2f}%" if abs(cost) < 0.1 else f"{100 * cost:,.0f}%"
