"""One claim of the paper beside what was measured here: a row of the page of verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from poprisk_lab.pages.template import render_block


@dataclass(frozen=True)
class VerdictRow:
    """A row of the page of verdicts; every number in it is computed from a stored result.

    Attributes:
        claim: What the paper says, in a few words, with its figure or table.
        paper: The paper's number.
        paper_conditions: Our number with hyper-parameters shared between the optimizers, as in the paper.
        equal_tuning: Our number where every optimizer had the same budget to tune its own hyper-parameters.
        verdict: The verdict in one sentence.
    """

    claim: str
    paper: str
    paper_conditions: str
    equal_tuning: str
    verdict: str


def verdict_row(package: str, slots: Mapping[str, Any], prefix: str = "") -> VerdictRow:
    """A row from the blocks of ``claim.md.jinja`` in a package, one block for each attribute.

    Args:
        package: The folder of the claim, e.g. ``poprisk_lab.paper.pinn``.
        slots: Numbers for the template.
        prefix: How the names of the blocks begin, where a folder has several claims: ``speed`` for ``speed_claim``.
    """
    start = f"{prefix}_" if prefix else ""
    return VerdictRow(*(render_block(package, start + field.name, slots) for field in fields(VerdictRow)))
