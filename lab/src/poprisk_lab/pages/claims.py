"""One claim of the paper beside what was measured here: a row of the table of verdicts."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """A row of the table of verdicts; every figure in it is computed from a stored result.

    Attributes:
        claim: What the paper says, in a few words, with its figure or table.
        paper: The paper's number.
        paper_conditions: Ours with hyper-parameters shared between the optimizers, as in the paper.
        equal_tuning: Ours where every optimizer had the same budget to tune its own.
        sentence: The verdict in one plain sentence.
    """

    claim: str
    paper: str
    paper_conditions: str
    equal_tuning: str
    sentence: str
