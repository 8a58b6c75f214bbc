"""Write the comparison of several runs: one self-contained HTML page in the language of a report."""

import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from poprisk._core.store import write_text
from poprisk.report._analysis.analyze import Analysis
from poprisk.report._analysis.compare import Comparison, Disagreement
from poprisk.report._analysis.contents import Contents
from poprisk.report._drawing.comparison_rules import Entry, verdict
from poprisk.report._drawing.example_table import contents_of
from poprisk.report._drawing.first_screen import test_loss
from poprisk.report._drawing.sections import Section, sections
from poprisk.report._drawing.svg_chart import Axis, Line, line_chart, number
from poprisk.report._drawing.templates import render
from poprisk.report._drawing.wording import share_words, size_of
from poprisk.risk import Estimate

_MOST_DISPUTED = 100
_STEP = Axis("step")
_COLUMNS = {
    "run": "directory of the run, and its colour in the charts",
    "optimizer": "the optimizer, and its learning rate at the first step",
    "steps": "number of optimizer steps",
    "weights": "number of trainable weights",
    "training loss": "mean loss over all training examples at the last step",
    "population risk": "expected loss on new data with the same label noise, of the kept weights if examples were held "
    "back, otherwise of the last ones; a dash if it is not known",
    "memorized": "share of the drop in training loss that does not help on new data",
    "test loss": "loss on the test set, of the same weights as the population risk",
    "test accuracy": "share of the test set that the same weights get right",
    "wrong labels": "estimated number of wrong training labels; a dash if it is not known",
    "suspects": "number of training labels that look wrong",
}
"""Columns of the first table, with their meaning."""


def write_comparison(
    comparison: Comparison, path: str | Path, *, examples: bool = True, command: str | None = None
) -> Path:
    """Write the comparison of runs: one HTML file that needs no server and no network.

    Args:
        comparison: What :func:`~poprisk.report.compare_runs` returned.
        path: The file to write. It is replaced in one go, so it is never incomplete.
        examples: Whether to include pictures and texts of the examples.
        command: The command that the page names as the one that wrote it.

    Raises:
        MissingExtraError: jinja2 is not installed.
        OSError: The file cannot be written.
    """
    found, names = comparison.analyses, comparison.names
    shown, missing = _operators(found, names)
    headings, rows = compared(comparison)
    page = render(
        "compare.html",
        title=f"Comparison of {len(found)} runs",
        verdict=comparison_lines(comparison),
        columns={name: _COLUMNS[name] for name in headings},
        rows=rows,
        names=names,
        charts=_charts(found, names),
        disputed=_disputed(comparison, examples),
        why_none=comparison.why_no_disagreement,
        sections=shown,
        missing=missing,
        command=command or shlex.join(["poprisk", "compare", *(_where(each) for each in found)]),
    )
    return write_text(path, page)


def comparison_lines(comparison: Comparison) -> list[str]:
    """Which run is best, and on how many labels they disagree."""
    entries = [entry_of(name, each) for name, each in zip(comparison.names, comparison.analyses, strict=True)]
    tests = {(each.run.manifest["problem"] or {}).get("test_fingerprint") for each in comparison.analyses}
    lines = verdict(entries, same_data=comparison.same_data, same_test=len(tests) == 1 and None not in tests)
    split = comparison.disagreement
    if split is None:
        return lines
    kinds = {"predictions": split.predicted, "suspects": split.suspect, "training labels": split.given}
    apart = {kind: int((rows != rows[0]).any(0).sum()) for kind, rows in kinds.items()}
    words = ", ".join(f"different {kind} on {count}" for kind, count in apart.items() if count)
    disagree = f"They disagree on {len(split.examples)} examples: {words}."
    return [*lines, disagree if words else "They agree on every training example."]


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The verdict and the numbers of each run as JSON values."""
    rows = []
    for name, found in zip(comparison.names, comparison.analyses, strict=True):
        entry, memorized, table = entry_of(name, found), found.memorization, found.table
        rows.append(
            {
                "name": name,
                "run": None if found.run.path is None else found.run.path.as_posix(),
                "risk": None if entry.risk is None else entry.risk.to_dict(),
                "test_loss": None if entry.test_loss is None else entry.test_loss.value,
                "test_accuracy": entry.accuracy,
                "memorization": memorized and vars(memorized),
                "wrong_labels": None if table is None else table.wrong_labels.to_dict(),
                "suspects": None if table is None else int(table.is_suspect.sum()),
            }
        )
    split = comparison.disagreement
    disputed = None if split is None else split.examples.tolist()
    about = {"disputed": disputed, "same_data": comparison.same_data}
    return {"verdict": comparison_lines(comparison), "runs": rows, **about}


def entry_of(name: str, found: Analysis) -> Entry:
    """What the rules of a comparison look at."""
    loss, error = test_loss(found)
    tested = None
    if loss is not None:
        known = math.isfinite(error)
        tested = Estimate(loss, error, known, "" if known else "a single test example has no standard error")
    curves, accuracy = found.curves, None
    if curves is not None:
        last = curves.test_accuracy[-1] if curves.test_accuracy else None
        accuracy = curves.kept[2] if curves.kept is not None else last if found.run.kept is None else None
    return Entry(name, found.risk, tested, accuracy)


def compared(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table of runs, without columns that no run has."""
    rows = [_run_row(name, each) for name, each in zip(comparison.names, comparison.analyses, strict=True)]
    kept = [k for k in range(len(_COLUMNS)) if any(row[k] != "–" for row in rows)]
    return [list(_COLUMNS)[k] for k in kept], [[row[k] for k in kept] for row in rows]


