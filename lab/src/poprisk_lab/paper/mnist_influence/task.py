r"""The task of the influence experiment: MNIST or synthetic images, the network, and its recorded training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Generator, Tensor, nn

from poprisk.errors import DataError
from poprisk.runs import Problem, Run, train
from poprisk_lab.data.idx import ImageSplit, idx_split

_CLASSES = 10


@dataclass(frozen=True)
class Setting:
    """One training configuration and its number of test queries."""

    name: str
    optimizer: str
    """``"sgd"`` or ``"adam"``."""
    activation: str = "relu"
    """``"relu"`` or ``"tanh"``."""
    queries: int = 500
    dtype: str = "float32"


@dataclass(frozen=True)
class MnistConfig:
    """Configuration of the experiment."""

    settings: tuple[Setting, ...] = (
        Setting("SGD, ReLU", "sgd"),
        Setting("Adam, ReLU", "adam"),
        Setting("SGD, tanh", "sgd", "tanh", 50),
        Setting("SGD, ReLU, float64", "sgd", "relu", 50, "float64"),
        Setting("Adam, tanh", "adam", "tanh", 50),
    )
    n: int = 5000
    hidden: tuple[int, ...] = (128, 64)
    batch_size: int = 64
    epochs: int = 3
    sgd_lr: float = 0.05
    momentum: float = 0.9
    adam_lr: float = 1e-3
    seed: int = 0
    removals: int = 100
    subsets: int = 100
    subset_size: int = 50
    epsilons: tuple[float, ...] = (1e-1, 1e-3, 1e-5, 1e-7)
    flipped: float = 0.1
    label_seeds: tuple[int, ...] = (0, 1, 2)
    exact_wrong: int = 60
    """Number of wrong labels with exact columns, for the first seed; and of right ones:"""
    exact_right: int = 90
    synthetic: bool = False
    """Whether to generate synthetic images of the same shape instead of reading MNIST."""


SMOKE = MnistConfig(
    settings=(Setting("SGD, ReLU", "sgd", queries=12), Setting("Adam, tanh", "adam", "tanh", 6)),
    n=160,
    hidden=(8, 6),
    batch_size=32,
    epochs=2,
    removals=6,
    subsets=5,
    subset_size=8,
    epsilons=(1e-6,),
    label_seeds=(0, 1),
    exact_wrong=4,
    exact_right=6,
    synthetic=True,
)


def network(inputs: int, hidden: list[int], activation: str) -> nn.Module:
    """Fully connected layers."""
    made = {"relu": nn.ReLU, "tanh": nn.Tanh}[activation]
    sizes, layers = [inputs, *hidden], []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), made()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], _CLASSES))


def images(config: MnistConfig, data: str | Path | None) -> ImageSplit:
    """The first n training images and all test images, or synthetic ones.

    Raises:
        DataError: the folder is ``None``, a file is missing or damaged, or there are fewer than n images.
    """
    if config.synthetic:
        return _made_up(config)
    if data is None:
        raise DataError("the experiment needs MNIST, got no data: give the folder with its four idx files")
    split, n = idx_split(data), config.n
    if len(split.train_labels) < n:
        raise DataError(f"expected at least {n} training images, got {len(split.train_labels)} in {data}")
    return ImageSplit(split.train_inputs[:n], split.train_labels[:n], split.test_inputs, split.test_labels)


def _made_up(config: MnistConfig) -> ImageSplit:
    generator = Generator().manual_seed(config.seed)
    centres = torch.rand(_CLASSES, 49, generator=generator)
    number = 2 * config.n
    labels = torch.randint(_CLASSES, (number,), generator=generator)
    inputs = (centres[labels] + 0.2 * torch.randn(number, 49, generator=generator)).clamp(0, 1)
    n = config.n
    return ImageSplit(inputs[:n], labels[:n], inputs[n:], labels[n:])


def train_images(
    config: MnistConfig,
    setting: Setting,
    split: ImageSplit,
    *,
    labels: Tensor | None = None,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> Run:
    """A recorded run of the setting, optionally with other labels or another seed."""
    seed = config.seed if seed is None else seed
    dtype = getattr(torch, setting.dtype) if dtype is None else dtype
    targets = split.train_labels if labels is None else labels
    arguments = {
        "inputs": split.train_inputs.shape[1],
        "hidden": list(config.hidden),
        "activation": setting.activation,
    }
    problem = Problem(
        network,
        "cross_entropy",
        split.train_inputs.to(dtype),
        targets,
        name=setting.name,
        arguments=arguments,
        seed=seed,
    )
    makers: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(torch.optim.SGD, lr=config.sgd_lr, momentum=config.momentum),
        "adam": partial(torch.optim.Adam, lr=config.adam_lr),
    }
    steps = config.epochs * (config.n // config.batch_size)
    optimizer = makers[setting.optimizer]
    return train(problem, optimizer, steps, batch_size=config.batch_size, seed=seed, dtype=dtype, progress=False)
