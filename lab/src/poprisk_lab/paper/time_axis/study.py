r"""The time axis: which directions gradient flow fits first, and generalization that comes long after interpolation.

A linear model on two kinds of features. Every example has marks z that have nothing to do with its label, and a signal
x, the sign of whose first entry is the label. *Memorizing* features are strong: random combinations of narrow bumps
around the marks of the training examples, fewer than there are examples. *Signal* features are the entries of x, made
weak. Gradient descent fits the training labels by the strong
features first, which hardly reach test inputs. The weak ones move later, take over and generalize. Everything is a
frozen kernel, so that the filter :math:`1 - e^{-t\sigma_j^2/n}` says when (``thm:unified_bias_variance``).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.statistics import Mean, mean_over_seeds
from poprisk._core.store import save_result
from poprisk.theory import FrozenProblem
from poprisk.theory.filters import decayed_flow_filter, gradient_flow_filter
from poprisk.theory.frozen import frozen_problem_of_features
from poprisk_lab.paper.time_axis.task import SMOKE, MemorizingTask, TimeConfig, memorizing_task
from poprisk_lab.theory.transfer_mass import grouped_mass, mobility_groups

__all__ = [
    "FittedMode",
    "KIND",
    "MemorizingTask",
    "SMOKE",
    "TimeConfig",
    "TimeResult",
    "TimeRun",
    "TimeSummary",
    "descend",
    "measure",
    "memorizing_task",
    "run",
    "summarize",
]

KIND = "time"
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class FittedMode:
    """How much of the target's component along one singular direction is fitted, over time."""

    index: int
    mobility: float
    """σ²."""
    flow: list[float]
    """The filter of gradient flow."""
    decayed: list[float]
    """The filter of gradient flow with weight decay."""
    measured: list[float]
    """From the outputs of a real gradient descent."""
    half_time: float
    """When half of it is fitted: n log 2 / σ²."""


@dataclass(frozen=True)
class TimeRun:
    """One seed: a training by gradient descent and the theory beside it."""

    seed: int
    times: list[float]
    train_accuracy: list[float]
    test_accuracy: list[float]
    predicted_test_accuracy: list[float]
    """Accuracy of the outputs that the filter predicts."""
    train_loss: list[float]
    output_error: float
    """Largest distance of descent from the filter's test outputs, relative to their largest, over all times."""
    modes: list[FittedMode]
    mobility: list[float]
    edge: float
    """Mobility that separates the two groups: the geometric mean of the neighbours on both sides of the gap."""
    fast_mass: list[float]
    """Transfer mass of the directions of high mobility, over time."""
    slow_mass: list[float]
    interpolated_at: float | None
    """First time from which every training sign is right."""
    generalized_at: float | None
    """First time from which test accuracy is above the middle between chance and its end."""
    overtaken_at: float | None
    """First time at which the slow directions have more transfer mass than the fast ones."""
    rank: int
    predictive_overlap: float
    r"""Mean over :math:`\psi_j` of the largest squared entry in singular directions: 1 if the bases are the same."""
    processor_seconds: float


@dataclass(frozen=True)
class TimeSummary:
    """Over seeds; times are geometric means, and None where a seed never got there."""

    interpolated_at: float | None
    generalized_at: float | None
    overtaken_at: float | None
    reached: int
    """Seeds in which all three happened."""
    accuracy_when_interpolated: Mean
    """Test accuracy at the time of interpolation."""
    final_accuracy: Mean
    worst_output_error: float
    predictive_overlap: Mean


@dataclass(frozen=True)
class TimeResult:
    """All runs, and what they say together."""

    config: TimeConfig
    runs: list[TimeRun]
    summary: TimeSummary

    def save(self, path: str | Path) -> Path:
        """Write it, with its environment, as JSON."""
        content = asdict(self)
        return save_result(path, KIND, content.pop("config"), content)


def run(config: TimeConfig, progress: Progress | None = None) -> TimeResult:
    """Every seed, one after the other."""
    report = progress or (lambda done, total, upcoming: None)
    runs: list[TimeRun] = []
    for seed in range(config.seeds):
        report(seed, config.seeds, f"seed {seed}")
        runs.append(measure(config, seed))
    report(config.seeds, config.seeds, "")
    return TimeResult(config, runs, summarize(runs))


