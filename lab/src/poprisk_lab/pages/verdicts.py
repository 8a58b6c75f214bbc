"""Numbers of the page of verdicts (``verdicts.md.jinja``): every claim beside what was measured."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result
from poprisk.errors import DataError
from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredStudy
from poprisk_lab.pages.claims import VerdictRow
from poprisk_lab.pages.comparison import (
    DEFAULTS_LABEL,
    GIVEN_ADAMW,
    adamw_checkpoints,
    adamw_reference,
    compared_rows,
    gain_over_adamw,
    gain_over_oracle,
    gain_words,
    mean_words,
    signed,
)
from poprisk_lab.pages.package_table import package_slots
from poprisk_lab.pages.template import render
from poprisk_lab.pages.wording import table
from poprisk_lab.paper.default_choice.task import DefaultTasks, default_tasks, family
from poprisk_lab.results import kind_of

Saved = Mapping[str, Any]
TITLES = {
    "grokking": "Grokking: division modulo 97",
    "pinn": "A physics-informed network with a noisy initial condition",
    "lorenz": "Lorenz '63 from noisy states",
    "inr": "Denoising photographs with a coordinate network",
    "dpo": "Preferences, 30% of them swapped (DPO)",
    "labels": "Wrong labels on images",
    "cifar": "CIFAR-10 with human labels (CIFAR-10N)",
    "teacher": "Wrong labels of a teacher network",
    "char_language": "A character language model",
    "sft": "Fine-tuning a language model",
}
"""The kinds of results with claims, in the order of the page."""


@dataclass(frozen=True)
class Stored:
    """One stored result: its file's name without the ending, and what is in it."""

    name: str
    saved: Saved

    @property
    def kind(self) -> str:
        """Of the experiment."""
        return self.saved["kind"]

    @property
    def studies(self) -> Mapping[str, StoredStudy]:
        """Its comparisons on single tasks; none for an experiment that is not made of them."""
        return self.saved["result"].get("studies", {})


def verdicts(folder: str | Path) -> str:
    """The page, from every result of a known kind in a folder.

    Raises:
        DataError: The folder is missing, or a result in it is of a format this version does not know.
    """
    return render("poprisk_lab.pages", "verdicts.md.jinja", **slots(Path(folder)))


def slots(folder: Path) -> dict[str, Any]:
    """The slots of the page, from a folder of stored results."""
    found, chosen_on = stored_results(folder), default_tasks(folder)
    kinds = {stored.kind for stored in found}
    compared = [stored for stored in found if _tasks([stored])]
    return {
        "default_choice": chosen_on.sentence,
        "given_adamw": GIVEN_ADAMW,
        "missing": [{"kind": kind, "title": title} for kind, title in TITLES.items() if kind not in kinds],
        "sections": [_section(kind, [s for s in found if s.kind == kind], folder) for kind in TITLES if kind in kinds],
        "compared": bool(compared),
        "defaults": [_defaults(compared, chosen_on, clean) for clean in (False, True) if _tasks(compared, clean)],
        "package_setting": package_slots([each for stored in found for each in stored.studies.items()]),
        "ranks": _ranks(compared) if compared else "",
        "gains": [_gain_table(stored) for stored in compared],
        "search_spaces": _search_spaces(compared),
        "origins": _origins(found),
    }


