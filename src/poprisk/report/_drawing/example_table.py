"""The table of examples for the page: its columns, rounded values, and the contents of each example."""

import math
from typing import Any

from torch import Tensor

from poprisk.errors import RunError
from poprisk.report._analysis.analyze import MOST_CONTENTS as MOST_ROWS
from poprisk.report._analysis.analyze import Analysis
from poprisk.report._analysis.contents import Contents, example_contents
from poprisk.report._analysis.neighbours import Neighbours
from poprisk.report._drawing.commands import review_commands
from poprisk.risk import DESCRIPTIONS, AuditTable, data_fingerprint, run_id

_TITLES = {
    "example": "#",
    "given_label": "given",
    "given_target": "given",
    "suggested_label": "suggested",
    "suggested_target": "suggested",
    "suspicion": "suspicion",
    "is_suspect": "suspect",
    "predicted_label": "predicted",
    "loss": "loss",
    "mean_loss": "mean loss",
    "confidence": "confidence",
    "residual_z": "residual z",
    "self_influence": "self-influence",
    "loo_loss": "left-out loss",
    "group": "group",
}
_PRIVATE = ("given_target", "suggested_target")
"""Columns that show the content of an example: a value to predict."""


def table_data(found: Analysis, *, contents: bool = True) -> dict[str, Any] | None:
    """The table of examples as JSON values; None if the examples were not audited.

    Args:
        found: The analysis.
        contents: Whether to include pictures, texts and values to predict.
    """
    table = found.table
    if table is None:
        return None
    names = [n for n in _TITLES if n in table.columns and (contents or n not in _PRIVATE)]
    order = table.order()[:MOST_ROWS]
    near = found.neighbours or {}
    shown = contents_of(found, _wanted(order, near)) if contents else Contents()
    columns = [(name, table[name][order]) for name in names]
    return {
        "columns": [{"name": n, "title": _TITLES[n], "help": DESCRIPTIONS[n], "kind": _kind(table, n)} for n in names],
        "rows": [list(row) for row in zip(*(_values(*c) for c in columns), strict=True)],
        "pictures": {str(i): picture for i, picture in shown.pictures.items()},
        "texts": {str(i): text for i, text in shown.texts.items()},
        "neighbours": {str(i): _near(n) for i, n in near.items()},
        "labels": _labels(table) if "given_label" in names else [],
        "kind": table.kind,
        "reviewable": any(name in names for name in ("suggested_label", "suggested_target")),
        "examples": len(table),
        "run": run_id(found.run),
        "fingerprint": data_fingerprint(found.run),
        "after_review": review_commands(found.run),
    } | {"notes": _notes(found, table, shown, contents)}


def _labels(table: AuditTable) -> list[int]:
    """All classes: given, or suggested for some example."""
    given, suggested = (table.columns.get(name) for name in ("given_label", "suggested_label"))
    return sorted({int(v) for column in (given, suggested) if column is not None for v in column.tolist()})


def contents_of(found: Analysis, examples: list[int]) -> Contents:
    """Pictures or texts of some examples, from the run's problem, or as they were kept with the analysis."""
    if found.contents is not None:
        return found.contents
    try:
        return example_contents(found.run.problem, examples)
    except RunError as error:  # the analysis was kept, but its problem is not available
        return Contents(note=f"the contents of the examples are not shown: {error}")


def _notes(found: Analysis, table: AuditTable, shown: Contents, contents: bool) -> list[str]:
    notes = list(table.notes)
    if len(table) > MOST_ROWS:
        more = "poprisk audit RUN --output all.csv writes them all"
        notes.append(f"the {MOST_ROWS} most suspicious of {len(table)} examples are shown; {more}")
    if not contents:
        notes.append("the contents of the examples were left out (--no-examples)")
    elif shown.note:
        notes.append(shown.note)
    elif not shown.pictures and not shown.texts:
        notes.append(
            "to see the examples, pass Problem(…, show=function), with function(i) a text or a picture of example i"
        )
    if found.neighbours is None:
        notes.append(f"no influential neighbours: {found.left_out.get('neighbours', 'not computed')}")
    return notes


def _wanted(order: Tensor, near: dict[int, Neighbours]) -> list[int]:
    """Examples whose contents to include, most important first: those with neighbours, their neighbours, the rest."""
    around = [j for n in near.values() for j, _ in (*n.supports, *n.opposes)]
    return list(dict.fromkeys([*near, *around, *order.tolist()]))


def _kind(table: AuditTable, name: str) -> str:
    if name in ("is_suspect",):
        return "flag"
    if name in ("given_label", "suggested_label", "predicted_label"):
        return "label"
    return "group" if name == "group" else "number" if table[name].is_floating_point() else "whole"


def _values(name: str, column: Tensor) -> list[Any]:
    """Values rounded to four digits, but targets, which are compared when decisions are read back."""
    values = column.tolist()
    if not column.is_floating_point():
        return values
    if name in _PRIVATE:
        return [v if math.isfinite(v) else None for v in values]
    return [float(f"{v:.4g}") if math.isfinite(v) else None for v in values]


def _near(found: Neighbours) -> dict[str, list[list[float]]]:
    return {
        "supports": [[j, float(f"{v:.2g}")] for j, v in found.supports],
        "opposes": [[j, float(f"{v:.2g}")] for j, v in found.opposes],
    }
