"""The trainings that are audited: data, kind and share of wrong labels, network, optimizer and length."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk.errors import MissingExtraError
from poprisk.runs import Problem, Run, train
from poprisk_lab.data.idx import idx_split

KINDS = ("uniform", "one class", "class-dependent", "ambiguous")
"""Which labels are wrong: any to any other; one class to one other; each class to the next; those nearest another class
to that class."""
SOURCES = ("digits", "wine", "cancer", "fashion", "clusters")
MODELS = ("mlp", "cnn", "tuned")
CHECKPOINTS = 50


@dataclass(frozen=True)
class Setting:
    """One training that is audited."""

    source: str
    n: int
    kind: str
    rate: float
    """Share of wrong labels; of the class, for one class."""
    model: str
    width: int
    optimizer: str
    lr: float
    epochs: int
    seed: int


@dataclass(frozen=True)
class Labelled:
    """Examples with given and true labels, and new examples with true labels."""

    inputs: Tensor
    given: Tensor
    true: Tensor
    test_inputs: Tensor
    test_true: Tensor

    @property
    def wrong(self) -> Tensor:
        """Which labels are wrong."""
        return self.given != self.true


def draw_settings(number: int, seed: int, sources: tuple[str, ...] = SOURCES) -> list[Setting]:
    """Settings drawn at random; two seeds share none."""
    draw = random.Random(seed)
    return [_draw(draw, sources[i % len(sources)], 1000 * seed + i) for i in range(number)]


def _draw(draw: random.Random, source: str, seed: int) -> Setting:
    sizes = {
        "digits": (300, 600, 1000, 1400),
        "wine": (178,),
        "cancer": (200, 400, 569),
        "fashion": (1000, 2000, 3000),
        "clusters": (100, 300, 1000),
    }
    kind = draw.choice(KINDS)
    model = draw.choice(MODELS if source in ("digits", "fashion") else ("mlp",))
    name = draw.choice(("sgd", "adamw"))
    top = 0.3 if kind == "ambiguous" else 0.5
    rate = 0.0 if draw.random() < 0.12 else round(draw.uniform(0.02, top), 3)
    lr = draw.choice((0.03, 0.1) if name == "sgd" else (1e-3, 3e-3))
    if model == "cnn" and name == "sgd":
        lr = 0.03
    epochs = draw.choice((5, 10, 20, 40, 80) if model != "cnn" else (5, 10, 20, 30))
    if source in ("wine", "cancer", "clusters"):
        epochs = draw.choice((10, 20, 40, 100, 200))
    n, width = draw.choice(sizes[source]), draw.choice((32, 64, 128))
    if model == "cnn":
        n, width = min(n, 1000), min(width, 64)
    return Setting(source, n, kind, rate, model, width, name, lr, epochs, seed)


def labelled(setting: Setting, fashion: str | Path) -> Labelled:
    """The examples of a setting, some of them with wrong labels.

    Args:
        setting: What to make.
        fashion: Folder of Fashion-MNIST's four files, read only for that source.
    """
    generator = torch.Generator().manual_seed(setting.seed)
    x, y = _source(setting.source, str(fashion), setting.seed)
    order = torch.randperm(len(y), generator=generator)
    rows, rest = order[: setting.n], order[setting.n : setting.n + 5000]
    true = y[rows]
    given = _spoiled(x[rows], true, setting, generator)
    return Labelled(x[rows], given, true, x[rest], y[rest])


def make_model(model: str, width: int, inputs: int, outputs: int) -> nn.Module:
    """A network of one or two hidden layers, or a small convolutional network for square images."""
    if model != "cnn":
        layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)]
        return nn.Sequential(*layers)
    side, channels = round(inputs**0.5), width // 4
    convolutions = [nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    convolutions += [nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    flat = 2 * channels * (side // 4) ** 2
    return nn.Sequential(nn.Unflatten(1, (1, side, side)), *convolutions, nn.Flatten(), nn.Linear(flat, outputs))


def tuned_model(width: int, inputs: int, outputs: int, state: Any) -> nn.Module:
    """A network that starts from given weights; its last layer starts anew."""
    module = make_model("mlp", width, inputs, outputs)
    module.load_state_dict({**module.state_dict(), **state})
    return module


def problem_of(setting: Setting, data: Labelled) -> Problem:
    """The training problem with the given labels."""
    sizes = {"width": setting.width, "inputs": data.inputs.shape[1], "outputs": 1 + int(data.true.max())}
    make: Callable[..., nn.Module] = partial(make_model, setting.model)
    if setting.model == "tuned":
        make = partial(tuned_model, state=_pretrained(setting, data))
    return Problem(make, "cross_entropy", data.inputs, data.given, arguments=sizes, seed=setting.seed)


def trained(setting: Setting, data: Labelled) -> Run:
    """The recorded training of a setting."""
    batch = 32 if setting.n <= 600 else 64
    steps = max(1, setting.epochs * setting.n // batch)
    makers = {
        "sgd": partial(torch.optim.SGD, lr=setting.lr, momentum=0.9),
        "adamw": partial(torch.optim.AdamW, lr=setting.lr, weight_decay=0.01),
    }
    every = max(1, steps // CHECKPOINTS)
    problem = problem_of(setting, data)
    return train(
        problem, makers[setting.optimizer], steps, batch_size=batch, seed=setting.seed, every=every, progress=False
    )


def _pretrained(setting: Setting, data: Labelled) -> dict[str, Tensor]:
    """Hidden layers trained on the held-out examples with true labels of half of the classes."""
    module = make_model("mlp", setting.width, data.inputs.shape[1], 1 + int(data.true.max()))
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
    keep = data.test_true % 2 == 0
    x, y = data.test_inputs[keep], data.test_true[keep]
    generator = torch.Generator().manual_seed(setting.seed)
    for _ in range(200):
        rows = torch.randint(len(y), (64,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(module(x[rows]), y[rows]).backward()
        optimizer.step()
    return {name: value.detach() for name, value in module.state_dict().items() if not name.startswith("4.")}


def _spoiled(x: Tensor, true: Tensor, setting: Setting, generator: torch.Generator) -> Tensor:
    classes, n = 1 + int(true.max()), len(true)
    if setting.kind == "ambiguous":
        return _ambiguous(x, true, round(setting.rate * n), generator, every=setting.seed % 2 == 0)
    hit = torch.rand(n, generator=generator) < setting.rate
    shift = torch.randint(1, classes, (n,), generator=generator) if setting.kind == "uniform" else torch.ones(n).long()
    if setting.kind == "one class":
        hit &= true == int(torch.randint(classes, (), generator=generator))
    return torch.where(hit, (true + shift) % classes, true)


def _ambiguous(x: Tensor, true: Tensor, number: int, generator: torch.Generator, *, every: bool) -> Tensor:
    """Labels nearest to another class by a cross-validated regression, changed to that class: all, or each second."""
    if not number:
        return true
    regression, cross_val_predict = _sklearn()
    p = torch.as_tensor(cross_val_predict(regression, x.numpy(), true.numpy(), cv=5, method="predict_proba"))
    own = p.gather(1, true[:, None])[:, 0]
    other = p.scatter(1, true[:, None], -1).max(1)
    nearest = (own - other.values).argsort()[: number if every else 2 * number]
    nearest = nearest[torch.randperm(len(nearest), generator=generator)[:number]]
    given = true.clone()
    given[nearest] = other.indices[nearest]
    return given


@cache
def _source(name: str, fashion: str, seed: int) -> tuple[Tensor, Tensor]:
    if name == "clusters":
        return _clusters(seed)
    if name == "fashion":
        return _fashion(fashion)
    from sklearn import datasets

    load = {"digits": datasets.load_digits, "wine": datasets.load_wine, "cancer": datasets.load_breast_cancer}[name]
    x, y = load(return_X_y=True)
    inputs = torch.as_tensor(x, dtype=torch.float32)
    scale = 16.0 if name == "digits" else inputs.std(0)
    centre = 0.0 if name == "digits" else inputs.mean(0)
    return (inputs - centre) / scale, torch.as_tensor(y, dtype=torch.long)


@cache
def _fashion(folder: str) -> tuple[Tensor, Tensor]:
    """The test images, halved in size: 14 by 14."""
    split = idx_split(folder)
    images = F.avg_pool2d(split.test_inputs.reshape(-1, 1, 28, 28), 2)
    return images.flatten(1), split.test_labels.long()


def _clusters(seed: int) -> tuple[Tensor, Tensor]:
    """Five Gaussian classes in 10 dimensions, some of which overlap."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(5, (4000,), generator=generator)
    centres = torch.randn(5, 10, generator=generator)
    scale = float(torch.empty(()).uniform_(0.4, 1.0, generator=generator))
    return centres[y] + scale * torch.randn(4000, 10, generator=generator), y


def _sklearn() -> Any:
    try:
        from sklearn.linear_model import LogisticRegression
        from sklearn.model_selection import cross_val_predict
    except ImportError:
        raise MissingExtraError("scikit-learn", "data", "ambiguous labels") from None
    return LogisticRegression(max_iter=500), cross_val_predict