def stored_results(folder: Path) -> list[Stored]:
    """The results of a known kind, in the order of :data:`TITLES`.

    Raises:
        DataError: There is no such folder.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} should be a folder with stored results, but there is none: give another one")
    found: list[Stored] = []
    for path in sorted(folder.glob("*.json")):
        kind = kind_of(path)
        if kind in TITLES:
            found.append(Stored(path.stem, load_result(path, kind)))
    return sorted(found, key=lambda stored: list(TITLES).index(stored.kind))


def _section(kind: str, found: Sequence[Stored], folder: Path) -> dict[str, Any]:
    """The results of one kind: a table of claims for each, and its figure where it is stored."""
    shown = [
        {
            "claims": claims_table(_claims_of(kind)(stored.saved)),
            "note": _note(kind, stored.saved, folder),
            "figure": f"{stored.name}.png" if (folder / f"{stored.name}.png").exists() else None,
        }
        for stored in found
    ]
    return {"title": TITLES[kind], "results": shown}


def _claims_of(kind: str) -> Callable[[Saved], list[VerdictRow]]:
    return _numbers_of(kind).claims


def _numbers_of(kind: str) -> Any:
    return import_module(f"poprisk_lab.paper.{kind}.numbers")


def _note(kind: str, saved: Saved, folder: Path) -> str | None:
    """What a reader must know about a stored result beside its claims."""
    note = getattr(_numbers_of(kind), "section_note", None)
    return None if note is None else note(saved, folder)


def claims_table(claims: Sequence[VerdictRow]) -> str:
    """Claims as a Markdown table, words on the left in every column.

    >>> print(claims_table([VerdictRow("faster", "2×", "1.1×", "0.9×", "Not held.")]))
    | claim | paper | ours, paper's conditions | ours, equal tuning | verdict |
    | --- | --- | --- | --- | --- |
    | faster | 2× | 1.1× | 0.9× | Not held. |
    """
    head = ["claim", "paper", "ours, paper's conditions", "ours, equal tuning", "verdict"]
    rows = [_cells([c.claim, c.paper, c.paper_conditions, c.equal_tuning, c.verdict]) for c in claims]
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *rows])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return table(_cells(head), (_cells(row) for row in rows))


def _cells(row: Sequence[str]) -> list[str]:
    """Each on one line, and without a bar that would end it."""
    return [" ".join(words.split()).replace("|", "\\|") for words in row]


def is_clean(study: StoredStudy) -> bool:
    """Whether no noise is in the task's data: none was put in, and labels, where one can choose, are the clean ones."""
    return family(study["task"])[-1]


def _tasks(found: Sequence[Stored], clean: bool | None = None) -> list[tuple[str, StoredStudy]]:
    """Every study that has an AdamW to compare with, searched or given, by its name; of one kind of data if asked."""
    return [
        (name, study)
        for stored in found
        for name, study in stored.studies.items()
        if adamw_reference(study) is not None and clean in (None, is_clean(study))
    ]


def _defaults(found: Sequence[Stored], chosen_on: DefaultTasks, clean: bool) -> dict[str, Any]:
    """The defaults against AdamW on noisy or on clean data: how often better, and a row for each task."""
    head = ["task", "defaults chosen on it", "metric", "defaults, last", "AdamW, last", "gain"]
    head += ["AdamW, best step", "gain over best"]
    tasks, tallies = _tasks(found, clean), []
    for inside in (False, True):
        group = [study for _, study in tasks if chosen_on.includes(study) == inside]
        if group:
            tallies.append({"sample": _sample(inside), **_tally(group)})
    return {
        "words": "Clean data" if clean else "Noisy data",
        "tallies": tallies,
        "table": _table(head, [_defaults_row(name, study, chosen_on) for name, study in tasks]),
    }


def _sample(inside: bool) -> str:
    return "in-sample" if inside else "out-of-sample"


def _tally(studies: Sequence[StoredStudy]) -> dict[str, int]:
    """On how many tasks the defaults' last step is better or worse than AdamW's, by Student's interval."""
    gains = [gain_over_adamw(study, reading.row(study, DEFAULTS_LABEL)) for study in studies]
    verdict = Counter("unclear" if gained is None else gained.verdict for gained in gains)
    diverged = [gained.diverged for gained in gains if gained is not None and gained.diverged is not None]
    return {
        "tasks": len(gains),
        **{name: verdict[name] for name in ("better", "worse", "unclear")},
        "defaults_diverged": sum(failed.first > 0 for failed in diverged),
        "adamw_diverged": sum(failed.second > 0 for failed in diverged),
    }


def _defaults_row(name: str, study: StoredStudy, chosen_on: DefaultTasks) -> list[str]:
    metric, adamw = reading.primary(study), adamw_reference(study)
    spec, defaults = metric["spec"], reading.row(study, DEFAULTS_LABEL)
    mark = "" if adamw is None or adamw["chosen_for"] else " *"
    return [
        name,
        _sample(chosen_on.includes(study)),
        metric["name"],
        mean_words(reading.final(defaults, metric["name"]), spec),
        ("–" if adamw is None else mean_words(reading.final(adamw, metric["name"]), spec)) + mark,
        gain_words(gain_over_adamw(study, defaults), spec, bootstrap=False),
        mean_words(adamw_checkpoints(study) or [math.nan], spec) + mark,
        gain_words(gain_over_oracle(study, defaults), spec, bootstrap=False),
    ]


