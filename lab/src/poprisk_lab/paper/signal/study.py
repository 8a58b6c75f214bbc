r"""Isolating the signal channel: what a run on wrong labels dissipated, per complexity, and what a test set sees of it.

A small network learns two moons, a share of whose labels is flipped, until it has memorized them. The run is recorded,
its dissipation gramian W is formed and normalized by the metric :math:`R = I + \gamma \hat L_S` of the inputs'
nearest-neighbour graph, :math:`C_R = R^{-1/2} W R^{-1/2}`. Beside the bound :math:`\|\Gamma_Q\| \lambda_{r+1}` of
``thm:train_only_minimax_signal`` stand what an operator built to attain it loses, and what the run's own test operator
loses. A second part asks on handwritten digits whether the directions find the wrong labels; see
:mod:`poprisk_lab.paper.signal.groups`.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from poprisk._core.statistics import Mean, mean_over_seeds
from poprisk._core.store import save_result
from poprisk.operators import Operators, Window, dissipation_channels
from poprisk.runs import Problem, Run, train
from poprisk.theory import SignalDirections, example_groups, signal_directions
from poprisk.theory.effective_rank import effective_rank
from poprisk.theory.graph import graph_metric
from poprisk.theory.metrics import euclidean_metric
from poprisk_lab.paper.mnist_influence.metrics import mislabel_auc
from poprisk_lab.paper.signal.groups import SCORES, DigitsRun, measure_digits
from poprisk_lab.paper.signal.task import SMOKE, SignalConfig, moons_problem, tanh_classifier, two_moons
from poprisk_lab.theory.lost_motion import admissible_bound, attaining_transfer, lost_motion_path, tail_bound

__all__ = [
    "KIND",
    "SMOKE",
    "SignalConfig",
    "SignalResult",
    "SignalRun",
    "SignalSummary",
    "measure_moons",
    "moons_problem",
    "run",
    "summarize",
    "tanh_classifier",
    "two_moons",
]

KIND = "signal"
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class SignalRun:
    """One run on the moons."""

    seed: int
    steps: list[int]
    train_losses: list[float]
    test_losses: list[float]
    """Mean logistic loss against the true labels of the test set."""
    test_accuracies: list[float]
    dissipation: list[float]
    """Eigenvalues of W, largest first."""
    per_complexity: list[float]
    """Eigenvalues of C_R."""
    dissipation_rank: float
    """Effective rank of W: the participation ratio of its eigenvalues."""
    signal_rank: float
    """Effective rank of C_R, likewise."""
    visibility_norm: float
    r""":math:`\|\Gamma_Q\|`."""
    ranks: list[int]
    bound: list[float]
    r""":math:`\|\Gamma_Q\|\,\lambda_{r+1}`."""
    attained: list[float]
    """What the best projector of each rank loses of an admissible operator built against it."""
    realized: list[float]
    """What it loses of the run's own test operator."""
    bounds_checked: int
    """The admissible class, and the tail bound of the run's output gradient for every rank."""
    bounds_held: int
    inputs: list[list[float]]
    labels: list[int]
    """As trained on."""
    wrong: list[bool]
    kept_directions: int
    """The effective rank, rounded up."""
    energy: list[float]
    """Share of each example that these directions hold."""
    energy_auc: float
    """Area under the ROC curve of the energy as a score for wrong labels; 0.5 is chance."""
    tail_auc: float
    """The same for the output gradient outside the leading directions, whose number is the effective rank."""
    processor_seconds: float


