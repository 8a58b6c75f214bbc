r"""Double descent on random features: where theory puts the peak, and where simulated fits have it.

Two axes of capacity. Along the *predictive rank* of one problem the risk is known exactly for every r and its peak is
where the increments change from positive to negative. Along the *width* each number of random features is another
problem; the exact risk against the truth needs the misfit and cross terms of :mod:`poprisk.theory.bias_variance`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import HyperparameterError
from poprisk.theory.bias_variance import risk
from poprisk.theory.filters import interpolation_filter, predictive_basis
from poprisk.theory.frozen import frozen_problem_of_features
from poprisk.theory.random_features import RandomFeatureTask, random_feature_task
from poprisk_lab.theory.predictive_rank import predictive_rank_path

_DTYPE = torch.float64


@dataclass(frozen=True, eq=False)
class SimulatedRisks:
    """Mean squared test error of simulated fits at each capacity, over the same draws of the noise."""

    errors: Float[Tensor, "draws capacities"]
    """Summed over test outputs, one row per draw."""

    @property
    def mean(self) -> Float[Tensor, "capacities"]:
        """Mean over draws."""
        return self.errors.mean(dim=0)

    @property
    def standard_error(self) -> Float[Tensor, "capacities"]:
        """Standard error of the mean."""
        return self.errors.std(dim=0) / math.sqrt(len(self.errors))

    def distance_to_maximum(self, at: int) -> tuple[float, float]:
        """How far the mean at one capacity lies below the highest mean, and the standard error of that difference.

        Draws are shared, so the error is that of the paired difference, which is the stricter one.
        """
        highest = int(self.mean.argmax())
        gaps = self.errors[:, highest] - self.errors[:, at]
        return gaps.mean().item(), gaps.std().item() / math.sqrt(len(gaps))


def simulate_predictive_ranks(
    features: Float[Tensor, "n d"],
    test_features: Float[Tensor, "m d"],
    signal: Float[Tensor, "n"],
    sigma: float,
    draws: int,
    generator: torch.Generator,
) -> SimulatedRisks:
    r"""Least-norm regressions on noisy targets projected on the first r predictive directions, r = 0 … rank.

    Every fit is made: the projected targets :math:`U P_r U^\top y` go through the pseudo-inverse of the features, and
    the error is taken to the fit of the clean targets, as the theory has it. No formula of the theory is used.
    """
    problem = frozen_problem_of_features(features, test_features)
    basis = problem.left @ predictive_basis(problem)[1]
    fit = test_features @ torch.linalg.pinv(features)
    noise = torch.randn(len(signal), draws, generator=generator, dtype=signal.dtype)
    targets = signal[:, None] + sigma * noise
    clean = fit @ signal
    errors = []
    for r in range(problem.rank + 1):
        predicted = fit @ (basis[:, :r] @ (basis[:, :r].T @ targets))
        errors.append((predicted - clean[:, None]).square().sum(dim=0))
    return SimulatedRisks(torch.stack(errors, dim=1))


@dataclass(frozen=True, eq=False)
class PeakTrial:
    """One problem: the peak that theory claims, and the simulated risk there."""

    seed: int
    predicted: int | None
    """The rank of the claimed peak; None where the increments never change from positive to negative inside."""
    is_highest: bool
    """Whether the peak is the maximum of the path according to the theory."""
    theory: Float[Tensor, "ranks"]
    simulated: SimulatedRisks
    gap: float
    """Simulated maximum less simulated risk at the claimed peak; 0 where none is claimed."""
    gap_error: float
    """Standard error of the gap."""

    @property
    def is_hit(self) -> bool:
        """Whether the simulated risk at the claimed peak is within 2 standard errors of its maximum."""
        return self.predicted is not None and self.gap <= 2 * self.gap_error

    @property
    def largest_deviation(self) -> float:
        """Largest distance of theory from simulation over the path, in standard errors."""
        scale = self.simulated.standard_error
        moved = scale > 1e-12 * self.theory.max()
        return ((self.theory - self.simulated.mean).abs() / scale)[moved].max().item()


@dataclass(frozen=True, eq=False)
class DoubleDescentStudy:
    """Trials in the order of their seeds, with the counts that the claim is about."""

    trials: list[PeakTrial]

    @property
    def claimed(self) -> list[PeakTrial]:
        """Problems whose path has its maximum inside: the increment changes sign there from plus to minus."""
        return [trial for trial in self.trials if trial.is_highest]

    @property
    def only_local(self) -> list[PeakTrial]:
        """Problems with an interior sign change whose path is higher still at an end."""
        return [trial for trial in self.trials if trial.predicted is not None and not trial.is_highest]

    @property
    def without_peak(self) -> list[PeakTrial]:
        """Problems without an interior sign change, for which no peak is claimed."""
        return [trial for trial in self.trials if trial.predicted is None]

    @property
    def hits(self) -> int:
        """Claims that the simulation confirms."""
        return sum(trial.is_hit for trial in self.claimed)


def double_descent_trial(
    seed: int, *, width: int = 60, sigma: float = 0.5, draws: int = 400, **options: Any
) -> PeakTrial:
    """One random-feature problem along its predictive ranks: theory, simulation and the claimed peak.

    Args:
        seed: Seed for the task and the noise.
        width: Number of random features.
        sigma: Standard deviation of the noise.
        draws: Simulated noise draws.
        options: Options of ``random_feature_task``.

    >>> trial = double_descent_trial(0, width=10, draws=20, examples=4, tests=3)
    >>> len(trial.theory), trial.simulated.errors.shape[0]
    (5, 20)
    """
    task = random_feature_task(seed, **options)
    features, test_features = (task.features(x, width) for x in (task.inputs, task.test_inputs))
    path = predictive_rank_path(frozen_problem_of_features(features, test_features), task.signal, sigma**2)
    generator = torch.Generator().manual_seed(seed + 1_000_003)
    simulated = simulate_predictive_ranks(features, test_features, task.signal, sigma, draws, generator)
    gap, error = (0.0, 0.0) if path.peak is None else simulated.distance_to_maximum(path.peak)
    return PeakTrial(seed, path.peak, path.is_highest, path.risks, simulated, gap, error)


def double_descent_study(
    problems: int = 20, *, first_seed: int = 0, most_seeds: int = 2000, **options: Any
) -> DoubleDescentStudy:
    """Draw random-feature problems, one seed after another, until enough have an interior peak; keep all of them.

    Args:
        problems: Number of problems with an interior maximum to find.
        first_seed: First seed.
        most_seeds: Maximum number of seeds to try.
        options: Options of ``double_descent_trial``.

    Raises:
        HyperparameterError: ``problems`` is less than 1.

    >>> study = double_descent_study(1, width=10, draws=50, examples=4, tests=3, sigma=1.5)
    >>> len(study.claimed), len(study.claimed) + len(study.only_local) + len(study.without_peak) == len(study.trials)
    (1, True)
    """
    if problems < 1:
        raise HyperparameterError(f"a study needs at least one problem, got {problems}")
    trials: list[PeakTrial] = []
    for seed in range(first_seed, first_seed + most_seeds):
        trials.append(double_descent_trial(seed, **options))
        if sum(trial.is_highest for trial in trials) == problems:
            break
    return DoubleDescentStudy(trials)


@dataclass(frozen=True, eq=False)
class WidthSweep:
    """The risk of least-norm interpolation (least squares below n features) against the truth, width by width."""

    widths: list[int]
    theory: Float[Tensor, "widths"]
    """Exact expectation over the noise."""
    simulated: SimulatedRisks

    @property
    def peak(self) -> int | None:
        """The width of the highest exact risk, where it is neither the first nor the last; None otherwise."""
        k = int(self.theory.argmax())
        return self.widths[k] if 0 < k < len(self.widths) - 1 else None


def width_sweep(
    task: RandomFeatureTask, widths: Sequence[int], *, sigma: float = 0.5, draws: int = 200, seed: int = 0
) -> WidthSweep:
    r"""The classical double descent curve: exact risk of the full fit against :math:`f^*`, and simulated fits.

    Args:
        task: Inputs, truth and features.
        widths: Numbers of features, each at most what the task has.
        sigma: Standard deviation of the noise.
        draws: Simulated noise draws, the same for all widths.
        seed: Seed for the noise.

    Raises:
        HyperparameterError: a width outside the task's features.

    >>> task = random_feature_task(0, examples=6, tests=4)
    >>> width_sweep(task, [2, 6, 60], draws=10).peak  # as many features as examples
    6
    """
    if not all(1 <= width <= len(task.phases) for width in widths):
        raise HyperparameterError(f"widths must lie between 1 and {len(task.phases)}, got {list(widths)}")
    generator = torch.Generator().manual_seed(seed)
    noise = sigma * torch.randn(len(task.signal), draws, generator=generator, dtype=_DTYPE)
    theory, errors = [], []
    for width in widths:
        problem = task.problem(width)
        theory.append(risk(problem, interpolation_filter(problem), task.signal, sigma**2, task.truth).total)
        weights = torch.linalg.pinv(task.features(task.inputs, width)) @ (task.signal[:, None] + noise)
        predicted = task.features(task.test_inputs, width) @ weights
        errors.append((predicted - task.truth[:, None]).square().sum(dim=0))
    return WidthSweep(list(widths), torch.tensor(theory, dtype=_DTYPE), SimulatedRisks(torch.stack(errors, dim=1)))
