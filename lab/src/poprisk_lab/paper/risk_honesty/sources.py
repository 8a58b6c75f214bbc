"""The data of the honesty study: teachers that give any number of fresh examples, and scikit-learn's data sets.

No two splits of the study have a teacher in common. The first two have no real example in common, either; the others
have tasks of their own on the same tables: other targets.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from poprisk.runs import replace_labels

REAL = {
    "digits": ("classes", 10, (64,)),
    "cancer": ("classes", 2, (30,)),
    "wine": ("classes", 3, (13,)),
    "iris": ("classes", 3, (4,)),
    "diabetes": ("regression", 1, (10,)),
    "parity": ("classes", 2, (64,)),
    "pairs": ("classes", 5, (64,)),
    "severity": ("classes", 2, (10,)),
    "alcohol": ("regression", 1, (12,)),
    "petals": ("regression", 1, (3,)),
    "concavity": ("regression", 1, (10,)),
    "upper": ("classes", 2, (64,)),
    "thirds": ("classes", 3, (64,)),
    "obesity": ("classes", 2, (9,)),
    "hue": ("regression", 1, (12,)),
    "sepals": ("regression", 1, (3,)),
    "texture": ("regression", 1, (10,)),
}
"""Kind of target, number of outputs and shape of an input of each task on real data."""
HALVED = ("digits", "cancer")
"""Data sets of which a split uses one half of the rows."""
IMAGES = ("digits", "parity", "pairs", "upper", "thirds")
"""Tasks whose inputs are images of 8 × 8 pixels."""
PLACES, SIGNALS = 8, 4


@dataclass(frozen=True)
class Request:
    """What a setting asks of a source.

    Attributes:
        source: A key of :data:`TEACHERS` or :data:`REAL`.
        classes: Number of classes; 0 for a regression.
        shape: Shape of one input.
        noise: Share of labels replaced by another class, or standard deviation of the noise in targets.
        tails: Distribution of that noise: "normal", "student3" or "student6" (with so many degrees of freedom) or
            "contaminated" (a tenth of the examples with five times the noise).
        imbalance: Frequency of the most frequent class relative to the rarest; 1 for the source's own frequencies.
        seed: Seed for the teacher and the examples.
        half: Which half of the rows of a real data set to use, where it is halved.
    """

    source: str
    classes: int
    shape: tuple[int, ...]
    noise: float
    tails: str
    imbalance: float
    seed: int
    half: int


def draw(request: Request, train: int, duplicates: float, test: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and targets, of which a share are exact copies of others, and test inputs and targets.

    Real data give all remaining rows as test examples; teachers give ``test`` fresh ones.
    """
    distinct = train - round(duplicates * train)
    generator = Generator().manual_seed(request.seed)
    if request.source in REAL:
        x, y = _real(request, distinct, generator)
    else:
        x, y = _synthetic(request, distinct + test, generator)
    y = _noisy(request, y, generator)
    copies = torch.randint(distinct, (train - distinct,), generator=generator)
    rows = torch.cat([torch.arange(distinct), copies])
    rows = rows[torch.randperm(train, generator=generator)]
    return x[rows], y[rows], x[distinct:], y[distinct:]


def available(source: str) -> int:
    """Number of rows of a real data set that one split may use."""
    rows = len(_table(source)[0])
    return rows // 2 if source in HALVED else rows


@cache
def _table(name: str) -> tuple[Tensor, Tensor]:
    from sklearn import datasets

    inputs, targets = getattr(datasets, f"load_{_TABLES.get(name, name)}")(return_X_y=True)
    x, y = _TASKS.get(name, lambda x, y: (x, y))(torch.as_tensor(inputs, dtype=torch.float64), torch.as_tensor(targets))
    x = x / 16 if name in IMAGES else (x - x.mean(0)) / x.std(0)
    if REAL[name][0] == "regression":
        y = ((y - y.mean()) / y.std()).reshape(-1, 1)
    order = torch.randperm(len(x), generator=Generator().manual_seed(1))
    return x[order], y[order]


