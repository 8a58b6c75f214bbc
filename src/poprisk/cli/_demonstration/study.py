"""AdamW that ends at its best (KeepBest) compared with AdamW, tuned and untuned, on digits with partly wrong labels."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from torch.optim import AdamW

from poprisk._core.seeds import stream
from poprisk._core.store import save_result
from poprisk.cli._demonstration.networks import MLPShape, StackedMLP, plain_network
from poprisk.cli._demonstration.summary import Summary, summarize
from poprisk.cli._demonstration.training import StackedTraining, epoch_batches, evaluation_steps, learning_rate_groups
from poprisk.errors import DataError, HyperparameterError
from poprisk.optim import KeepBest, hold_back
from poprisk.runs import NUM_CLASSES, NUM_PIXELS, TRAIN_SIZES, digits_split, replace_labels

KIND = "demo"
MAX_NOISE = 0.9  # at 0.9 each of the ten classes is equally likely, so nothing can be learned
ADAMW, KEPT = "AdamW", "AdamW with KeepBest"
USUAL_LR = 1e-3
"""AdamW's default learning rate."""
HELD = 0.05
"""Share of the training images that KeepBest chooses by."""
Progress = Callable[[str, int, float], None]
"""Called with the recipe's name, its number of steps, and its mean test accuracy at AdamW's usual lr."""


