r"""Regression on random cosine features of any number: a task on which capacity can be varied freely."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import HyperparameterError
from poprisk.theory.frozen import FrozenProblem, frozen_problem_of_features

_DTYPE = torch.float64


@dataclass(frozen=True, eq=False)
class RandomFeatureTask:
    """Inputs, a smooth truth, and random cosine features of any number."""

    inputs: Float[Tensor, "n k"]
    test_inputs: Float[Tensor, "m k"]
    signal: Float[Tensor, "n"]
    r""":math:`\bar y`: the truth at the training inputs."""
    truth: Float[Tensor, "m"]
    r""":math:`f^*(Q)`."""
    frequencies: Float[Tensor, "k widest"]
    phases: Float[Tensor, "widest"]

    def features(self, x: Float[Tensor, "b k"], width: int) -> Float[Tensor, "b width"]:
        r""":math:`\sqrt{2/d} \cos(\Omega^\top x + b)`, the first d of all frequencies."""
        Omega, b = self.frequencies[:, :width], self.phases[:width]
        return math.sqrt(2 / width) * torch.cos(x @ Omega + b)

    def problem(self, width: int) -> FrozenProblem:
        """The regression on this many features."""
        return frozen_problem_of_features(self.features(self.inputs, width), self.features(self.test_inputs, width))


def random_feature_task(
    seed: int,
    *,
    examples: int = 20,
    tests: int = 30,
    dimension: int = 3,
    widest: int = 200,
    frequency: float = 0.7,
) -> RandomFeatureTask:
    r"""A task drawn from a seed: normal inputs, and the truth a sum of five random waves of unit variance.

    Args:
        seed: Seed for all random draws.
        examples: n.
        tests: m.
        dimension: Dimension of the inputs.
        widest: Most features.
        frequency: Standard deviation of the features' frequencies; the truth's are half as high.

    Raises:
        HyperparameterError: a size below 1.

    >>> random_feature_task(0, examples=4, tests=2).problem(width=10).rank
    4
    """
    if min(examples, tests, dimension, widest) < 1:
        raise HyperparameterError("a task needs at least one example, test, dimension and feature")
    generator = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=_DTYPE)  # noqa: E731
    uniform = lambda size: 2 * math.pi * torch.rand(size, generator=generator, dtype=_DTYPE)  # noqa: E731
    x, q = normal(examples, dimension), normal(tests, dimension)
    waves, shifts, heights = 0.5 * frequency * normal(dimension, 5), uniform(5), normal(5)

    def truth(z: Tensor) -> Tensor:
        return torch.cos(z @ waves + shifts) @ heights * math.sqrt(2 / 5)

    return RandomFeatureTask(x, q, truth(x), truth(q), frequency * normal(dimension, widest), uniform(widest))
