r"""Train-test coupling under feature learning: what the operators of a recorded run say about its test displacement.

A small network learns an interaction, :math:`f^\star(x) = x_1 x_2`, by SGD with momentum and weight decay, which its
kernel at the start is bad at. Every step is recorded, the operators of the whole run are formed, and beside the test
displacement as it happened stand three predictions:

- *coupled*: :math:`A_\circ(\Delta u_S - source_S) + source_Q`, from the training displacement,
- *transferred*: :math:`-G g(0) + source_Q`, from the output gradient at the start,
- *frozen*: the first with kernel regression in the place of :math:`A_\circ`, its kernel that of the start.

Cases differ in their batches and in whether inputs occur twice. Repeated inputs give full batches an exact reservoir:
no step can tell two labels of one input apart. Minibatches can, as one of the two is drawn without the other, and then
the training displacement, the same for both, no longer says everything.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from poprisk._core.statistics import Mean, mean_over_seeds
from poprisk._core.store import save_result
from poprisk_lab.paper.coupling.measures import CouplingRun, measure_run
from poprisk_lab.paper.coupling.task import (
    FULL_BATCH,
    MINIBATCH,
    REPEATED,
    SMOKE,
    Case,
    CouplingConfig,
    interaction_problem,
    record,
    tanh_network,
)

__all__ = [
    "Case",
    "CaseSummary",
    "CouplingConfig",
    "CouplingResult",
    "Curve",
    "FULL_BATCH",
    "KIND",
    "MINIBATCH",
    "REPEATED",
    "SMOKE",
    "interaction_problem",
    "record",
    "run",
    "summarize",
    "tanh_network",
]

KIND = "coupling"
Progress = Callable[[int, int, str], None]
"""Called with how many runs are done, how many there are, and which one comes next ("" after the last)."""


@dataclass(frozen=True)
class Curve:
    """A quantity along the run: mean, lowest and highest over the seeds."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


@dataclass(frozen=True)
class CaseSummary:
    """A case over its seeds: means with standard errors where seeds differ, the worst where rounding is meant."""

    case: str
    coupled_error: Mean
    """Relative error of the coupled prediction."""
    worst_coupled_error: float
    worst_transferred_error: float
    sourceless_error: Mean
    r"""Relative error of :math:`A_\circ \Delta u_S`, as if nothing but the gradient moved the outputs."""
    frozen_error: Mean
    frozen_correlation: Mean
    drift_peak: Mean
    drift_end: Mean
    lowest_drift_peak: float
    drift_curve: Curve
    relative_remainder: Mean
    worst_relative_remainder: float
    lowest_train_root: float
    reservoir_dimensions: list[int]
    """One value for each seed."""
    worst_reservoir_leak: float
    residual_in_reservoir: Mean
    """Share of the output gradient at the end that lies in the reservoir."""
    tightness: Mean
    """Share of the bound on the test displacement, by visibility and dissipation, that is used."""
    worst_correction: float
    train_loss: list[Mean]
    test_error: list[Mean]
    bounds_checked: int
    bounds_held: int


@dataclass(frozen=True)
class CouplingResult:
    """All runs, and what they say together."""

    config: CouplingConfig
    runs: list[CouplingRun]
    summary: list[CaseSummary]

    def save(self, path: str | Path) -> Path:
        """Write it, with its environment, as JSON."""
        content = asdict(self)
        return save_result(path, KIND, content.pop("config"), content)


def run(config: CouplingConfig, progress: Progress | None = None) -> CouplingResult:
    """Train and measure every case with every seed, one after the other, then summarize.

    Args:
        config: Sizes, seeds, cases.
        progress: Told before each run and after the last; see :data:`Progress`.
    """
    report = progress or (lambda done, total, upcoming: None)
    jobs = [(seed, case) for seed in range(config.seeds) for case in config.cases]
    runs: list[CouplingRun] = []
    for seed, case in jobs:
        report(len(runs), len(jobs), f"seed {seed}, {case.name.replace('_', ' ')}")
        runs.append(measure_run(record(config, case, seed), case.name, seed, config.drift_every))
    report(len(runs), len(jobs), "")
    by_case = [[r for r in runs if r.case == case.name] for case in config.cases]
    return CouplingResult(config, runs, [summarize(group) for group in by_case])


def summarize(runs: Sequence[CouplingRun]) -> CaseSummary:
    """One case over its seeds."""

    def mean(read: Callable[[CouplingRun], float]) -> Mean:
        return mean_over_seeds([read(r) for r in runs])

    bounds = [bound for r in runs for bound in r.bounds]
    return CaseSummary(
        case=runs[0].case,
        coupled_error=mean(lambda r: r.coupled.relative_error),
        worst_coupled_error=max(r.coupled.relative_error for r in runs),
        worst_transferred_error=max(r.transferred.relative_error for r in runs),
        sourceless_error=mean(lambda r: r.sourceless_error),
        frozen_error=mean(lambda r: r.frozen.relative_error),
        frozen_correlation=mean(lambda r: r.frozen.correlation),
        drift_peak=mean(lambda r: max(r.drift)),
        drift_end=mean(lambda r: r.drift[-1]),
        lowest_drift_peak=min(max(r.drift) for r in runs),
        drift_curve=_curve(runs[0].drift_steps, [r.drift for r in runs]),
        relative_remainder=mean(lambda r: r.relative_remainder),
        worst_relative_remainder=max(r.relative_remainder for r in runs),
        lowest_train_root=min(r.smallest_train_root for r in runs),
        reservoir_dimensions=[r.reservoir_dimension for r in runs],
        worst_reservoir_leak=max(r.reservoir_leak for r in runs),
        residual_in_reservoir=mean(lambda r: r.residual_in_reservoir[-1]),
        tightness=mean(lambda r: next(bound.left / bound.right for bound in r.bounds if bound.name == "visibility")),
        worst_correction=max(max(r.corrections) for r in runs),
        train_loss=[mean(lambda r, end=end: r.train_losses[end]) for end in (0, 1)],
        test_error=[mean(lambda r, end=end: r.test_errors[end]) for end in (0, 1)],
        bounds_checked=len(bounds),
        bounds_held=sum(bound.holds for bound in bounds),
    )


def _curve(steps: list[int], curves: list[list[float]]) -> Curve:
    columns = list(zip(*curves, strict=True))
    means = [mean_over_seeds(column).value for column in columns]
    return Curve(steps, means, [min(column) for column in columns], [max(column) for column in columns])