@dataclass(frozen=True)
class DemoConfig:
    """Settings of the demo. AdamW's usual learning rate is always added to a grid."""

    seeds: int = 5
    noise: float = 0.4
    train_size: int = 1000
    steps: int = 500
    batch_size: int = 100
    width: int = 512
    depth: int = 2
    evaluations: int = 25
    adamw_lrs: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3)
    kept_lrs: tuple[float, ...] = (1e-4, 3e-4, 1e-3, 3e-3)

    def __post_init__(self) -> None:
        low, high = TRAIN_SIZES
        _require(self.seeds >= 1, "seeds must be at least 1", self.seeds)
        _require(0 <= self.noise <= MAX_NOISE, f"noise must lie between 0 and {MAX_NOISE}", self.noise)
        _require(low <= self.train_size <= high, f"train_size must lie between {low} and {high}", self.train_size)
        _require(self.steps >= 1, "steps must be at least 1", self.steps)
        _require(self.batch_size >= 1, "batch_size must be at least 1", self.batch_size)
        _require(self.width >= 1 and self.depth >= 0, "width must be ≥ 1 and depth ≥ 0", (self.width, self.depth))
        _require(self.evaluations >= 1, "evaluations must be at least 1", self.evaluations)
        rates = (*self.adamw_lrs, *self.kept_lrs)
        _require(all(lr > 0 for lr in rates), "learning rates must be positive", rates)

    @property
    def examples_per_step(self) -> int:
        """The batch size, at most a sixth of the data."""
        return max(1, min(self.batch_size, self.train_size // 6))

    def learning_rates(self, name: str) -> list[float]:
        """The grid of learning rates in order, AdamW's usual one included."""
        return sorted({*(self.adamw_lrs if name == ADAMW else self.kept_lrs), USUAL_LR})


@dataclass(frozen=True)
class Sweep:
    """Results of one recipe over its learning rates; lists are [learning rate][seed][evaluation].

    With KeepBest an evaluation is of the weights that training would end with if it ended there.
    """

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
    """Train with and without KeepBest over the learning rates, taking turns, and summarize.

    Args:
        config: Sizes, seeds, noise, learning rates.
        progress: Called after each evaluation; see :data:`Progress`.
    """
    data = demo_data(config)
    steps = evaluation_steps(config.steps, config.evaluations)
    runs = {ADAMW: _Stacked(config, data), KEPT: _Kept(config, data)}
    for step in steps:
        for name, run in runs.items():
            run.advance(step)
            if progress is not None:
                progress(name, step, run.usual_accuracy())
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


class _Trainings(ABC):
    """Trainings over learning rates and seeds, and their evaluations so far."""

    def __init__(self, name: str, config: DemoConfig, data: DemoData) -> None:
        self.data, self.learning_rates = data, config.learning_rates(name)
        self.seen: dict[str, list[Tensor]] = {"test_accuracy": [], "train_accuracy": [], "memorized": []}
        self.seconds = 0.0

    def advance(self, step: int) -> None:
        """Train up to the given step, then evaluate."""
        start = time.perf_counter()
        self.train(step)
        self.seconds += time.perf_counter() - start
        right, fitted = self.correct()
        self.seen["test_accuracy"].append(right.double().mean(-1))
        self.seen["train_accuracy"].append(fitted.double().mean(-1))
        wrong = self.data.wrong
        self.seen["memorized"].append((fitted & wrong).double().sum(-1) / wrong.double().sum(-1))

    @abstractmethod
    def train(self, step: int) -> None:
        """Train up to the given step."""

    @abstractmethod
    def correct(self) -> tuple[Bool[Tensor, "rates seeds test"], Bool[Tensor, "rates seeds train"]]:
        """For the test and the training images, whether the prediction is the given label."""

    def usual_accuracy(self) -> float:
        """Current mean test accuracy at AdamW's usual learning rate."""
        return self.seen["test_accuracy"][-1][self.learning_rates.index(USUAL_LR)].mean().item()

    def sweep(self) -> Sweep:
        """All evaluations, rounded."""
        curves = {key: _rounded(torch.stack(values, -1)) for key, values in self.seen.items()}
        memorized = curves["memorized"] if self.data.wrong.any() else None
        return Sweep(
            learning_rates=self.learning_rates,
            default_lr=USUAL_LR,
            test_accuracy=curves["test_accuracy"],
            train_accuracy=curves["train_accuracy"],
            memorized=memorized,
            seconds=round(self.seconds, 2),
        )


class _Stacked(_Trainings):
    """AdamW by itself: all learning rates and seeds as one stacked training."""

    def __init__(self, config: DemoConfig, data: DemoData) -> None:
        super().__init__(ADAMW, config, data)
        seeds = range(config.seeds)
        shape = MLPShape(NUM_PIXELS, config.width, config.depth, NUM_CLASSES)
        network = StackedMLP(shape, tuple(stream(seed, "weights") for seed in seeds), len(self.learning_rates))
        optimizer = AdamW(learning_rate_groups(network, self.learning_rates), fused=True)
        orders = [stream(seed, "batches") for seed in seeds]
        batches = epoch_batches(config.train_size, config.examples_per_step, orders)
        self.training = StackedTraining(network, optimizer, data.inputs, data.labels, batches)

    def train(self, step: int) -> None:
        self.training.advance(step - self.training.step)

    def correct(self) -> tuple[Tensor, Tensor]:
        data, predictions = self.data, self.training.predictions
        return predictions(data.test_inputs) == data.test_labels, predictions(data.inputs) == data.labels


class _Kept(_Trainings):
    """AdamW with KeepBest, as a user writes it: one training after the other."""

    def __init__(self, config: DemoConfig, data: DemoData) -> None:
        super().__init__(KEPT, config, data)
        self.members = [
            [KeptTraining(config, data, seed, lr) for seed in range(config.seeds)] for lr in self.learning_rates
        ]

    def train(self, step: int) -> None:
        for row in self.members:
            for member in row:
                member.train(step)

    def correct(self) -> tuple[Tensor, Tensor]:
        found = [[member.correct for member in row] for row in self.members]
        test, train = (torch.stack([torch.stack([pair[i] for pair in row]) for row in found]) for i in range(2))
        return test, train


class KeptTraining:
    """One training with KeepBest: 5% of the images are held back, the best averaged weights are kept."""

    def __init__(self, config: DemoConfig, data: DemoData, seed: int, lr: float) -> None:
        self.images, self.labels = data.inputs[seed], data.labels[seed]
        self.test_images, self.test_labels = data.test_inputs[seed], data.test_labels[seed]
        (self.inputs, self.targets), held = hold_back((self.images, self.labels), HELD, seed=seed)
        shape = MLPShape(NUM_PIXELS, config.width, config.depth, NUM_CLASSES)
        self.network = plain_network(shape, stream(seed, "weights"))
        self.optimizer = AdamW(self.network.parameters(), lr=lr, fused=True)
        self.keeper = KeepBest(self.network, self.optimizer, held, functional.cross_entropy)
        size = min(config.examples_per_step, len(self.inputs))
        self.batches = epoch_batches(len(self.inputs), size, [stream(seed, "batches")])
        self.step, self._kept_step = 0, None
        self.correct = self._correct()

    def train(self, step: int) -> None:
        """Train up to the given step; whenever better weights are kept, see what they predict."""
        while self.step < step:
            index = next(self.batches)[0]
            self.optimizer.zero_grad()
            functional.cross_entropy(self.network(self.inputs[index]), self.targets[index]).backward()
            self.optimizer.step()
            self.step += 1
            if self.keeper.kept_step != self._kept_step:
                self._kept_step = self.keeper.kept_step
                assert self.keeper.average is not None
                with self.keeper.average.swapped():
                    self.correct = self._correct()

    @torch.no_grad()
    def _correct(self) -> tuple[Tensor, Tensor]:
        right = self.network(self.test_images).argmax(-1) == self.test_labels
        return right, self.network(self.images).argmax(-1) == self.labels


def _rounded(values: Tensor) -> Any:
    return [_rounded(row) for row in values] if values.dim() > 0 else round(values.item(), 6)


def _require(condition: bool, expected: str, got: Any) -> None:
    if not condition:
        kind = DataError if expected.startswith("train_size") else HyperparameterError
        raise kind(f"{expected}, got {got}")
