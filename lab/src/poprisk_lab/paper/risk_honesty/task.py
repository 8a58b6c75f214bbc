"""The tasks on which estimates of population risk are compared with the truth: data, network, sizes."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from poprisk.runs import Problem, digits_split

_TEST = 20_000


@dataclass(frozen=True)
class Task:
    """A training configuration."""

    name: str
    source: str
    """``"regression"``, ``"classes"`` or ``"digits"``."""
    noise: float
    """Standard deviation of the targets' noise, or the share of labels replaced by any class."""
    optimizer: str
    lr: float


@dataclass(frozen=True)
class HonestyConfig:
    """Configuration of the experiment."""

    tasks: tuple[Task, ...] = (
        Task("regression, little noise", "regression", 0.3, "sgd", 0.02),
        Task("regression, much noise", "regression", 1.0, "adam", 0.01),
        Task("classes, clean", "classes", 0.0, "adam", 0.01),
        Task("classes, 20% replaced", "classes", 0.2, "sgd", 0.1),
        Task("classes, 40% replaced", "classes", 0.4, "adam", 0.01),
        Task("digits, 30% replaced", "digits", 0.3, "adam", 0.003),
    )
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: tuple[int, ...] = (12, 40, 120, 400, 1200)
    n: int = 400
    width: int = 64
    batch_size: int = 100
    examples: int = 128
    """Number of examples used by the exclusion and first-order estimates."""
    folds: int = 10


SMOKE = HonestyConfig(
    tasks=(
        Task("regression, little noise", "regression", 0.3, "sgd", 0.02),
        Task("classes, 40% replaced", "classes", 0.4, "adam", 0.01),
    ),
    seeds=(0,),
    steps=(5, 30),
    n=60,
    width=8,
    batch_size=30,
    examples=12,
    folds=5,
)


def network(inputs: int, width: int, outputs: int) -> nn.Module:
    """One hidden layer of tanh units."""
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def task_problem(task: Task, config: HonestyConfig, seed: int) -> Problem:
    """The examples of one seed, with a large test set from the same distribution, including the noise."""
    if task.source == "digits":
        return _digits(task, config, seed)
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.Generator().manual_seed(9)  # the same truth for all seeds
    W = 1.5 * torch.randn(8, 6, generator=teacher, dtype=torch.float64) / math.sqrt(8)
    V = torch.randn(6, 3, generator=teacher, dtype=torch.float64)
    x = torch.randn(config.n + _TEST, 8, generator=generator, dtype=torch.float64)
    u = (x @ W).tanh() @ V
    if task.source == "regression":
        y = u[:, :1] + task.noise * torch.randn(len(x), 1, generator=generator, dtype=torch.float64)
    else:
        y = u.argmax(1)
        replaced = torch.rand(len(x), generator=generator) < task.noise
        y = torch.where(replaced, torch.randint(3, (len(x),), generator=generator), y)
    return _problem(task, config, seed, x, y, 8, 1 if task.source == "regression" else 3)


def _digits(task: Task, config: HonestyConfig, seed: int) -> Problem:
    split = digits_split(seed, config.n)
    generator = torch.Generator().manual_seed(seed)
    x = torch.cat([split.train_inputs, split.test_inputs]).double()
    y = torch.cat([split.train_labels, split.test_labels])
    replaced = torch.rand(len(y), generator=generator) < task.noise
    y = torch.where(replaced, torch.randint(10, (len(y),), generator=generator), y)
    return _problem(task, config, seed, x, y, 64, 10)


def _problem(task: Task, config: HonestyConfig, seed: int, x: Tensor, y: Tensor, inputs: int, outputs: int) -> Problem:
    n = config.n
    loss = "squared" if task.source == "regression" else "cross_entropy"
    arguments = {"inputs": inputs, "width": config.width, "outputs": outputs}
    return Problem(network, loss, x[:n], y[:n], name=task.name, arguments=arguments, test=(x[n:], y[n:]), seed=seed)
