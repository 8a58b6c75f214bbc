r"""The capacity axis: exact risk against simulated fits on random features, and what interpolated noise costs.

Two axes of capacity. Along the *predictive rank* of one problem (``cor:predictive_rank_law``) the risk against the
interpolant of the clean targets is :math:`\mathcal R_r`, and it peaks where its increments change from plus to minus.
Along the *width* every number of features is another problem, and the risk against the truth needs the misfit
:math:`\|\bar U_Q - f^*\|^2` and the cross term besides. Third, noise and nothing else is interpolated, at an error of
:math:`\sigma^2 \operatorname{tr} \Gamma_0` (``cor:benign_overfitting``).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.seeds import stream
from poprisk._core.store import save_result
from poprisk.theory.bias_variance import interpolation_variance
from poprisk.theory.frozen import frozen_problem_of_features
from poprisk.theory.random_features import RandomFeatureTask, random_feature_task
from poprisk_lab.paper.capacity.task import SMOKE, CapacityConfig
from poprisk_lab.theory.double_descent import DoubleDescentStudy, PeakTrial, double_descent_study, width_sweep
from poprisk_lab.theory.predictive_rank import predictive_rank_path

__all__ = [
    "CapacityConfig",
    "CapacityResult",
    "Compared",
    "KIND",
    "NoiseStudy",
    "RankStudy",
    "SMOKE",
    "WidthStudy",
    "run",
    "slope_through_zero",
    "study_noise",
    "study_ranks",
    "study_widths",
]

KIND = "capacity"
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Compared:
    """Exact risk at each capacity, beside the mean of simulated fits with its standard error; per test output."""

    capacities: list[int]
    theory: list[float]
    simulated: list[float]
    standard_error: list[float]
    largest_deviation: float
    """Of theory from simulation, in standard errors."""
    peak: int | None
    """Where theory has its interior maximum."""


@dataclass(frozen=True)
class RankStudy:
    """All problems along their predictive ranks, and one of them in full."""

    shown_seed: int
    """The problem with the most prominent peak, which the figure shows."""
    shown: Compared
    prominences: list[float]
    """Of every problem with a peak: the share of its highest risk by which that lies above the higher end."""
    increments: list[float]
    r""":math:`\mathcal R_{r+1} - \mathcal R_r` per test output, for r from 0."""
    sign_changes: list[int]
    """All ranks at which a rise is followed by a fall."""
    problems: int
    with_peak: int
    hits: int
    """Peaks at which the simulated risk is within 2 standard errors of its maximum."""
    only_local: int
    """Problems with an interior sign change whose risk is higher still at an end; no maximum is claimed."""
    without_peak: int
    largest_deviation: float
    """Over all problems and ranks."""


@dataclass(frozen=True)
class WidthStudy:
    """The width sweep: exact risk against the truth, and what the formula gives without its two further terms."""

    compared: Compared
    without_misfit: list[float]
    """Bias and variance alone, as the paper's corollary has them: the risk against the clean interpolant."""
    train_errors: list[float]
    """Largest squared error on a training target over widths and draws: how well the targets are fitted."""


@dataclass(frozen=True)
class NoiseStudy:
    """Pure noise interpolated at one width, for several variances of it; errors per test output."""

    width: int
    variances: list[float]
    simulated: list[float]
    standard_error: list[float]
    visibility: float
    r""":math:`\operatorname{tr}\Gamma_0` per test output: the slope that theory gives."""
    slope: float
    """Weighted least squares through 0."""
    slope_error: float
    rank: int
    """Rank of the kernel; the reservoir has as many directions as the rank is below the number of examples."""
    train_error: float
    """Largest squared error on a training target, relative to its variance."""

    @property
    def deviation(self) -> float:
        """Slope less theory, in standard errors."""
        return (self.slope - self.visibility) / self.slope_error


@dataclass(frozen=True)
class CapacityResult:
    """What was measured."""

    config: CapacityConfig
    ranks: RankStudy
    widths: WidthStudy
    noise: list[NoiseStudy]
    processor_seconds: float

    def save(self, path: str | Path) -> Path:
        """Write it, with its environment, as JSON."""
        content = asdict(self)
        return save_result(path, KIND, content.pop("config"), content)


def run(config: CapacityConfig, progress: Progress | None = None) -> CapacityResult:
    """The three parts, one after the other."""
    report = progress or (lambda done, total, upcoming: None)
    began = time.process_time()
    report(0, 3, "predictive ranks")
    ranks = study_ranks(config)
    task = random_feature_task(
        stream(config.seed, "capacity") % 2**31,
        examples=config.sweep_examples,
        tests=config.sweep_tests,
        dimension=config.dimension,
        widest=max(*config.widths, *config.noise_widths),
    )
    report(1, 3, "widths")
    widths = study_widths(config, task)
    report(2, 3, "interpolated noise")
    noise = [study_noise(config, task, width) for width in (config.sweep_examples, *config.noise_widths)]
    report(3, 3, "")
    return CapacityResult(config, ranks, widths, noise, round(time.process_time() - began, 2))


