"""An audit for a terminal: what was found, and the worst rows of its table."""

import json
import math
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from poprisk.risk import AuditTable

_NARROW = 72
_SHOWN = {
    "classes": ("example", "given_label", "suggested_label", "suspicion", "is_suspect", "mean_loss", "confidence"),
    "regression": ("example", "given_target", "suggested_target", "suspicion", "is_suspect", "residual_z"),
    "loss": ("example", "suspicion", "loss", "mean_loss"),
}
_HEADINGS = {
    "given_label": "given",
    "given_target": "given",
    "suggested_label": "suggested",
    "suggested_target": "suggested",
    "is_suspect": "suspect",
    "mean_loss": "mean loss",
    "residual_z": "residual z",
    "self_influence": "self-influence",
    "loo_loss": "left-out loss",
}


def audit_lines(table: AuditTable, top: int, width: int) -> Iterator[RenderableType]:
    """What was found, the worst rows (no table where it would not fit), and what is approximate."""
    yield Text(headline(table), style="bold")
    if top:
        yield from _list(table, top) if width < _NARROW else [_table(table, top)]
    for note in table.notes:
        yield Text(f"Note: {note}.")


def audit_json(table: AuditTable, top: int) -> str:
    """The same as one line of JSON; numbers that are not finite become null."""
    found = {
        "examples": len(table),
        "kind": table.kind,
        "wrong_labels": table.wrong_labels.to_dict(),
        "suspects": int(table.is_suspect.sum()),
        "moments": list(table.moments),
        "notes": list(table.notes),
        "worst": [{name: _finite(value) for name, value in row.items()} for row in table.worst(top)],
    }
    return json.dumps(found, allow_nan=False)


def headline(table: AuditTable) -> str:
    """How many labels are held to be wrong, in a sentence."""
    n, wrong = len(table), table.wrong_labels
    if table.kind == "loss":
        return f"{n} examples by their loss averaged over training; {wrong.reason}."
    counted = f"{float(wrong.value):.0f} ± {float(wrong.standard_error):.0f} of {n} labels are estimated to be wrong"
    return f"{counted}." if wrong.valid else f"{counted} (rough: {wrong.reason})."


def _table(table: AuditTable, top: int) -> Table:
    names = _columns(table)
    shown = Table(title=f"The {min(top, len(table))} most suspicious", title_justify="left", title_style="")
    for name in names:
        shown.add_column(_HEADINGS.get(name, name), justify="right")
    for row in table.worst(top):
        shown.add_row(*(_cell(row[name]) for name in names))
    return shown


def _list(table: AuditTable, top: int) -> Iterator[RenderableType]:
    names = _columns(table)
    for row in table.worst(top):
        yield Text(", ".join(f"{_HEADINGS.get(name, name)} {_cell(row[name])}" for name in names))


def _columns(table: AuditTable) -> list[str]:
    wanted = (*_SHOWN[table.kind], "self_influence", "loo_loss")
    return [name for name in wanted if name in table.columns]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
