"""The page of verdicts: every claim beside what was measured, from the stored results; no number is typed by hand.

``python -m poprisk_lab.pages.verdicts results -o results/README.md``
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result, write_text
from poprisk.errors import DataError
from poprisk_lab.engine import reading
from poprisk_lab.engine.reading import StoredStudy
from poprisk_lab.pages.claims import Claim
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
from poprisk_lab.pages.wording import bullets, table, wrapped
from poprisk_lab.paper.default_choice.tasks import DefaultTasks, default_tasks, family

Saved = Mapping[str, Any]
CLAIMS = {
    "grokking": "poprisk_lab.paper.grokking.figure:claims_grokking",
    "pinn": "poprisk_lab.paper.pinn.page:claims_pinn",
    "lorenz": "poprisk_lab.paper.lorenz.figure:claims_lorenz",
    "inr": "poprisk_lab.paper.inr.page:claims_inr",
    "dpo": "poprisk_lab.paper.dpo.figure:claims_dpo",
    "labels": "poprisk_lab.paper.labels.page:claims_labels",
    "cifar": "poprisk_lab.paper.labels.page:claims_labels",
    "teacher": "poprisk_lab.paper.teacher.figure:claims_teacher",
    "char_language": "poprisk_lab.paper.char_language.figure:claims_char_language",
    "sft": "poprisk_lab.paper.sft.figure:claims_sft",
}
"""Where the verdicts of each kind of result are written, in the order of the page."""
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
    folder = Path(folder)
    found, chosen_on = stored_results(folder), default_tasks(folder)
    parts = ["# Verdicts", *_introduction(found, chosen_on)]
    for kind in CLAIMS:
        parts += _experiment(kind, [stored for stored in found if stored.kind == kind], folder)
    compared = [stored for stored in found if _tasks([stored])]
    if compared:
        parts += ["## PopRiskAdamW at its defaults against AdamW", *_defaults(compared, chosen_on)]
        parts += ["## Every optimizer on every task", *_every_optimizer(compared)]
        parts += ["## What was searched", *_search_spaces(compared)]
    parts += ["## How it was made", *_origin(found)]
    return "\n\n".join(parts) + "\n"


def stored_results(folder: Path) -> list[Stored]:
    """The results of a known kind, in the order of :data:`CLAIMS`.

    Raises:
        DataError: There is no such folder.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} should be a folder with stored results, but there is none: give another one")
    found: list[Stored] = []
    for path in sorted(folder.glob("*.json")):
        kind = _kind(path)
        if kind in CLAIMS:
            found.append(Stored(path.stem, load_result(path, kind)))
    return sorted(found, key=lambda stored: list(CLAIMS).index(stored.kind))


def _kind(path: Path) -> str | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return content.get("kind") if isinstance(content, dict) else None


def _introduction(found: Sequence[Stored], chosen_on: DefaultTasks) -> Iterator[str]:
    yield wrapped(
        "What the paper claims of its optimizer, beside what was measured here. *Paper's conditions*: the optimizers "
        "share their hyper-parameters, as in the paper. *Equal tuning*: every optimizer had the same number of trials "
        "over its own search space (listed below), chosen on tuning seeds and reported on others, the same for all. "
        "Metrics are of test data, in tuning too, for AdamW as for all others. *Last step* is where a run ends, *best "
        "step* the best checkpoint, which takes an oracle to keep. Intervals are 95%, over paired seeds. Where the "
        "best of k gates is shown, the gates together had k times AdamW's trials; beside it stands the one gate fixed "
        "in advance, which had AdamW's number."
    )
    yield wrapped(chosen_on.sentence)
    missing = [kind for kind in CLAIMS if kind not in {stored.kind for stored in found}]
    if missing:
        commands = (f"{TITLES[kind]}: `poprisk reproduce {kind} --output results`" for kind in missing)
        yield f"Not run:\n\n{bullets(commands)}"


def _experiment(kind: str, found: Sequence[Stored], folder: Path) -> Iterator[str]:
    if found:
        yield f"## {TITLES[kind]}"
    for stored in found:
        yield claims_table(_claims_of(kind)(stored.saved))
        if (folder / f"{stored.name}.png").exists():
            yield f"![{TITLES[kind]}]({stored.name}.png)"


def _claims_of(kind: str) -> Callable[[Saved], list[Claim]]:
    module, function = CLAIMS[kind].split(":")
    return getattr(import_module(module), function)


def claims_table(claims: Sequence[Claim]) -> str:
    """Claims as a Markdown table, words on the left in every column.

    >>> print(claims_table([Claim("faster", "2×", "1.1×", "0.9×", "Not held.")]))
    | claim | paper | ours, paper's conditions | ours, equal tuning | verdict |
    | --- | --- | --- | --- | --- |
    | faster | 2× | 1.1× | 0.9× | Not held. |
    """
    head = ["claim", "paper", "ours, paper's conditions", "ours, equal tuning", "verdict"]
    rows = [_cells([c.claim, c.paper, c.paper_conditions, c.equal_tuning, c.sentence]) for c in claims]
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