def study_ranks(config: CapacityConfig) -> RankStudy:
    """Problems seed after seed until enough have an interior maximum; the one that stands out most is shown."""
    study: DoubleDescentStudy = double_descent_study(
        config.problems,
        width=config.width,
        sigma=config.sigma,
        draws=config.draws,
        examples=config.examples,
        tests=config.tests,
        dimension=config.dimension,
    )
    shown = max(study.claimed, key=_prominence)
    increments, changes = _increments(config, shown.seed)
    return RankStudy(
        shown_seed=shown.seed,
        shown=_compared_trial(shown, config.tests),
        prominences=[_prominence(trial) for trial in study.claimed],
        increments=increments,
        sign_changes=changes,
        problems=len(study.trials),
        with_peak=len(study.claimed),
        hits=study.hits,
        only_local=len(study.only_local),
        without_peak=len(study.without_peak),
        largest_deviation=max(trial.largest_deviation for trial in study.trials),
    )


def _prominence(trial: PeakTrial) -> float:
    highest = trial.theory.max()
    return ((highest - torch.maximum(trial.theory[0], trial.theory[-1])) / highest).item()


def _compared_trial(trial: PeakTrial, tests: int) -> Compared:
    return Compared(
        capacities=list(range(len(trial.theory))),
        theory=(trial.theory / tests).tolist(),
        simulated=(trial.simulated.mean / tests).tolist(),
        standard_error=(trial.simulated.standard_error / tests).tolist(),
        largest_deviation=trial.largest_deviation,
        peak=trial.predicted,
    )


def _increments(config: CapacityConfig, seed: int) -> tuple[list[float], list[int]]:
    task = random_feature_task(seed, examples=config.examples, tests=config.tests, dimension=config.dimension)
    path = predictive_rank_path(task.problem(config.width), task.signal, config.sigma**2)
    return (path.increments / config.tests).tolist(), path.local_peaks


def study_widths(config: CapacityConfig, task: RandomFeatureTask) -> WidthStudy:
    """Least-norm fits at every width, against the truth."""
    seed = stream(config.seed, "capacity noise") % 2**31
    sweep = width_sweep(task, config.widths, sigma=config.sigma, draws=config.sweep_draws, seed=seed)
    error = sweep.simulated.standard_error
    m = config.sweep_tests
    problems = [task.problem(width) for width in config.widths]
    generator = torch.Generator().manual_seed(seed)
    noise = config.sigma * torch.randn(config.sweep_examples, config.sweep_draws, generator=generator).double()
    targets = task.signal[:, None] + noise
    return WidthStudy(
        compared=Compared(
            capacities=list(config.widths),
            theory=(sweep.theory / m).tolist(),
            simulated=(sweep.simulated.mean / m).tolist(),
            standard_error=(error / m).tolist(),
            largest_deviation=((sweep.theory - sweep.simulated.mean).abs() / error).max().item(),
            peak=sweep.peak,
        ),
        without_misfit=[interpolation_variance(problem, config.sigma**2) / m for problem in problems],
        train_errors=[_worst_train_error(task.features(task.inputs, width), targets) for width in config.widths],
    )


def study_noise(config: CapacityConfig, task: RandomFeatureTask, width: int) -> NoiseStudy:
    r"""Interpolate noise alone, with draws of its own for every variance, and fit the slope of the error against it."""
    features, test_features = task.features(task.inputs, width), task.features(task.test_inputs, width)
    problem = frozen_problem_of_features(features, test_features)
    generator = torch.Generator().manual_seed(stream(config.seed, f"pure noise {width}"))
    fit, m = torch.linalg.pinv(features), config.sweep_tests
    means, errors, worst = [], [], 0.0
    for variance in config.noise_levels:
        noise = math.sqrt(variance) * torch.randn(
            config.sweep_examples, config.sweep_draws, generator=generator, dtype=torch.float64
        )
        squared = (test_features @ (fit @ noise)).square().sum(dim=0) / m
        means.append(squared.mean().item())
        errors.append(squared.std().item() / math.sqrt(config.sweep_draws))
        worst = max(worst, _worst_train_error(features, noise) / variance)
    slope, slope_error = slope_through_zero(config.noise_levels, means, errors)
    return NoiseStudy(
        width=width,
        variances=list(config.noise_levels),
        simulated=means,
        standard_error=errors,
        visibility=interpolation_variance(problem, 1.0) / m,
        slope=slope,
        slope_error=slope_error,
        rank=problem.rank,
        train_error=worst,
    )


def slope_through_zero(x: Sequence[float], y: Sequence[float], errors: Sequence[float]) -> tuple[float, float]:
    r"""The slope of a line through 0 and its standard error, by least squares with weights :math:`x_i^{-2}`.

    The spread of an error grows with the variance of the noise, so that the ratios :math:`y_i/x_i` have one size of
    error; weighing them alike does not let an accidentally small estimate of an error decide.

    >>> slope_through_zero([1.0, 2.0], [2.0, 6.0], [0.3, 0.8])  # the mean of 2 and 3
    (2.5, 0.25)
    """
    ratios = [b / a for a, b in zip(x, y, strict=True)]
    spreads = [e / a for a, e in zip(x, errors, strict=True)]
    return math.fsum(ratios) / len(ratios), math.sqrt(math.fsum(s * s for s in spreads)) / len(ratios)


def _worst_train_error(features: Float[Tensor, "n d"], targets: Float[Tensor, "n draws"]) -> float:
    fitted = features @ (torch.linalg.pinv(features) @ targets)
    return (fitted - targets).square().max().item()