@dataclass(frozen=True)
class SignalSummary:
    """Means over the seeds."""

    dissipation_rank: Mean
    signal_rank: Mean
    dissipation_drop: Mean
    r""":math:`\log_{10} \lambda_1 / \lambda_{r+1}` of W at its own effective rank r, rounded up."""
    signal_drop: Mean
    """The same of C_R."""
    dissipation_decades: Mean
    """From the largest to the smallest eigenvalue of W that is not 0."""
    signal_decades: Mean
    used: Mean
    """Geometric mean over ranks of realized over bound."""
    worst_attained_error: float
    """Largest relative distance of what is attained from the bound, over ranks whose bound is no rounding error."""
    train_loss_end: Mean
    test_loss_best: Mean
    test_loss_end: Mean
    test_accuracy_best: Mean
    test_accuracy_end: Mean
    energy_auc: Mean
    tail_auc: Mean
    bounds_checked: int
    bounds_held: int
    digits: dict[str, Mean]
    """Area under the ROC curve by score, over the digits' seeds."""
    digits_lowest: dict[str, float]
    """The lowest seed."""


@dataclass(frozen=True)
class SignalResult:
    """All runs, and what they say together."""

    config: SignalConfig
    runs: list[SignalRun]
    digits: list[DigitsRun]
    summary: SignalSummary

    def save(self, path: str | Path) -> Path:
        """Write it, with its environment, as JSON."""
        content = asdict(self)
        return save_result(path, KIND, content.pop("config"), content)


def run(config: SignalConfig, progress: Progress | None = None) -> SignalResult:
    """Train and measure: the moons with every seed, then the digits with every seed of theirs."""
    report = progress or (lambda done, total, upcoming: None)
    total, runs, digits = config.seeds + config.digits.seeds, [], []
    for seed in range(config.seeds):
        report(len(runs), total, f"moons, seed {seed}")
        runs.append(measure_moons(config, seed))
    for seed in range(config.digits.seeds):
        report(len(runs) + len(digits), total, f"digits, seed {seed}")
        digits.append(measure_digits(config.digits, seed))
    report(total, total, "")
    return SignalResult(config, runs, digits, summarize(runs, digits))


def measure_moons(config: SignalConfig, seed: int) -> SignalRun:
    """One recorded run with Adam on full batches: its losses, its spectra, what is lost, and where its signal lies."""
    began = time.process_time()
    problem, wrong = moons_problem(config, seed)
    rule = partial(torch.optim.Adam, lr=config.lr)
    recorded = train(problem, rule, config.steps, seed=seed, dtype=torch.float64, progress=False)
    ops = Window.of_run(recorded, dense=True).dense_operators()
    metric = graph_metric(problem.inputs, config.gamma, neighbours=config.neighbours)  # type: ignore[arg-type]
    directions = signal_directions(ops.factor, metric)
    raw = signal_directions(ops.factor, euclidean_metric(config.examples)).values
    visibility = dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer).visibility_norm
    path = lost_motion_path(directions, ops.test_transfer, visibility)
    kept = math.ceil(directions.effective_rank())
    groups = example_groups(directions, kept, gradient=ops.output_gradient)
    assert groups.tail_norm is not None
    bounds = _bounds(directions, ops, visibility)
    return SignalRun(
        seed=seed,
        **_losses(problem, recorded, config.look_every),
        dissipation=_short(raw),
        per_complexity=_short(directions.values),
        dissipation_rank=effective_rank(raw),
        signal_rank=directions.effective_rank(),
        visibility_norm=visibility,
        ranks=path.ranks,
        bound=_short(path.bound, 15),
        attained=[_attained(directions, r, visibility) for r in path.ranks],
        realized=_short(path.realized),
        bounds_checked=len(bounds),
        bounds_held=sum(bounds),
        inputs=[_short(x) for x in problem.inputs],  # type: ignore[union-attr]
        labels=problem.targets.flatten().tolist(),
        wrong=wrong.tolist(),
        kept_directions=kept,
        energy=_short(groups.captured),
        energy_auc=float(mislabel_auc(groups.captured, wrong).value),
        tail_auc=float(mislabel_auc(groups.tail_norm, wrong).value),
        processor_seconds=round(time.process_time() - began, 2),
    )