def _gain_table(stored: Stored) -> str:
    """The gain of every row over AdamW on the tasks of one result."""
    tasks = _tasks([stored])
    labels = list(dict.fromkeys(row["label"] for _, study in tasks for row in compared_rows(study)))
    head = [TITLES[stored.kind], *(name for name, _ in tasks)]
    return _table(head, [[label, *(_gain_cell(study, label) for _, study in tasks)] for label in labels])


def _gain_cell(study: StoredStudy, label: str) -> str:
    row = reading.find_row(study, label)
    if row is None:
        return ""
    if row is adamw_reference(study):
        return "0"
    if reading.failed(row):
        return "diverged"
    gained = gain_over_adamw(study, row)
    if gained is None or gained.diverged is not None:
        return "–"
    words = signed(gained.value, reading.primary(study)["spec"])
    return words if gained.verdict == "unclear" else f"**{words}**"


def _ranks(found: Sequence[Stored]) -> str:
    """Mean rank of each row over the noisy and over the clean tasks with all arms, best on noisy ones first."""
    most = max(len(study["arms"]) for _, study in _tasks(found))
    groups = [[s for _, s in _tasks(found, clean) if len(s["arms"]) == most] for clean in (False, True)]
    shared = set.intersection(*({row["label"] for row in compared_rows(s)} for group in groups for s in group))
    ranks = [[_rank_of(study, shared) for study in group] for group in groups]
    means = {
        label: [math.fsum(r[label] for r in group) / len(group) if group else math.nan for group in ranks]
        for label in shared
    }
    ordered = sorted(shared, key=lambda label: (*(0.0 if math.isnan(m) else m for m in means[label]), label))
    head = ["mean rank", *(f"{words} ({len(g)} tasks)" for words, g in zip(("noisy", "clean"), groups, strict=True))]
    return _table(head, [[label, *("–" if math.isnan(m) else f"{m:.1f}" for m in means[label])] for label in ordered])


def _rank_of(study: StoredStudy, labels: set[str]) -> dict[str, int]:
    rows = [row["label"] for row in compared_rows(study) if row["label"] in labels]
    return {label: place for place, label in enumerate(rows, start=1)}


def _search_spaces(found: Sequence[Stored]) -> str:
    """The ranges that were searched, by arm and hyper-parameter."""
    spaces: dict[str, dict[str, list[str]]] = {}
    for _, study in _tasks(found):
        for arm in study["arms"].values():
            for knob, (low, high) in arm["search"].items():
                ranges = spaces.setdefault(arm["label"], {}).setdefault(knob, [])
                if (words := f"{_plain(low)} … {_plain(high)}") not in ranges:
                    ranges.append(words)
    knobs = list(dict.fromkeys(knob for space in spaces.values() for knob in space))
    head = ["arm", *(_knob(knob) for knob in knobs)]
    return _table(head, [[label, *("; ".join(space.get(k, [])) for k in knobs)] for label, space in spaces.items()])


def _knob(name: str) -> str:
    gap = name.removesuffix("_gap")
    return f"1 − {gap}" if gap != name else name.replace("_", " ")


def _plain(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-")


def _origins(found: Sequence[Stored]) -> str:
    """Sizes, time and machine of each result."""
    head = ["result", "tasks", "arms", "trials each", "tuning seeds", "report seeds", "minutes", "device", "commit"]
    return _table(head, [_origin_row(stored) for stored in found]) if found else ""


def _origin_row(stored: Stored) -> list[str]:
    environment, studies = stored.saved["environment"], list(stored.studies.values())
    arms = [arm for study in studies for arm in study["arms"].values()]
    seconds = math.fsum(study["seconds"] for study in studies)
    return [
        f"`{stored.name}.json`",
        str(len(studies)) if studies else "–",
        _range(len(study["arms"]) for study in studies),
        _range(len(arm["trials"]) for arm in arms),
        _range(len(trial["curve"]) for arm in arms for trial in arm["trials"]),
        _range(len(row["seeds"]) for study in studies for row in study["rows"]),
        f"{seconds / 60:.1f}" if studies else "–",
        environment["gpu"] or environment["cpu"],
        _commit(environment["commit"]),
    ]


def _range(counts: Iterable[int]) -> str:
    values = sorted(set(counts))
    if not values:
        return "–"
    return str(values[0]) if len(values) == 1 else f"{values[0]}–{values[-1]}"


def _commit(commit: str | None) -> str:
    """Its first letters; a plus where files differed from it."""
    if commit is None:
        return "–"
    return f"`{commit[:9]}{'+' if commit.endswith('+changes') else ''}`"
