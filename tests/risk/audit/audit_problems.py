"""Problems with wrong labels, small enough to audit in a second; importable, so that runs of them can be reopened."""

import torch
from torch import nn

from poprisk.runs._problem import Problem

CLASSES = 4


def make_mlp():
    return nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, CLASSES))


def make_normed():
    """Batch statistics and chance: nothing exact is possible."""
    return nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, CLASSES))


def jitter(inputs, generator):
    return inputs + 0.2 * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)


def clusters(n=120, wrong=12, seed=0):
    """Points around four centres; the labels of the first ``wrong`` are moved on by one."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, 6, generator=generator)
    true = torch.randint(CLASSES, (n,), generator=generator)
    inputs = centres[true] + 0.7 * torch.randn(n, 6, generator=generator)
    given = true.clone()
    given[:wrong] = (true[:wrong] + 1) % CLASSES
    return inputs, given, true


def clustered(model="mlp", augmented=False, wrong=12):
    inputs, given, _ = clusters(wrong=wrong)
    make = {"mlp": make_mlp, "normed": make_normed}[model]
    return Problem(make, "cross_entropy", inputs, given, name="clusters", augment=jitter if augmented else None)


def make_line():
    return nn.Linear(1, 1)


def regression(n=60):
    """A line, with three targets far off."""
    x = torch.linspace(-1, 1, n).reshape(n, 1)
    noise = 0.05 * torch.randn(n, 1, generator=torch.Generator().manual_seed(1))
    y = 2 * x + noise
    y[:3] += 3
    return Problem(make_line, "squared", x, y, name="line")
