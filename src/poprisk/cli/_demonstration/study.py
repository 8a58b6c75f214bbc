"""PopRiskAdamW at its defaults compared with AdamW, tuned and untuned, on digits with partly wrong labels."""

import inspect
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.optim import AdamW, Optimizer

from poprisk._core.seeds import stream
from poprisk._core.store import save_result
from poprisk.cli._demonstration.networks import MLPShape, StackedMLP
from poprisk.cli._demonstration.summary import Summary, summarize
from poprisk.cli._demonstration.training import StackedTraining, epoch_batches, evaluation_steps, learning_rate_groups
from poprisk.errors import BackendWarning, ClosedGateWarning, DataError, HyperparameterError
from poprisk.optim import PopRiskAdamW
from poprisk.runs import NUM_CLASSES, NUM_PIXELS, TRAIN_SIZES, digits_split, replace_labels

KIND = "demo"
MAX_NOISE = 0.9  # at 0.9 each of the ten classes is equally likely, so nothing can be learned
OPTIMIZERS: dict[str, type[Optimizer]] = {"AdamW": AdamW, "PopRiskAdamW": PopRiskAdamW}
Progress = Callable[[str, int, float], None]
"""Called with the optimizer's name, its number of steps, and its mean test accuracy at its default lr."""


@dataclass(frozen=True)
class DemoConfig:
    """Settings of the demo. Each optimizer's default learning rate is always added to its grid."""

    seeds: int = 5
    noise: float = 0.4
    train_size: int = 1000
    steps: int = 500
    batch_size: int = 100
    width: int = 512
    depth: int = 2
    evaluations: int = 25
    adamw_lrs: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
    poprisk_lrs: tuple[float, ...] = (1e-2, 3e-2, 1e-1, 3e-1)

    def __post_init__(self) -> None:
        low, high = TRAIN_SIZES
        _require(self.seeds >= 1, "seeds must be at least 1", self.seeds)
        _require(0 <= self.noise <= MAX_NOISE, f"noise must lie between 0 and {MAX_NOISE}", self.noise)
        _require(low <= self.train_size <= high, f"train_size must lie between {low} and {high}", self.train_size)
        _require(self.steps >= 1, "steps must be at least 1", self.steps)
        _require(self.batch_size >= 1, "batch_size must be at least 1", self.batch_size)
        _require(self.width >= 1 and self.depth >= 0, "width must be ≥ 1 and depth ≥ 0", (self.width, self.depth))
        _require(self.evaluations >= 1, "evaluations must be at least 1", self.evaluations)
        rates = (*self.adamw_lrs, *self.poprisk_lrs)
        _require(all(lr > 0 for lr in rates), "learning rates must be positive", rates)

    @property
    def examples_per_step(self) -> int:
        """The batch size, at most a sixth of the data, since the gate measures the noise between batches."""
        return max(1, min(self.batch_size, self.train_size // 6))

    def learning_rates(self, name: str) -> list[float]:
        """The optimizer's grid of learning rates in order, its default included."""
        grid = self.adamw_lrs if name == "AdamW" else self.poprisk_lrs
        return sorted({*grid, default_lr(OPTIMIZERS[name])})


@dataclass(frozen=True)
class Sweep:
    """Results of one optimizer over its learning rates; lists are [learning rate][seed][evaluation]."""

    learning_rates: list[float]
    default_lr: float
    test_accuracy: list[list[list[float]]]
    train_accuracy: list[list[list[float]]]
    memorized: list[list[list[float]]] | None
    """Share of the wrong labels that the network reproduces; None if there are no wrong labels."""
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """All measurements; ``summary`` is what the table and the headline show."""

    config: DemoConfig
    evaluation_steps: list[int]
    test_size: int
    wrong_share: float
    sweeps: dict[str, Sweep]
    summary: Summary

    def save(self, path: str | Path) -> Path:
        """Write the result, with its environment, as JSON."""
        content = asdict(self)
        return save_result(path, KIND, content.pop("config"), content)


@dataclass(frozen=True)
class DemoData:
    """For each seed, its split of the digits and its wrong labels."""

    inputs: Float[Tensor, "seeds train pixels"]
    labels: Int[Tensor, "seeds train"]
    wrong: Bool[Tensor, "seeds train"]
    test_inputs: Float[Tensor, "seeds test pixels"]
    test_labels: Int[Tensor, "seeds test"]


def run_demo(config: DemoConfig, progress: Progress | None = None) -> DemoResult:
    """Train both optimizers over their learning rates, taking turns, and summarize.

    Args:
        config: Sizes, seeds, noise, learning rates.
        progress: Called after each evaluation; see :data:`Progress`.
    """
    data = demo_data(config)
    steps = evaluation_steps(config.steps, config.evaluations)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ClosedGateWarning)  # with wrong labels the gate should be almost closed
        warnings.simplefilter("ignore", BackendWarning)  # slower, but with the same result
        runs = {name: _Run(name, config, data) for name in OPTIMIZERS}
        for step in steps:
            for name, run in runs.items():
                run.advance(step)
                if progress is not None:
                    progress(name, step, run.default_accuracy())
    sweeps = {name: run.sweep() for name, run in runs.items()}
    return DemoResult(
        config=config,
        evaluation_steps=steps,
        test_size=data.test_labels.shape[1],
        wrong_share=data.wrong.double().mean().item(),
        sweeps=sweeps,
        summary=summarize({name: asdict(sweep) for name, sweep in sweeps.items()}),
    )


def demo_data(config: DemoConfig) -> DemoData:
    """The digits of each seed, with a share of the training labels replaced by other classes."""
    columns: list[tuple[Tensor, ...]] = []
    for seed in range(config.seeds):
        split = digits_split(stream(seed, "split"), config.train_size)
        generator = torch.Generator().manual_seed(stream(seed, "labels"))
        given = replace_labels(split.train_labels, config.noise, NUM_CLASSES, generator)
        columns.append((split.train_inputs, given.labels, given.wrong, split.test_inputs, split.test_labels))
    return DemoData(*(torch.stack(column) for column in zip(*columns, strict=True)))


def default_lr(optimizer: type[Optimizer]) -> float:
    """The default learning rate of an optimizer."""
    return float(inspect.signature(optimizer).parameters["lr"].default)


class _Run:
    """The networks of one optimizer, and their evaluations so far."""

    def __init__(self, name: str, config: DemoConfig, data: DemoData) -> None:
        self.data, self.learning_rates = data, config.learning_rates(name)
        self.default = default_lr(OPTIMIZERS[name])
        seeds = range(config.seeds)
        shape = MLPShape(NUM_PIXELS, config.width, config.depth, NUM_CLASSES)
        weights = tuple(stream(seed, "weights") for seed in seeds)
        network = StackedMLP(shape, weights, len(self.learning_rates))
        optimizer = OPTIMIZERS[name](learning_rate_groups(network, self.learning_rates), fused=True)  # type: ignore[call-arg]
        orders = [stream(seed, "batches") for seed in seeds]
        batches = epoch_batches(config.train_size, config.examples_per_step, orders)
        self.training = StackedTraining(network, optimizer, data.inputs, data.labels, batches)
        self.seen: dict[str, list[Tensor]] = {"test_accuracy": [], "train_accuracy": [], "memorized": []}
        self.seconds = 0.0

    def advance(self, step: int) -> None:
        """Train up to the given step, then evaluate."""
        start = time.perf_counter()
        self.training.advance(step - self.training.step)
        self.seconds += time.perf_counter() - start
        data = self.data
        right = self.training.predictions(data.test_inputs) == data.test_labels
        fitted = self.training.predictions(data.inputs) == data.labels
        self.seen["test_accuracy"].append(right.double().mean(-1))
        self.seen["train_accuracy"].append(fitted.double().mean(-1))
        self.seen["memorized"].append((fitted & data.wrong).double().sum(-1) / data.wrong.double().sum(-1))

    def default_accuracy(self) -> float:
        """Current mean test accuracy at the optimizer's default learning rate."""
        return self.seen["test_accuracy"][-1][self.learning_rates.index(self.default)].mean().item()

    def sweep(self) -> Sweep:
        """All evaluations, rounded."""
        curves = {key: _rounded(torch.stack(values, -1)) for key, values in self.seen.items()}
        memorized = curves["memorized"] if self.data.wrong.any() else None
        return Sweep(
            learning_rates=self.learning_rates,
            default_lr=self.default,
            test_accuracy=curves["test_accuracy"],
            train_accuracy=curves["train_accuracy"],
            memorized=memorized,
            seconds=round(self.seconds, 2),
        )


def _rounded(values: Tensor) -> Any:
    return [_rounded(row) for row in values] if values.dim() > 0 else round(values.item(), 6)


def _require(condition: bool, expected: str, got: Any) -> None:
    if not condition:
        kind = DataError if expected.startswith("train_size") else HyperparameterError
        raise kind(f"{expected}, got {got}")
