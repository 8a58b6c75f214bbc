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
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from poprisk._core.seeds import stream
from poprisk._core.statistics import Mean, mean_over_seeds
from poprisk._core.store import save_result
from poprisk.errors import HyperparameterError
from poprisk.runs import Problem, Run, train
from poprisk_lab.paper.coupling.measures import CouplingRun, measure_run

KIND = "coupling"
MINIBATCH, FULL_BATCH, REPEATED = "minibatch", "full_batch", "repeated"
Progress = Callable[[int, int, str], None]
"""Called with how many runs are done, how many there are, and which one comes next ("" after the last)."""


def _require(condition: bool, expected: str, got: Any) -> None:
    if not condition:
        raise HyperparameterError(f"{expected}, got {got}")


@dataclass(frozen=True)
class Case:
    """One way to train on the same problem."""

    name: str
    batch_size: int | None
    """None takes all examples in every step."""
    repeated: int
    """So many inputs occur twice, each time with noise of its own in the label."""


@dataclass(frozen=True)
class CouplingConfig:
    """What the experiment runs: every case with every seed."""

    seeds: int = 5
    cases: tuple[Case, ...] = (Case(MINIBATCH, 16, 0), Case(FULL_BATCH, None, 16), Case(REPEATED, 16, 16))
    examples: int = 96
    test_examples: int = 96
    dimension: int = 6
    noise: float = 0.1
    """Standard deviation of the noise in the training labels, whose clean part has variance 1."""
    width: int = 32
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 1e-3
    steps: int = 200
    drift_every: int = 5
    """The kernel is looked at every so many steps."""

    def __post_init__(self) -> None:
        for name in ("seeds", "examples", "test_examples", "width", "steps", "drift_every"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
        _require(self.dimension >= 2, "dimension must be at least 2, as the target is a product", self.dimension)
        _require(self.noise >= 0 and self.lr > 0, "noise must be ≥ 0 and lr > 0", (self.noise, self.lr))
        names = [case.name for case in self.cases]
        _require(len(names) > 0 and len(set(names)) == len(names), "cases must have names of their own", names)
        for case in self.cases:
            _require(2 * case.repeated <= self.examples, "at most half of the inputs can be repeated", case.repeated)
            size = case.batch_size
            _require(size is None or 1 <= size <= self.examples, f"batches must have 1 to {self.examples}", size)
        shown = [MINIBATCH, FULL_BATCH, REPEATED]
        _require(set(names) == set(shown), f"cases must be those that figure and page show, {shown}", names)


SMOKE = CouplingConfig(
    seeds=1,
    cases=(Case(MINIBATCH, 6, 0), Case(FULL_BATCH, None, 4), Case(REPEATED, 6, 4)),
    examples=24,
    test_examples=12,
    width=8,
    steps=6,
    drift_every=4,
)


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
    """Of each seed."""
    worst_reservoir_leak: float
    residual_in_reservoir: Mean
    """Share of the output gradient at the end that lies in the reservoir."""
    tightness: Mean
    """Of the bound on the test displacement by visibility and dissipation."""
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


def record(config: CouplingConfig, case: Case, seed: int) -> Run:
    """Train one case from the seed's weights on the seed's data, and keep every step, in float64."""
    names = {field.name for field in fields(config)} & {"examples", "test_examples", "dimension", "noise", "width"}
    sizes = {name: getattr(config, name) for name in names}
    problem = Problem.build(interaction_problem, seed=seed, repeated=case.repeated, **sizes)
    rule = partial(torch.optim.SGD, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    return train(
        problem, rule, config.steps, batch_size=case.batch_size, seed=seed, dtype=torch.float64, progress=False
    )


def interaction_problem(
    seed: int, examples: int, test_examples: int, dimension: int, noise: float, width: int, repeated: int
) -> Problem:
    r"""Regression on :math:`f^\star(x) = x_1 x_2` of normal inputs with noisy labels; test targets are clean.

    Args:
        seed: Of inputs, noise and first weights.
        examples: Training examples, the repeated ones among them.
        test_examples: Test examples.
        dimension: Of the inputs; all but two entries are of no use.
        noise: Standard deviation of the noise in the training labels.
        width: Of the two hidden layers.
        repeated: The last so many inputs are the first ones once more, with noise of their own. Everything else is
            the same for any number of them.

    >>> problem = interaction_problem(0, examples=4, test_examples=1, dimension=2, noise=0.0, width=3, repeated=1)
    >>> bool((problem.inputs[3] == problem.inputs[0]).all()), bool((problem.targets[3] == problem.targets[0]).all())
    (True, True)
    """
    generator = torch.Generator().manual_seed(stream(seed, "coupling"))
    drawn = torch.randn(examples + test_examples, dimension, generator=generator, dtype=torch.float64)
    errors = noise * torch.randn(examples, 1, generator=generator, dtype=torch.float64)
    inputs, test_inputs = drawn[:examples].clone(), drawn[examples:]
    inputs[examples - repeated :] = inputs[:repeated]
    return Problem(
        tanh_network,
        "squared",
        inputs,
        _interaction(inputs) + errors,
        name="interaction",
        arguments={"inputs": dimension, "width": width},
        test=(test_inputs, _interaction(test_inputs)),
        seed=seed,
    )


def tanh_network(inputs: int, width: int) -> nn.Sequential:
    """Two hidden layers of tanh and one output, with torch's usual first weights."""
    hidden = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


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


def _interaction(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1] * x[:, 1:2]
