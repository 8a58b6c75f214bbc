"""Two to five runs side by side: their analyses, and the labels on which they disagree."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from poprisk.errors import HyperparameterError
from poprisk.report._analysis.analyze import Analysis, analyze
from poprisk.report._analysis.kept import KeptAnalysis
from poprisk.risk import data_fingerprint
from poprisk.runs import Run, as_run

MOST_RUNS = 5
QUICK_PARTS = ("examples", "curves", "risk", "memorization")
"""Parts that a comparison computes; the others are shown where they are kept with the runs."""


@dataclass(frozen=True, eq=False)
class Disagreement:
    """Examples that the runs do not treat alike."""

    examples: Tensor
    """Their positions, the most disputed and suspicious first."""
    given: Tensor
    """The label each run was trained on, one row per run."""
    predicted: Tensor
    """The label each run's last weights predict, one row per run."""
    suspect: Tensor
    """Whether each run's audit suspects the given label, one row per run."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Analyses of several runs, and on which labels they disagree."""

    names: list[str]
    analyses: list[Analysis]
    same_data: bool
    """Whether all runs were trained on the same examples with the same labels."""
    disagreement: Disagreement | None
    why_no_disagreement: str = ""


def compare_runs(
    runs: Sequence[Run | Analysis | str | Path], *, budget: float | None = None, names: Sequence[str] | None = None
) -> Comparison:
    """Compare two to five recorded runs.

    Examples, curves, risk and memorization are computed within the time budget; operators, gates and kernels are used
    where ``poprisk analyze`` or ``poprisk report`` kept them with the run, as they take longer.

    Args:
        runs: The runs, paths of their directories, or their analyses.
        budget: Approximate time, in seconds on one CPU core, that each part of each run may take. Default: that of the
            analysis kept with the run, otherwise 30.
        names: Names of the runs; default: those of their directories.

    Returns:
        The comparison. :func:`~poprisk.report.write_comparison` writes it as an HTML page.

    Raises:
        HyperparameterError: there are fewer than two runs or more than five, or the names are not as many.

    >>> from poprisk import Problem, train
    >>> problem = Problem(torch.nn.Linear, "cross_entropy", torch.eye(2).repeat(6, 1), torch.arange(2).repeat(6),
    ...                   arguments={"in_features": 2, "out_features": 2})
    >>> runs = [train(problem, lambda p: torch.optim.SGD(p, lr=lr), steps=9, progress=False) for lr in (0.1, 1.0)]
    >>> found = compare_runs(runs, names=["slow", "fast"])
    >>> found.same_data, len(found.disagreement.examples)
    (True, 0)
    """
    if not 2 <= len(runs) <= MOST_RUNS:
        raise HyperparameterError(f"a comparison takes 2 to {MOST_RUNS} runs, got {len(runs)}")
    if names is not None and len(names) != len(runs):
        raise HyperparameterError(f"there must be a name for each of the {len(runs)} runs, got {len(names)}")
    analyses = [each if isinstance(each, Analysis) else quick_analysis(as_run(each), budget) for each in runs]
    data = {data_fingerprint(found.run) for found in analyses}
    named = list(names or run_names([found.run for found in analyses]))
    return Comparison(named, analyses, len(data) == 1 and "" not in data, *_disagreement(analyses))


def quick_analysis(run: Run, budget: float | None = None) -> Analysis:
    """An analysis with the quick parts computed, and all others as they are kept with the run."""
    kept = None if run.path is None else KeptAnalysis.of(run, budget, writes=budget is None)  # another would replace it
    return analyze(run, budget=budget, kept=kept, parts=QUICK_PARTS, progress=False)


def run_names(runs: Sequence[Run]) -> list[str]:
    """Names of runs by the last parts of their paths that tell them apart; numbers for runs in memory."""
    parts = [run.path.resolve().parts if run.path is not None else (f"run {k}",) for k, run in enumerate(runs, 1)]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [f"run {k}" for k in range(1, len(runs) + 1)]  # the same run twice


def _disagreement(analyses: Sequence[Analysis]) -> tuple[Disagreement | None, str]:
    tables = [found.table for found in analyses if found.table is not None and found.table.kind == "classes"]
    if len(tables) < len(analyses):
        return None, "this needs targets that are classes, and the examples of every run"
    if len({len(table) for table in tables}) > 1:
        return None, f"the runs have different numbers of examples: {', '.join(str(len(t)) for t in tables)}"
    given, predicted, suspect = (
        torch.stack([table[name] for table in tables]) for name in ("given_label", "predicted_label", "is_suspect")
    )
    apart = sum((rows != rows[0]).any(0).long() for rows in (given, predicted, suspect))
    suspicion = torch.stack([table["suspicion"] for table in tables]).mean(0)
    disputed = torch.as_tensor(apart > 0).nonzero().squeeze(1)
    order = (apart + suspicion)[disputed].argsort(descending=True, stable=True)  # type: ignore[index]
    rows = disputed[order]
    return Disagreement(rows, given[:, rows], predicted[:, rows], suspect[:, rows]), ""