def _defaults(found: Sequence[Stored], chosen_on: DefaultTasks) -> Iterator[str]:
    yield wrapped(
        "The last step of the defaults, the same on every task, against the tuned AdamW's last step, and against its "
        f"best checkpoint. Where no AdamW was searched it is the {GIVEN_ADAMW} (marked *). Gains are in units of the "
        "metric, and more is better whichever way the metric goes. In-sample: the defaults were chosen on such a task."
    )
    head = ["task", "defaults chosen on it", "metric", "defaults, last", "AdamW, last", "gain"]
    head += ["AdamW, best step", "gain over best"]
    for clean, words in ((False, "Noisy data"), (True, "Clean data")):
        tasks = _tasks(found, clean)
        for inside in (False, True):
            group = [study for _, study in tasks if chosen_on.includes(study) == inside]
            if group:
                yield wrapped(f"{words}, {_sample(inside)}: {_tally(group)}")
        if tasks:
            yield _table(head, [_defaults_row(name, study, chosen_on) for name, study in tasks])


def _sample(inside: bool) -> str:
    return "in-sample" if inside else "out-of-sample"


def _tally(studies: Iterable[StoredStudy]) -> str:
    """On how many tasks the defaults' last step is better or worse than AdamW's, by Student's interval."""
    gains = [gain_over_adamw(study, reading.row(study, DEFAULTS_LABEL)) for study in studies]
    verdict = Counter("unclear" if gained is None else gained.verdict for gained in gains)
    diverged = [gained.diverged for gained in gains if gained is not None and gained.diverged is not None]
    words = f"better than AdamW's last step on {verdict['better']} of {len(gains)} tasks, "
    words += f"worse on {verdict['worse']}, undecided on {verdict['unclear']}"
    sides = (("the defaults", sum(d.first > 0 for d in diverged)), ("AdamW", sum(d.second > 0 for d in diverged)))
    return words + "".join(f"; {side} diverged on {count}" for side, count in sides if count) + "."


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


def _every_optimizer(found: Sequence[Stored]) -> Iterator[str]:
    yield wrapped(
        f"Gain of the last step over the tuned AdamW's (the {GIVEN_ADAMW}, where none was searched), in units of each "
        "task's metric; bold where the interval excludes zero. The first table has the mean rank over the "
        "tasks with all arms, 1 is best."
    )
    yield _ranks(found)
    for stored in found:
        tasks = _tasks([stored])
        labels = list(dict.fromkeys(row["label"] for _, study in tasks for row in compared_rows(study)))
        head = [TITLES[stored.kind], *(name for name, _ in tasks)]
        yield _table(head, [[label, *(_gain_cell(study, label) for _, study in tasks)] for label in labels])


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


def _search_spaces(found: Sequence[Stored]) -> Iterator[str]:
    yield wrapped(
        "Trials are quasi-random (Sobol), evenly in the logarithm of each knob, and the same for every task. Where a "
        "cell has more than one range, tasks differ."
    )
    spaces: dict[str, dict[str, list[str]]] = {}
    for _, study in _tasks(found):
        for arm in study["arms"].values():
            for knob, (low, high) in arm["search"].items():
                ranges = spaces.setdefault(arm["label"], {}).setdefault(knob, [])
                if (words := f"{_plain(low)} … {_plain(high)}") not in ranges:
                    ranges.append(words)
    knobs = list(dict.fromkeys(knob for space in spaces.values() for knob in space))
    head = ["arm", *(_knob(knob) for knob in knobs)]
    yield _table(head, [[label, *("; ".join(space.get(k, [])) for k in knobs)] for label, space in spaces.items()])


def _knob(name: str) -> str:
    gap = name.removesuffix("_gap")
    return f"1 − {gap}" if gap != name else name.replace("_", " ")


def _plain(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-")


def _origin(found: Sequence[Stored]) -> Iterator[str]:
    yield "An experiment with its figure, then this page from the stored files:"
    yield (
        "```\npoprisk reproduce NAME --output results\n"
        "python -m poprisk_lab.pages.verdicts results -o results/README.md\n```"
    )
    head = ["result", "tasks", "arms", "trials each", "tuning seeds", "report seeds", "minutes", "device", "commit"]
    rows = [_origin_row(stored) for stored in found]
    if rows:
        yield _table(head, rows)


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


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m poprisk_lab.pages.verdicts results -o results/README.md``."""
    parser = argparse.ArgumentParser(
        prog="python -m poprisk_lab.pages.verdicts", description="Write the page of verdicts."
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("results"), help="where the stored results are")
    parser.add_argument("-o", "--output", type=Path, default=None, help="default: README.md in that folder")
    options = parser.parse_args(arguments)
    page = write_text(options.output or options.folder / "README.md", verdicts(options.folder))
    print(f"Wrote {page}")


if __name__ == "__main__":
    main()
