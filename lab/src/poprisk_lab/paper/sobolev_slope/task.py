r"""The task of the Sobolev slope: two classes on the circle at evenly spaced angles."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from poprisk.errors import HyperparameterError
from poprisk.runs import Problem, Run, train


@dataclass(frozen=True)
class SlopeConfig:
    """Configuration of the sweep."""

    sizes: tuple[int, ...] = (8, 12, 16, 24, 32)
    """Numbers n of distinct training inputs."""
    repeated: bool = True
    """Whether every input occurs twice, with batches of half of the examples; else once, with full batches."""
    order: float = 2.0
    """Order m of the bound, greater than 1/2."""
    grid: int = 128
    """Number of evenly spaced test inputs."""
    width: int = 16
    steps: int = 40
    lr: float = 0.5
    rank_cutoff: float = 1e-2
    """Singular values of C_S up to this share of the largest count as 0 in the second remainder."""
    seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.sizes)) < 2 or min(self.sizes) < 2:
            raise HyperparameterError(f"a slope needs two or more sizes, each at least 2, got {self.sizes}")
        if max(self.sizes) > self.grid:
            raise HyperparameterError(f"grid must be at least the largest size, {max(self.sizes)}, got {self.grid}")


def circle_problem(n: int, width: int, *, repeated: bool, seed: int) -> Problem:
    r"""Two classes on the circle, :math:`y = [\sin 2z + \frac12 \cos 3z > 0]`, at n evenly spaced angles.

    A repeated input has the same label both times.

    >>> len(circle_problem(5, 3, repeated=True, seed=0))
    10
    """
    angles = _angles(n).repeat(2 if repeated else 1)
    labels = (torch.sin(2 * angles) + 0.5 * torch.cos(3 * angles) > 0).long()
    return Problem(
        circle_network,
        "cross_entropy",
        _on_circle(angles),
        labels,
        name="circle",
        arguments={"width": width},
        seed=seed,
    )


def circle_network(width: int) -> nn.Sequential:
    """A hidden tanh layer with two outputs; analytic, hence smooth to every order m."""
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2))


def record(config: SlopeConfig, n: int) -> Run:
    """Train in float64 and record every step."""
    problem = circle_problem(n, config.width, repeated=config.repeated, seed=config.seed)
    rule = partial(torch.optim.SGD, lr=config.lr)
    batch = n if config.repeated else None
    return train(problem, rule, config.steps, batch_size=batch, seed=config.seed, dtype=torch.float64, progress=False)


def _angles(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float64) * (2 * torch.pi / n)


def _on_circle(angles: torch.Tensor) -> torch.Tensor:
    return torch.stack([angles.cos(), angles.sin()], dim=1)