_TABLES = {
    "cancer": "breast_cancer",
    "concavity": "breast_cancer",
    "parity": "digits",
    "pairs": "digits",
    "severity": "diabetes",
    "alcohol": "wine",
    "petals": "iris",
    "upper": "digits",
    "thirds": "digits",
    "obesity": "diabetes",
    "hue": "wine",
    "sepals": "iris",
    "texture": "breast_cancer",
}
"""The table of a task in scikit-learn, where it has another name."""
_TASKS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "parity": lambda x, y: (x, y % 2),
    "pairs": lambda x, y: (x, y // 2),
    "severity": lambda x, y: (x, (y > y.median()).long()),
    "alcohol": lambda x, y: (x[:, 1:], x[:, 0]),
    "petals": lambda x, y: (x[:, :3], x[:, 3]),
    "concavity": lambda x, y: (x[:, :10], x[:, 27]),
    "upper": lambda x, y: (x, (y > 4).long()),
    "thirds": lambda x, y: (x, y % 3),
    "obesity": lambda x, y: (x[:, [0, 1, *range(3, 10)]], (x[:, 2] > x[:, 2].median()).long()),
    "hue": lambda x, y: (x[:, [*range(10), 11, 12]], x[:, 10]),
    "sepals": lambda x, y: (x[:, 1:], x[:, 0]),
    "texture": lambda x, y: (x[:, 10:20], x[:, 21]),
}
"""Inputs and targets of a task from those of its table."""


def _real(request: Request, train: int, generator: Generator) -> tuple[Tensor, Tensor]:
    x, y = _table(request.source)
    if request.source in HALVED:
        middle = len(x) // 2
        rows = slice(0, middle) if request.half == 0 else slice(middle, 2 * middle)
        x, y = x[rows], y[rows]
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    if request.imbalance > 1:
        kept = _thinned(y, request, generator)
        x, y = x[kept], y[kept]
    assert train < len(x), (request, len(x))
    return x.reshape(len(x), *request.shape), y


def _synthetic(request: Request, count: int, generator: Generator) -> tuple[Tensor, Tensor]:
    parts: list[tuple[Tensor, Tensor]] = []
    while sum(len(y) for _, y in parts) < count:
        x = _inputs(request, 2 * count if request.imbalance > 1 else count, generator)
        u = TEACHERS[request.source](x.flatten(1), request, Generator().manual_seed(request.seed + 77))
        y = u[:, :1] if not request.classes else u.argmax(1)
        kept = _thinned(y, request, generator) if request.imbalance > 1 else torch.arange(len(y))
        parts.append((x[kept], y[kept]))
    return torch.cat([x for x, _ in parts])[:count], torch.cat([y for _, y in parts])[:count]


def _inputs(request: Request, count: int, generator: Generator) -> Tensor:
    """Standard normal features; smooth fields for images; autoregressive signals for sequences."""
    x = torch.randn(count, *request.shape, generator=generator, dtype=torch.float64)
    if len(request.shape) == 3:
        kernel = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
        x = 2 * F.conv2d(x, (kernel[:, None] * kernel)[None, None], padding=1)
    if len(request.shape) == 2:
        for k in range(1, request.shape[0]):
            x[:, k] = 0.7 * x[:, k - 1] + math.sqrt(0.51) * x[:, k]
    return x


def _thinned(y: Tensor, request: Request, generator: Generator) -> Tensor:
    """Rows kept so that class c is less frequent than class 0 by imbalance^(c/(C - 1))."""
    share = request.imbalance ** (-y.double() / max(request.classes - 1, 1))
    return (torch.rand(len(y), generator=generator) < share).nonzero().squeeze(1)


def _noisy(request: Request, y: Tensor, generator: Generator) -> Tensor:
    if request.classes:
        if not request.noise:
            return y
        # Every label by itself, so that training and test examples have the same distribution.
        wrong = replace_labels(y, 1.0, request.classes, generator).labels
        return torch.where(torch.rand(len(y), generator=generator) < request.noise, wrong, y)
    noise = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    if request.tails.startswith("student"):
        normal = torch.randn(*y.shape, int(request.tails[-1]), generator=generator, dtype=y.dtype)
        noise = noise / normal.square().mean(-1).sqrt()
    if request.tails == "contaminated":
        noise = noise * torch.where(torch.rand(y.shape, generator=generator) < 0.1, 5.0, 1.0)
    return y + request.noise * noise


