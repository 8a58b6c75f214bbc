"""Small problems that runs are recorded of; importable, so that a later process can rebuild them."""

import torch
from torch import nn

from poprisk.runs._problem import Problem


def make_mlp(inputs=4, width=6, outputs=3):
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


class Tied(nn.Module):
    """A shared weight, a frozen one and a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.register_buffer("shift", torch.full((4,), 0.1))

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))) * self.scale + self.shift)


def jitter(inputs, generator):
    return inputs + 0.1 * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)


def tiny_data(n=12, seed=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=generator, dtype=torch.float64).to(dtype)
    return inputs, torch.randint(3, (n,), generator=generator)


def classification(n=12, augmented=False):
    inputs, labels = tiny_data(n)
    test = (inputs.flip(0), labels.flip(0))
    augment = jitter if augmented else None
    return Problem(make_mlp, "cross_entropy", inputs, labels, name="tiny", test=test, augment=augment)


def regression(n=12):
    inputs, labels = tiny_data(n)
    targets = nn.functional.one_hot(labels, 3).double()
    return Problem(make_mlp, "squared", inputs, targets, name="tiny regression")


def tied():
    inputs, labels = tiny_data()
    return Problem(Tied, "cross_entropy", inputs, labels, name="tied")


def with_dropout():
    inputs, labels = tiny_data()
    return Problem(make_dropout, "cross_entropy", inputs, labels, name="dropout")


def make_dropout():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
