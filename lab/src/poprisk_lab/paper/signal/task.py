r"""The task of the signal experiment: two moons with flipped labels."""

import math
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from poprisk._core.seeds import stream
from poprisk.errors import HyperparameterError
from poprisk.runs import Problem, replace_labels
from poprisk_lab.paper.signal.groups import DigitsConfig


@dataclass(frozen=True)
class SignalConfig:
    """Configuration of the experiment."""

    seeds: int = 3
    examples: int = 64
    test_examples: int = 64
    noise: float = 0.2
    """Share of training labels that are flipped; test labels are right."""
    spread: float = 0.15
    """Standard deviation of the points around their moon, of radius 1."""
    width: int = 32
    lr: float = 0.02
    steps: int = 300
    look_every: int = 5
    """Number of steps between evaluations of the losses."""
    gamma: float = 10.0
    neighbours: int = 6
    digits: DigitsConfig = field(default_factory=DigitsConfig)

    def __post_init__(self) -> None:
        for name in ("seeds", "test_examples", "width", "steps", "look_every"):
            if getattr(self, name) < 1:
                raise HyperparameterError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.neighbours < self.examples:
            raise HyperparameterError(f"neighbours must lie between 1 and examples - 1, got {self.neighbours}")
        wrong = round(self.noise * self.examples)
        if not 2 <= wrong <= self.examples - 2:
            raise HyperparameterError(f"noise must make at least 2 labels wrong and leave 2 right, got {self.noise}")


SMOKE = SignalConfig(
    seeds=1,
    examples=16,
    test_examples=12,
    width=8,
    steps=12,
    look_every=5,
    neighbours=3,
    digits=DigitsConfig(seeds=1, examples=20, width=6, steps=2, neighbours=4),
)


def two_moons(
    count: int, spread: float, generator: torch.Generator
) -> tuple[Float[Tensor, "count 2"], Int[Tensor, "count"]]:
    """Points on two interleaved half circles with their labels, which alternate.

    >>> points, labels = two_moons(4, 0.0, torch.Generator().manual_seed(0))
    >>> labels.tolist(), bool((points[0].norm() - 1).abs() < 1e-12)
    ([0, 1, 0, 1], True)
    """
    angle = math.pi * torch.rand(count, generator=generator, dtype=torch.float64)
    labels = torch.arange(count) % 2
    upper = torch.stack([angle.cos(), angle.sin()], dim=1)
    lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
    moons = torch.where(labels[:, None] == 0, upper, lower)
    return moons + spread * torch.randn(count, 2, generator=generator, dtype=torch.float64), labels


def moons_problem(config: SignalConfig, seed: int) -> tuple[Problem, Tensor]:
    """The problem of a seed, and a mask of its wrong training labels."""
    generator = torch.Generator().manual_seed(stream(seed, "signal moons"))
    inputs, labels = two_moons(config.examples, config.spread, generator)
    test_inputs, test_labels = two_moons(config.test_examples, config.spread, generator)
    spoiled = replace_labels(labels, config.noise, 2, generator)
    problem = Problem(
        tanh_classifier,
        "logistic",
        inputs,
        spoiled.labels[:, None],
        name="two moons",
        arguments={"width": config.width},
        test=(test_inputs, test_labels[:, None]),
        seed=stream(seed, "signal weights") % 2**31,
    )
    return problem, spoiled.wrong


def tanh_classifier(width: int) -> nn.Sequential:
    """Two hidden tanh layers and one logit, for points in the plane."""
    hidden = [nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(width, 1))
