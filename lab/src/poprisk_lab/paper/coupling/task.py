r"""The task of the coupling experiment: a product of two inputs, cases with repeated inputs, recorded training."""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from poprisk._core.seeds import stream
from poprisk.errors import HyperparameterError
from poprisk.runs import Problem, Run, train

MINIBATCH, FULL_BATCH, REPEATED = "minibatch", "full_batch", "repeated"


def _require(condition: bool, expected: str, got: Any) -> None:
    if not condition:
        raise HyperparameterError(f"{expected}, got {got}")


@dataclass(frozen=True)
class Case:
    """One way to train on the same problem."""

    name: str
    batch_size: int | None
    """Batch size; ``None`` for full batches."""
    repeated: int
    """Number of inputs that occur twice, with independent label noise."""


@dataclass(frozen=True)
class CouplingConfig:
    """Configuration of the experiment, which runs every case with every seed."""

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
    """Number of steps between evaluations of the kernel."""

    def __post_init__(self) -> None:
        for name in ("seeds", "examples", "test_examples", "width", "steps", "drift_every"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
        _require(self.dimension >= 2, "dimension must be at least 2, as the target is a product", self.dimension)
        _require(self.noise >= 0 and self.lr > 0, "noise must be ≥ 0 and lr > 0", (self.noise, self.lr))
        names = [case.name for case in self.cases]
        _require(len(names) > 0 and len(set(names)) == len(names), "cases must have different names", names)
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


def record(config: CouplingConfig, case: Case, seed: int) -> Run:
    """Train one case with the weights and the data of a seed, and record every step, in float64."""
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
        seed: Seed for inputs, noise and initial weights.
        examples: Number of training examples, including the repeated ones.
        test_examples: Number of test examples.
        dimension: Dimension of the inputs; only two entries matter.
        noise: Standard deviation of the noise in the training labels.
        width: Width of the two hidden layers.
        repeated: Number of inputs at the end that repeat the first ones, with independent noise.

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
    """Two hidden tanh layers and one output, with torch's default initialization."""
    hidden = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


def _interaction(x: torch.Tensor) -> torch.Tensor:
    return x[:, :1] * x[:, 1:2]