def measure(config: TimeConfig, seed: int) -> TimeRun:
    """Train by gradient descent, and hold its outputs against the filter at the same times."""
    began = time.process_time()
    task = memorizing_task(config, seed)
    problem = frozen_problem_of_features(task.features, task.test_features)
    looks = _looks(config)
    times = [k * config.lr for k in looks]
    train_outputs, test_outputs = descend(task, config.lr, looks)
    predicted = torch.stack([problem.predict(gradient_flow_filter(problem, t), task.targets) for t in times])
    groups, edge = _two_groups(problem, config.memorizing)
    mass = grouped_mass(problem, times, groups)
    right = lambda outputs, labels: (outputs.sign() == labels).double().mean(dim=1).tolist()  # noqa: E731
    train_accuracy, test_accuracy = right(train_outputs, task.targets), right(test_outputs, task.test_targets)
    return TimeRun(
        seed=seed,
        times=times,
        train_accuracy=train_accuracy,
        test_accuracy=test_accuracy,
        predicted_test_accuracy=right(predicted, task.test_targets),
        train_loss=_short((train_outputs - task.targets).square().mean(dim=1) / 2),
        output_error=((test_outputs - predicted).abs().max() / predicted.abs().max()).item(),
        modes=_modes(problem, config, task, times, train_outputs),
        mobility=_short(problem.mobility),
        edge=edge,
        fast_mass=_short(mass[:, 0]),
        slow_mass=_short(mass[:, 1]),
        interpolated_at=_stays(times, [a == 1 for a in train_accuracy]),
        generalized_at=_stays(times, [a > (0.5 + test_accuracy[-1]) / 2 for a in test_accuracy]),
        overtaken_at=_stays(times, (mass[:, 1] > mass[:, 0]).tolist()),
        rank=problem.rank,
        predictive_overlap=_overlap(problem),
        processor_seconds=round(time.process_time() - began, 2),
    )


def descend(
    task: MemorizingTask, lr: float, looks: Sequence[int]
) -> tuple[Float[Tensor, "looks n"], Float[Tensor, "looks m"]]:
    """Outputs of full-batch gradient descent from zero weights after the given steps; the loss is a mean over n."""
    X, y = task.features, task.targets
    w, done = X.new_zeros(X.shape[1]), 0
    gram, pulled = X.T @ X * (lr / len(y)), X.T @ y * (lr / len(y))
    train_outputs, test_outputs = [], []
    for k in looks:
        for _ in range(k - done):
            w = w - (gram @ w - pulled)
        done = k
        train_outputs.append(X @ w)
        test_outputs.append(task.test_features @ w)
    return torch.stack(train_outputs), torch.stack(test_outputs)


def summarize(runs: Sequence[TimeRun]) -> TimeSummary:
    """Over seeds."""
    accuracy = []
    for r in runs:
        at = 0 if r.interpolated_at is None else r.times.index(r.interpolated_at)
        accuracy.append(r.test_accuracy[at])
    events = [(r.interpolated_at, r.generalized_at, r.overtaken_at) for r in runs]
    columns = [_geometric_mean(column) for column in zip(*events, strict=True)]
    return TimeSummary(
        *columns,
        reached=sum(None not in event for event in events),
        accuracy_when_interpolated=mean_over_seeds(accuracy),
        final_accuracy=mean_over_seeds([r.test_accuracy[-1] for r in runs]),
        worst_output_error=max(r.output_error for r in runs),
        predictive_overlap=mean_over_seeds([r.predictive_overlap for r in runs]),
    )


def _looks(config: TimeConfig) -> list[int]:
    exponents = torch.linspace(0, math.log(config.steps), config.times, dtype=torch.float64)
    return sorted({round(math.exp(x)) for x in exponents.tolist()})


def _two_groups(problem: FrozenProblem, memorizing: int) -> tuple[Tensor, float]:
    """The memorizing directions and the rest, separated by mobility."""
    above, below = problem.mobility[memorizing - 1].item(), problem.mobility[memorizing].item()
    edge = math.sqrt(above * below)
    return mobility_groups(problem, [edge]), edge


def _modes(
    problem: FrozenProblem, config: TimeConfig, task: MemorizingTask, times: Sequence[float], outputs: Tensor
) -> list[FittedMode]:
    wanted = problem.coordinates(task.targets)
    fitted = outputs @ problem.left / wanted
    flow = torch.stack([gradient_flow_filter(problem, t) for t in times])
    decayed = torch.stack([decayed_flow_filter(problem, config.decay, t) for t in times])
    mobility = problem.mobility.tolist()
    return [
        FittedMode(
            index=j,
            mobility=mobility[j],
            flow=_short(flow[:, j]),
            decayed=_short(decayed[:, j]),
            measured=_short(fitted[:, j]),
            half_time=problem.num_examples * math.log(2) / mobility[j],
        )
        for j in config.shown
    ]


def _overlap(problem: FrozenProblem) -> float:
    from poprisk.theory.filters import predictive_basis

    return predictive_basis(problem)[1].square().amax(dim=0).mean().item()


def _stays(times: Sequence[float], reached: Sequence[bool]) -> float | None:
    """The first time from which something holds at every later look."""
    last_failure = max((i for i, yes in enumerate(reached) if not yes), default=-1)
    return times[last_failure + 1] if last_failure + 1 < len(times) else None


def _geometric_mean(values: Sequence[float | None]) -> float | None:
    known = [math.log(x) for x in values if x is not None]
    return math.exp(math.fsum(known) / len(known)) if len(known) == len(values) else None


def _short(values: Tensor, digits: int = 6) -> list[float]:
    return [float(f"{x:.{digits}g}") for x in values.tolist()]
