"""Small recorded runs in float64 for the influence tests, and the same trained again by the oracle."""

from functools import partial

import torch
from networks import build, draw
from torch import nn
from torch.nn import functional as F

from oracles.influence import train_again
from poprisk import PopRiskAdamW
from poprisk.optim import Gate
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

OPTIMIZERS = {
    "momentum": partial(torch.optim.SGD, lr=0.2, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.05),
    "adam": partial(torch.optim.Adam, lr=0.02),
    "coupled adam": partial(torch.optim.Adam, lr=0.02, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "soft": partial(
        PopRiskAdamW, gate=Gate("soft", alpha=0.2, strength=0.5, normalize=False), weight_decay=0.01, lr=0.05
    ),
    "snr": partial(PopRiskAdamW, gate=Gate("snr", strength=1.0, normalize=False), weight_decay=0.01, lr=0.05),
    "row": partial(
        PopRiskAdamW, gate=Gate("snr", strength=1.0, granularity="row", normalize=False), weight_decay=0.01, lr=0.05
    ),
    "default": partial(PopRiskAdamW, lr=0.02),
    "relative soft": partial(PopRiskAdamW, gate=Gate("soft", alpha=0.2, strength=0.5), lr=0.02),
    "relative row": partial(PopRiskAdamW, gate=Gate("snr", strength=1.0, granularity="row"), lr=0.02),
}
LOSSES = {
    "cross_entropy": lambda u, y: F.cross_entropy(u, y, reduction="none"),
    "squared": lambda u, y: 0.5 * (u - y).square().flatten(1).sum(1),
}


class Case:
    """A run, and the way to train it again."""

    def __init__(self, kind="mlp", optimizer="adam", *, n=6, steps=7, batch_size=3, loss="cross_entropy", **options):
        self.inputs = draw(kind, n)
        classes = build(kind)(self.inputs[:1]).shape[1]
        labels = torch.randint(classes, (n,), generator=torch.Generator().manual_seed(5))
        self.targets = labels if loss == "cross_entropy" else F.one_hot(labels, classes).double()
        self.make, self.optimizer, self.losses = partial(build, kind), OPTIMIZERS[optimizer], LOSSES[loss]
        self.problem = Problem(self.make, loss, self.inputs, self.targets)
        self.clip_norm, self.schedule = options.get("clip_norm"), options.get("schedule")
        options |= {"dtype": torch.float64, "progress": False}
        self.run = train(self.problem, self.optimizer, steps, batch_size=batch_size, **options)
        self.batches = [self.run.batch(k) for k in range(steps)]

    def again(self, *, inputs=None, **changes) -> nn.Module:
        rates = None
        if self.schedule is not None:
            base = self.optimizer.keywords["lr"]
            rates = [base * self.schedule(k) for k in range(len(self.batches))]
        inputs = self.inputs if inputs is None else inputs
        arguments = (self.make, self.optimizer, self.losses, inputs, self.targets, self.batches)
        return train_again(*arguments, clip_norm=self.clip_norm, rates=rates, **changes)

    def own_losses(self, model: nn.Module) -> torch.Tensor:
        return self.losses(model(self.inputs), self.targets).detach()


def on_device(device, rule):
    """A run in float64 whose examples are on this device."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, 3, generator=generator, dtype=torch.float64)
    problem = Problem(_network, "cross_entropy", x, torch.randint(3, (14,), generator=generator)).to(device)
    rules = {"momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "adam": partial(torch.optim.Adam, lr=0.02)}
    return train(problem, rules[rule], 12, batch_size=7, dtype=torch.float64, progress=False)


def _network():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))
