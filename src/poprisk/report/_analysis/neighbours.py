"""The training examples that most influenced the loss of each suspicious example."""

from dataclasses import dataclass

from poprisk.errors import DataError
from poprisk.risk import AuditTable, influence_on
from poprisk.runs import Run

SUSPECTS = 24
"""Number of suspicious examples to find neighbours for, at most."""
_NEIGHBOURS = 3


@dataclass(frozen=True)
class Neighbours:
    """Training examples with the largest influence on one example's loss, and the predicted change on removal."""

    supports: list[tuple[int, float]]
    """Removing these would raise its loss."""
    opposes: list[tuple[int, float]]
    """Removing these would lower its loss."""


def neighbours(run: Run, table: AuditTable | None) -> dict[int, Neighbours]:
    """Find the most influential training examples for each of the most suspicious ones, if they were audited."""
    if table is None:
        raise DataError("the examples were not audited")
    chosen = table.order()[: min(SUSPECTS, max(3, int(table.is_suspect.sum())))]
    inputs, targets = run.problem.batch(chosen)
    influence = influence_on(run, inputs, targets).double().cpu()
    out = {}
    for row, i in zip(influence, chosen.tolist(), strict=True):
        row[i] = 0.0
        up, down = row.topk(min(_NEIGHBOURS, len(row))), (-row).topk(min(_NEIGHBOURS, len(row)))
        supports = [(j, v) for v, j in zip(up.values.tolist(), up.indices.tolist(), strict=True) if v > 0]
        opposes = [(j, -v) for v, j in zip(down.values.tolist(), down.indices.tolist(), strict=True) if v > 0]
        out[i] = Neighbours(supports, opposes)
    return out
