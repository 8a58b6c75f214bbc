r"""The task of the time axis: strong features that memorize, and weak ones that carry the label."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.seeds import stream
from poprisk.errors import HyperparameterError


@dataclass(frozen=True)
class TimeConfig:
    """Configuration of the experiment."""

    seeds: int = 5
    examples: int = 300
    test_examples: int = 1000
    dimension: int = 3
    """Dimension of the signal."""
    marks: int = 5
    """Number of entries of the marks."""
    memorizing: int = 280
    """Number of strong features, less than the number of examples."""
    bump_width: float = 0.35
    """Standard deviation of the bumps; the entries of the marks have standard deviation 1."""
    strength: float = 1.0
    """Approximate rate σ²/n of the memorizing directions, in units of 1/100."""
    weakness: float = 2e-5
    """Square of the factor of the signal features."""
    decay: float = 1e-5
    """Weight decay of the second set of curves in panel A."""
    lr: float = 10.0
    steps: int = 300_000
    times: int = 60
    """Number of evaluations, equally spaced in log t from lr to lr times steps."""
    shown: tuple[int, ...] = (0, 140, 279, 280, 282)
    """Indices of the singular directions whose fit is recorded; the largest is 0."""

    def __post_init__(self) -> None:
        for name in ("seeds", "test_examples", "dimension", "marks", "steps"):
            if getattr(self, name) < 1:
                raise HyperparameterError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 1 <= self.memorizing <= self.examples - self.dimension:
            raise HyperparameterError(
                f"memorizing must lie between 1 and examples - dimension, so that they leave the signal something to "
                f"fit, got {self.memorizing}"
            )
        if not (self.lr * self.strength / 100 < 1 and self.times >= 2):
            raise HyperparameterError(f"lr times strength must be below 100 to approximate the flow, got lr={self.lr}")
        if not all(0 <= j < self.memorizing + self.dimension for j in self.shown):
            raise HyperparameterError(f"shown must name directions of the kernel, got {list(self.shown)}")


SMOKE = TimeConfig(
    seeds=1, examples=30, test_examples=20, dimension=2, memorizing=26, steps=300, times=6, shown=(0, 26, 27)
)


@dataclass(frozen=True, eq=False)
class MemorizingTask:
    """Features of training and test inputs, and their labels ±1."""

    features: Float[Tensor, "n d"]
    test_features: Float[Tensor, "m d"]
    targets: Float[Tensor, "n"]
    test_targets: Float[Tensor, "m"]


def memorizing_task(config: TimeConfig, seed: int) -> MemorizingTask:
    """The task of a seed: strong features that tell training examples apart, and weak ones that carry the label."""
    generator = torch.Generator().manual_seed(stream(seed, "time axis"))
    count = config.examples + config.test_examples
    x = torch.randn(count, config.dimension, generator=generator, dtype=torch.float64)
    z = torch.randn(count, config.marks, generator=generator, dtype=torch.float64)
    mix = torch.randn(config.examples, config.memorizing, generator=generator, dtype=torch.float64)
    mix = torch.linalg.qr(mix).Q * math.sqrt(config.strength * config.examples / 100)

    bumps = torch.exp(-torch.cdist(z, z[: config.examples]).square() / (2 * config.bump_width**2))
    features = torch.cat([bumps @ mix, math.sqrt(config.weakness) * x], dim=1).split(config.examples)
    labels = x[:, 0].sign().split(config.examples)
    return MemorizingTask(features[0], torch.cat(features[1:]), labels[0], torch.cat(labels[1:]))