def _weights(request: Request, features: int, units: int, generator: Generator) -> tuple[Tensor, Tensor]:
    outputs = max(request.classes, 1)
    W = torch.randn(features, units, generator=generator, dtype=torch.float64) / math.sqrt(features)
    return W, torch.randn(units, outputs, generator=generator, dtype=torch.float64)


def _tanh(x: Tensor, request: Request, generator: Generator) -> Tensor:
    W, V = _weights(request, x.shape[1], 6, generator)
    return (2 * x @ W).tanh() @ V / 2


def _relu(x: Tensor, request: Request, generator: Generator) -> Tensor:
    W, V = _weights(request, x.shape[1], 8, generator)
    return (x @ W - 0.3).relu() @ V


def _linear(x: Tensor, request: Request, generator: Generator) -> Tensor:
    W, V = _weights(request, x.shape[1], 4, generator)
    return x @ W @ V / 2


def _sines(x: Tensor, request: Request, generator: Generator) -> Tensor:
    W, V = _weights(request, x.shape[1], 4, generator)
    return (2 * x @ W).sin() @ V


def _products(x: Tensor, request: Request, generator: Generator) -> Tensor:
    W, V = _weights(request, x.shape[1], 6, generator)
    z = x @ W
    return (z[:, :3] * z[:, 3:]) @ V[:3] + z @ V / 2


def _sparse(x: Tensor, request: Request, generator: Generator) -> Tensor:
    """Linear in a quarter of the features."""
    chosen = torch.randperm(x.shape[1], generator=generator)[: max(2, x.shape[1] // 4)]
    W, V = _weights(request, len(chosen), 4, generator)
    return x[:, chosen] @ W @ V / 2


def _prototypes(x: Tensor, request: Request, generator: Generator) -> Tensor:
    """About the value of the nearest of a few points."""
    W, V = _weights(request, x.shape[1], 10, generator)
    points = W.T * math.sqrt(x.shape[1])
    return 1.5 * (-4 * torch.cdist(x, points).square() / x.shape[1]).softmax(1) @ (V - V.mean(0))


def _steps(x: Tensor, request: Request, generator: Generator) -> Tensor:
    """Constant between thresholds along a few directions."""
    W, V = _weights(request, x.shape[1], 7, generator)
    return (x @ W - 0.2).sign() @ V / 2


def _cubic(x: Tensor, request: Request, generator: Generator) -> Tensor:
    W, V = _weights(request, x.shape[1], 4, generator)
    z = x @ W
    return (z + z.clamp(-2, 2) ** 3 / 3) @ V / 2


def _waves(x: Tensor, request: Request, generator: Generator) -> Tensor:
    """Waves around a few points."""
    W, V = _weights(request, x.shape[1], 5, generator)
    distance = torch.cdist(x, W.T * math.sqrt(x.shape[1])) / math.sqrt(x.shape[1])
    return 1.5 * (4 * distance).cos() @ V


def _largest(x: Tensor, request: Request, generator: Generator) -> Tensor:
    """The largest of a few directions in each of several groups."""
    W, V = _weights(request, x.shape[1], 15, generator)
    return ((x @ W).unflatten(1, (5, 3)).amax(2) - 0.85) @ V[:5]


def _hinges(x: Tensor, request: Request, generator: Generator) -> Tensor:
    W, V = _weights(request, x.shape[1], 6, generator)
    z = x @ W
    return (z.abs() - 0.8) @ V / 2 + z @ V / 3


TEACHERS: dict[str, Callable[[Tensor, Request, Generator], Tensor]] = {
    "tanh": _tanh,
    "linear": _linear,
    "sines": _sines,
    "relu": _relu,
    "products": _products,
    "sparse": _sparse,
    "prototypes": _prototypes,
    "steps": _steps,
    "cubic": _cubic,
    "waves": _waves,
    "largest": _largest,
    "hinges": _hinges,
}
"""What the targets are of the inputs: a regression's first output, or the class with the largest one."""