def _run_row(name: str, found: Analysis) -> list[str]:
    """The numbers of one run, in the order of the columns."""
    run, curves, table, entry = found.run, found.curves, found.table, entry_of(name, found)
    lr = run.options(0)[0].get("lr")
    memorized, wrong = found.memorization, None if table is None else table.wrong_labels
    return [
        name,
        run.manifest["optimizer"]["name"].rpartition(".")[2] + ("" if lr is None else f", lr {lr:g}"),
        str(run.num_steps),
        str(run.num_weights),
        "–" if curves is None else number(curves.train[-1]),
        size_of(entry.risk) if entry.risk is not None and entry.risk.valid else "–",
        "–" if memorized is None else share_words(memorized.share, memorized.standard_error),
        "–" if entry.test_loss is None else number(float(entry.test_loss.value)),
        "–" if entry.accuracy is None else f"{100 * entry.accuracy:.1f}%",
        size_of(wrong) if wrong is not None and wrong.valid else "–",
        "–" if table is None or table.kind == "loss" else str(int(table.is_suspect.sum())),
    ]


def _charts(found: Sequence[Analysis], names: Sequence[str]) -> list[str]:
    """A chart for each quantity, with a curve for each run that has it."""
    kinds: list[tuple[str, Axis, Callable[[str, int, Analysis], Line | None]]] = [
        ("Estimated population risk ± one standard error", Axis("mean loss", log=None), _risk_line),
        ("Held-back loss of the averaged weights", Axis("mean loss", log=None), _held_line),
        ("Training loss", Axis("mean loss", log=None), _train_line),
        ("Test loss", Axis("mean loss", log=None), _test_line),
        ("Test accuracy", Axis("%"), _accuracy_line),
    ]
    charts = []
    for title, axis, line_of in kinds:
        lines = [line_of(name, k, each) for k, (name, each) in enumerate(zip(names, found, strict=True))]
        shown = [line for line in lines if line is not None]
        if shown:
            charts.append(line_chart(shown, _STEP, axis, title))
    return charts


def _risk_line(name: str, k: int, found: Analysis) -> Line | None:
    if not found.readings:
        return None
    steps = [float(r.step) for r in found.readings]
    values, errors = ([float(getattr(r.risk, x)) for r in found.readings] for x in ("value", "standard_error"))
    return Line(name, steps, values, k, errors, k, True, [not r.risk.valid for r in found.readings])


def _held_line(name: str, k: int, found: Analysis) -> Line | None:
    held = found.held_back
    if held is None:
        return None
    line = next((each for each in held.lines if each.tail == held.risk.tail), held.lines[0])
    return Line(name, [float(step) for step in line.steps], line.losses, k, line.errors, k, True)


def _train_line(name: str, k: int, found: Analysis) -> Line | None:
    return None if found.curves is None else _over_steps(name, k, found, found.curves.train)


def _test_line(name: str, k: int, found: Analysis) -> Line | None:
    values = None if found.curves is None else found.curves.test
    return None if values is None else _over_steps(name, k, found, values)


def _accuracy_line(name: str, k: int, found: Analysis) -> Line | None:
    values = None if found.curves is None else found.curves.test_accuracy
    return None if values is None else _over_steps(name, k, found, [100 * v for v in values])


def _over_steps(name: str, k: int, found: Analysis, values: Sequence[float]) -> Line:
    steps = [] if found.curves is None else [float(step) for step in found.curves.steps]
    return Line(name, steps, values, k, dash=k)


def _operators(found: Sequence[Analysis], names: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The other sections of the runs' reports: first charts side by side, and for each missing one of which runs."""
    made: dict[str, list[tuple[str, Section]]] = {}
    for name, each in zip(names, found, strict=True):
        for section in sections(each):
            if section.key != "curves":
                made.setdefault(section.key, []).append((name, section))
    shown, missing = [], []
    for parts in made.values():
        have = [(name, section) for name, section in parts if not section.missing]
        section = parts[0][1]
        if have:
            alike = have[0][1].meaning if len({each.meaning for _, each in have}) == 1 else ""
            charts = [(name, "" if alike else each.meaning, each.charts[0]) for name, each in have if each.charts]
            shown.append({"key": section.key, "title": section.title, "meaning": alike, "charts": charts})
        without = [(name, each.missing) for name, each in parts if each.missing]
        if without:
            missing.append({"title": section.title, "runs": [name for name, _ in without], "why": without[0][1]})
    return shown, missing


def _disputed(comparison: Comparison, examples: bool) -> dict[str, Any] | None:
    """The table of examples that the runs do not treat alike."""
    split = comparison.disagreement
    if split is None:
        return None
    count = min(len(split.examples), _MOST_DISPUTED)
    contents = contents_of(comparison.analyses[0], split.examples[:count].tolist()) if examples else Contents()
    rows = [_disputed_row(split, j, contents) for j in range(count)]
    return {"total": len(split.examples), "rows": rows, "contents": bool(contents.pictures or contents.texts)}


def _disputed_row(split: Disagreement, j: int, contents: Contents) -> dict[str, Any]:
    i = int(split.examples[j])
    given = split.given[:, j].tolist()
    runs = zip(given, split.predicted[:, j].tolist(), split.suspect[:, j].tolist(), strict=True)
    cells = [{"predicted": p, "wrong": p != g, "suspect": s, "given": g} for g, p, s in runs]
    same = given[0] if len(set(given)) == 1 else None
    shown = {"picture": contents.pictures.get(i), "text": contents.texts.get(i)}
    return {"example": i, "given": same, "cells": cells, **shown}


def _where(found: Analysis) -> str:
    return "RUN" if found.run.path is None else found.run.path.as_posix()
