"""The models of the honesty study, small versions of those that people train, and losses that torch names."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HUBER_DELTA = 1.0
KINKED = ("relu", "dropout", "batchnorm", "cnn", "cnn_batchnorm", "transformer")
"""Models with ReLU units."""


def absolute_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Absolute error of one example.

    >>> absolute_loss(torch.zeros(1), torch.tensor([-2.0]))
    tensor(2.)
    """
    return (outputs - target).abs().sum()


def huber_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """Huber's loss of one example: squared error up to a distance of 1, linear beyond.

    >>> huber_loss(torch.zeros(1), torch.tensor([-2.0]))
    tensor(1.5000)
    """
    return F.huber_loss(outputs, target, reduction="sum", delta=HUBER_DELTA)


LOSSES = {
    "squared": "squared",
    "cross_entropy": "cross_entropy",
    "logistic": "logistic",
    "absolute": absolute_loss,
    "huber": huber_loss,
}


class Encoder(nn.Module):
    """A transformer encoder over the elements of a sequence; the mean over places is read out."""

    def __init__(self, shape: Sequence[int], width: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(shape[1], width)
        self.places = nn.Parameter(0.1 * torch.randn(shape[0], width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.read = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs for sequences (examples, places, features)."""
        return self.read(self.layer(self.embed(x) + self.places).mean(-2))


class Recurrent(nn.Module):
    """A GRU; its last state is read out."""

    def __init__(self, shape: Sequence[int], width: int, outputs: int) -> None:
        super().__init__()
        self.gru = nn.GRU(shape[1], width, batch_first=True)
        self.read = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs for sequences (examples, places, features)."""
        return self.read(self.gru(x)[0][..., -1, :])


def build(kind: str, shape: Sequence[int], width: int, outputs: int) -> nn.Module:
    """A model by its name.

    Args:
        kind: A key of :data:`MAKERS`.
        shape: Shape of one input: (features,), (channels, height, width) or (places, features).
        width: Number of units or channels.
        outputs: Number of outputs.

    >>> [build(kind, (1, 8, 8), 8, 3)(torch.ones(2, 1, 8, 8)).shape for kind in ("cnn", "relu")]
    [torch.Size([2, 3]), torch.Size([2, 3])]
    """
    return MAKERS[kind](shape, width, outputs)


def _perceptron(layers: Callable[[int], Sequence[nn.Module]]) -> Callable[[Sequence[int], int, int], nn.Module]:
    def make(shape: Sequence[int], width: int, outputs: int) -> nn.Module:
        features = torch.Size(shape).numel()
        first, second = [nn.Linear(features, width), *layers(width)], [nn.Linear(width, width), *layers(width)]
        return nn.Sequential(nn.Flatten(), *first, *second, nn.Linear(width, outputs))

    return make


def _linear(shape: Sequence[int], _width: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape).numel(), outputs))


def _convolutional(normalized: bool) -> Callable[[Sequence[int], int, int], nn.Module]:
    def make(shape: Sequence[int], width: int, outputs: int) -> nn.Module:
        layers: list[nn.Module] = []
        for before, after in ((shape[0], width), (width, 2 * width)):
            norm = [nn.BatchNorm2d(after)] if normalized else []
            layers += [nn.Conv2d(before, after, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2 * width * (shape[1] // 4) * (shape[2] // 4), outputs))

    return make


MAKERS: dict[str, Callable[[Sequence[int], int, int], nn.Module]] = {
    "linear": _linear,
    "softmax": _linear,
    "logistic": _linear,
    "relu": _perceptron(lambda _: [nn.ReLU()]),
    "gelu": _perceptron(lambda _: [nn.GELU()]),
    "tanh": _perceptron(lambda _: [nn.Tanh()]),
    "layernorm": _perceptron(lambda width: [nn.LayerNorm(width), nn.GELU()]),
    "dropout": _perceptron(lambda _: [nn.ReLU(), nn.Dropout(0.2)]),
    "batchnorm": _perceptron(lambda width: [nn.BatchNorm1d(width), nn.ReLU()]),
    "cnn": _convolutional(normalized=False),
    "cnn_batchnorm": _convolutional(normalized=True),
    "transformer": Encoder,
    "gru": Recurrent,
}
"""All models: linear ones (with squared, cross-entropy or logistic loss), networks of two hidden layers, and others."""