def _losses(problem: Problem, recorded: Run, every: int) -> dict[str, list]:
    model = problem.model(torch.float64)
    assert problem.test is not None
    test_inputs, test_targets = problem.test
    steps = [*range(0, recorded.num_steps, every), recorded.num_steps]
    table: dict[str, list] = {"steps": steps, "train_losses": [], "test_losses": [], "test_accuracies": []}
    for k in steps:
        w = recorded.weights(k)
        table["train_losses"].append(model.per_example_losses(w, problem.inputs, problem.targets).mean().item())
        table["test_losses"].append(model.per_example_losses(w, test_inputs, test_targets).mean().item())
        right = (model.outputs(w, test_inputs) > 0) == (test_targets == 1)
        table["test_accuracies"].append(right.double().mean().item())
    return table


def _attained(directions: SignalDirections, r: int, visibility: float) -> float:
    """What the best projector loses of the operator built against it, measured on that operator."""
    projector = directions.projector(r)
    against = attaining_transfer(directions, projector, visibility).to_dense()
    complement = projector.complement().to_dense()
    return torch.linalg.matrix_norm(complement @ against @ complement, 2).item()


def _bounds(directions: SignalDirections, ops: Operators, visibility: float) -> list[bool]:
    known = range(len(directions.values) + 1)
    tails = [tail_bound(directions, ops.test_transfer, visibility, r, ops.output_gradient) for r in known]
    return [bound.holds for bound in (admissible_bound(directions, ops.test_transfer, visibility), *tails)]


def summarize(runs: Sequence[SignalRun], digits: Sequence[DigitsRun]) -> SignalSummary:
    """Means over the seeds of each part."""

    def mean(read: Callable[[SignalRun], float]) -> Mean:
        return mean_over_seeds([read(r) for r in runs])

    return SignalSummary(
        dissipation_rank=mean(lambda r: r.dissipation_rank),
        signal_rank=mean(lambda r: r.signal_rank),
        dissipation_drop=mean(lambda r: _drop(r.dissipation, math.ceil(r.dissipation_rank))),
        signal_drop=mean(lambda r: _drop(r.per_complexity, math.ceil(r.signal_rank))),
        dissipation_decades=mean(lambda r: _drop(r.dissipation, len(r.dissipation) - 1)),
        signal_decades=mean(lambda r: _drop(r.per_complexity, len(r.per_complexity) - 1)),
        used=mean(_used),
        worst_attained_error=max(_attained_error(r) for r in runs),
        train_loss_end=mean(lambda r: r.train_losses[-1]),
        test_loss_best=mean(lambda r: min(r.test_losses)),
        test_loss_end=mean(lambda r: r.test_losses[-1]),
        test_accuracy_best=mean(lambda r: max(r.test_accuracies)),
        test_accuracy_end=mean(lambda r: r.test_accuracies[-1]),
        energy_auc=mean(lambda r: r.energy_auc),
        tail_auc=mean(lambda r: r.tail_auc),
        bounds_checked=sum(r.bounds_checked for r in runs),
        bounds_held=sum(r.bounds_held for r in runs),
        digits={name: mean_over_seeds([d.auc[name] for d in digits]) for name in SCORES},
        digits_lowest={name: min(d.auc[name] for d in digits) for name in SCORES},
    )


def _drop(values: Sequence[float], at: int) -> float:
    """Decades from the first value to the one at this index, or to the last that is not 0."""
    positive = [x for x in values if x > 0]
    return math.log10(positive[0] / positive[min(at, len(positive) - 1)])


def _used(r: SignalRun) -> float:
    logs = [math.log(x / b) for x, b in _resolved(r, r.realized) if x > 0]
    return math.exp(math.fsum(logs) / len(logs))


def _attained_error(r: SignalRun) -> float:
    return max(abs(x - b) / b for x, b in _resolved(r, r.attained))


def _resolved(r: SignalRun, values: Sequence[float]) -> list[tuple[float, float]]:
    """Values with their bounds, where the bound is above what rounding leaves of the largest one."""
    return [(x, b) for x, b in zip(values, r.bound, strict=True) if b > 1e-12 * r.bound[0]]


def _short(values: Tensor, digits: int = 6) -> list[float]:
    return [float(f"{x:.{digits}g}") for x in values.tolist()]
