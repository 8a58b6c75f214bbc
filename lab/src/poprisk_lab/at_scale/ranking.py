"""Influence through some of the parameters beside all of them: who ranks real removals best?

``python -m poprisk_lab.at_scale.ranking --output FILE`` trains two small networks on digits, and each of them again
without random sets of examples: about two minutes on two cores. What is compared was written down before, in RULE.md.
"""

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from poprisk import Problem, Run, train
from poprisk._core.store import save_result
from poprisk.risk import influence_on, retrain
from poprisk.risk._retraining.members import Members
from poprisk_lab.at_scale.numbers import RANKING


@dataclass(frozen=True)
class RankingConfig:
    """Sizes of the study."""

    examples: int = 300
    queries: int = 100
    steps: int = 180
    batch: int = 50
    lr: float = 3e-3
    rank: int = 4
    sets: int = 40
    shares: tuple[float, ...] = (0.05, 0.5)
    seeds: tuple[int, ...] = (0, 1, 2)
    wrong: float = 0.1
    """Share of wrong labels, without which removals hardly matter."""


SMOKE = RankingConfig(examples=40, queries=5, steps=6, batch=20, sets=4, seeds=(0,))


class Adapted(nn.Module):
    """A frozen network with LoRA on both hidden layers, and a new head."""

    def __init__(self, pretrained: nn.Sequential, rank: int) -> None:
        super().__init__()
        first, second = pretrained[0], pretrained[2]
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        self.first, self.second = first, second
        for p in (*self.first.parameters(), *self.second.parameters()):
            p.requires_grad_(False)
        widths = [(layer.in_features, layer.out_features) for layer in (first, second)]
        self.lora_A = nn.ModuleList(nn.Linear(i, rank, bias=False) for i, _ in widths)
        self.lora_B = nn.ModuleList(nn.Linear(rank, o, bias=False) for _, o in widths)
        for layer in self.lora_B:
            nn.init.zeros_(layer.weight)  # type: ignore[arg-type]
        self.head = nn.Linear(widths[1][1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        for layer, down, up in zip((self.first, self.second), self.lora_A, self.lora_B, strict=True):
            x = (layer(x) + up(down(x))).tanh()
        return self.head(x)


def network() -> nn.Sequential:
    """A perceptron with two hidden layers."""
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 10))


def digits(seed: int, config: RankingConfig) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Training examples with some wrong labels, queries, and examples to pretrain with, which know four classes."""
    data, target = load_digits(return_X_y=True)
    order = torch.randperm(len(target), generator=torch.Generator().manual_seed(seed))
    x, y = torch.from_numpy(data).float()[order] / 8 - 1, torch.from_numpy(target).long()[order]
    n, q = config.examples, config.queries
    generator = torch.Generator().manual_seed(seed + 1)
    given, wrong = y[:n].clone(), torch.rand(n, generator=generator) < config.wrong
    given[wrong] = (given[wrong] + torch.randint(1, 10, (int(wrong.sum()),), generator=generator)) % 10
    rest = slice(n + q, n + q + 600)
    return x[:n], given, x[n : n + q], y[n : n + q], x[rest], y[rest] % 4


def pretrained(x: Tensor, y: Tensor, seed: int) -> nn.Sequential:
    """A network that has learned four classes of other digits."""
    run = train(
        Problem(network, "cross_entropy", x, y, seed=seed),
        partial(torch.optim.AdamW, lr=3e-3),
        200,
        batch_size=50,
        progress=False,
    )
    model = network()
    with torch.no_grad():
        for p, piece in zip(model.parameters(), run.layout.split(run.weights(run.num_steps)), strict=True):
            p.copy_(piece)
    return model


def gradient_products(run: Run, x: Tensor, y: Tensor) -> Tensor:
    """What is without a training in it: products of gradients at the last weights, in no unit."""
    model, w = run.model(), run.weights(run.num_steps)
    inputs, targets = run.problem.batch()
    return model.per_example_gradients(w, x, y) @ model.per_example_gradients(w, inputs, targets).T


def spearman(a: Tensor, b: Tensor) -> Tensor:
    """Rank correlation along the first axis.

    >>> spearman(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [4.0], [9.0]]))
    tensor([1.])
    """
    ranks = [x.argsort(0).argsort(0).double() for x in (a, b)]
    centred = [x - x.mean(0) for x in ranks]
    return ((centred[0] * centred[1]).sum(0) / (centred[0].norm(dim=0) * centred[1].norm(dim=0))).float()


def compared(run: Run, x: Tensor, y: Tensor, ways: Mapping[str, str | None], config: RankingConfig) -> dict[str, Any]:
    """Each way's score against real removals of each size."""
    influences, seconds = {}, {}
    for name, parameters in ways.items():
        began = time.process_time()
        influences[name] = influence_on(run, x, y, parameters=parameters)
        seconds[name] = time.process_time() - began
    influences["gradient products"] = gradient_products(run, x, y)
    model = run.model()
    base = model.per_example_losses(run.weights(run.num_steps), x, y)
    found: dict[str, Any] = {"weights": run.num_weights, "seconds": seconds, "shares": {}}
    for share in config.shares:
        count = max(1, round(share * run.num_examples))
        generator = torch.Generator().manual_seed(7)
        removed = torch.stack(
            [torch.randperm(run.num_examples, generator=generator)[:count] for _ in range(config.sets)]
        )
        alpha = torch.ones(config.sets, run.num_examples).scatter_(1, removed, 0.0)
        last = retrain(run, Members(alpha), progress=False).weights
        measured = torch.stack([model.per_example_losses(w, x, y) for w in last]) - base
        rows = {}
        for name, J in influences.items():
            predicted = (1 - alpha) @ J.T
            slope = float((predicted * measured).sum() / predicted.square().sum())
            both = torch.corrcoef(torch.stack([predicted.flatten(), measured.flatten()]))[0, 1]
            lds = spearman(predicted, measured)
            rows[name] = {"lds": float(lds.nanmean()), "correlation": float(both), "slope": slope}
        found["shares"][str(share)] = rows
    return found


def study(config: RankingConfig) -> dict[str, Any]:
    """Both networks, for every seed."""
    rows = []
    for seed in config.seeds:
        x, y, queries, labels, more, four = digits(seed, config)
        rule = partial(torch.optim.AdamW, lr=config.lr)
        options = {"batch_size": config.batch, "seed": seed, "progress": False}
        plain = train(Problem(network, "cross_entropy", x, y, seed=seed), rule, config.steps, **options)
        ways = {"all parameters": None, "last layer": "last_layer", "first layer": "0"}
        rows.append({"task": "perceptron", "seed": seed, **compared(plain, queries, labels, ways, config)})
        torch.manual_seed(seed)
        adapted = Adapted(pretrained(more, four, seed), config.rank)
        tuned = train(Problem(adapted, "cross_entropy", x, y), rule, config.steps, **options)
        ways = {"all parameters": None, "last layer": "last_layer", "LoRA": "lora"}
        rows.append({"task": "LoRA and head", "seed": seed, **compared(tuned, queries, labels, ways, config)})
        print(rows[-2:], flush=True)
    return {"rows": rows}


def main() -> None:
    """Run the study and store it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    config = SMOKE if given.smoke else RankingConfig()
    save_result(given.output, RANKING, asdict(config), study(config))


if __name__ == "__main__":
    main()
