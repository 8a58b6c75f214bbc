"""Short recorded runs of every rule, and how their test displacement splits."""

from functools import cache, partial

import torch
from networks import build, draw

from poprisk.operators._drift_diffusion import drift_diffusion
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

RULES = {
    "sgd": partial(torch.optim.SGD, lr=0.3),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.8, weight_decay=0.02),
    "nesterov": partial(torch.optim.SGD, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.02),
    "adam": partial(torch.optim.Adam, lr=0.05, weight_decay=0.05),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "poprisk": partial(PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha="calibrated"), lr=0.2, weight_decay=0.05),
}
TEST = draw("mlp", 12)[8:]


@cache
def trained(rule, loss="squared", **options):
    generator = torch.Generator().manual_seed(5)
    squared = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    targets = squared if loss == "squared" else torch.arange(8) % 3
    problem = Problem(build, loss, draw("mlp", 12)[:8], targets, arguments={"kind": "mlp"})
    run = train(problem, RULES[rule], 6, batch_size=4, progress=False, **options)
    return run, problem, problem.model(torch.float64)


def split_of(rule, loss="squared", *, start=0, sampling="independent", **options):
    run, problem, model = trained(rule, loss, **options)
    return drift_diffusion(run, model, problem.inputs, problem.targets, TEST, start=start, sampling=sampling)
