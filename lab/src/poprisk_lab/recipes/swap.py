"""``python -m poprisk_lab.recipes.swap --output lab/results/swap.json``: PopRiskAdamW in AdamW's place, nothing else.

Digits with a share of wrong labels, a network with two hidden layers, and AdamW's learning rates: each gate at AdamW's
own rate and weight decay, against AdamW, by test accuracy at the last step. Runs that are compared have the same
examples, wrong labels, initial weights and batches.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from poprisk import Gate, PopRiskAdamW
from poprisk._core.store import save_result
from poprisk.runs import digits_split, replace_labels

KIND = "swap"
GATES = {"snr": Gate(), "soft": Gate("soft"), "hard": Gate("hard")}
"""The default gate, and the other two kinds at their defaults."""


@dataclass(frozen=True)
class SwapConfig:
    """Size of the test.

    Attributes:
        shares: Shares of wrong labels.
        rates: Learning rates.
        seeds: Number of seeds.
        train_size: Number of training examples.
        width: Number of units of each of the two hidden layers.
        batch_size: Number of examples per step.
        steps: Number of steps.
        weight_decay: Weight decay.
    """

    shares: tuple[float, ...] = (0.0, 0.2, 0.4)
    rates: tuple[float, ...] = (1e-4, 1e-3, 1e-2)
    seeds: int = 3
    train_size: int = 1000
    width: int = 256
    batch_size: int = 100
    steps: int = 500
    weight_decay: float = 1e-2


SMOKE = SwapConfig(shares=(0.4,), rates=(1e-2,), seeds=2, train_size=100, width=16, steps=20)
"""A few seconds, for tests."""


def accuracy(config: SwapConfig, share: float, seed: int, make: Callable[[Iterable[Tensor]], Optimizer]) -> float:
    """Test accuracy at the last step of one training."""
    split = digits_split(seed, config.train_size)
    labels = replace_labels(split.train_labels, share, 10, torch.Generator().manual_seed(1000 + seed)).labels
    generator = torch.Generator().manual_seed(2000 + seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3000 + seed)
        sizes = (64, config.width, config.width, 10)
        first, second, last = (nn.Linear(a, b) for a, b in pairwise(sizes))
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
    optimizer = make(model.parameters())
    for _ in range(config.steps):
        batch = torch.randint(config.train_size, (config.batch_size,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(split.train_inputs[batch]), labels[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(split.test_inputs).argmax(1) == split.test_labels).double().mean())


def run(config: SwapConfig) -> dict[str, Any]:
    """One row for each share, rate and optimizer: accuracies by seed, their mean, and its difference from AdamW's."""
    began, rows = time.perf_counter(), []
    for share in config.shares:
        for lr in config.rates:
            options: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay}
            makers: dict[str, Callable[[Any], Optimizer]] = {"adamw": lambda p, o=options: AdamW(p, **o)}
            makers |= {name: lambda p, o=options, g=gate: PopRiskAdamW(p, gate=g, **o) for name, gate in GATES.items()}
            values = {
                name: [accuracy(config, share, s, make) for s in range(config.seeds)] for name, make in makers.items()
            }
            base = mean(values["adamw"])
            for name, found in values.items():
                facts: dict[str, Any] = {
                    "share": share,
                    "lr": lr,
                    "optimizer": name,
                    "accuracies": found,
                    "mean": mean(found),
                }
                rows.append(facts | {"points_over_adamw": 100 * (facts["mean"] - base)})
                gain = f"{rows[-1]['points_over_adamw']:+.1f}"
                print(f"{share:.0%} wrong, lr {lr:g}, {name}: {100 * facts['mean']:.1f}% ({gain})", flush=True)
    lowest = min(row["points_over_adamw"] for row in rows)
    return {"rows": rows, "lowest_points_over_adamw": lowest, "seconds": round(time.perf_counter() - began, 1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the swap test from the command line."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.recipes.swap", description=__doc__)
    parser.add_argument("--output", required=True, type=Path, help="file to write")
    parser.add_argument("--smoke", action="store_true", help="a few seconds at a tiny size")
    given = parser.parse_args(arguments)
    config = SMOKE if given.smoke else SwapConfig()
    described = asdict(config) | {"gates": {name: repr(gate) for name, gate in GATES.items()}}
    print(f"Wrote {save_result(given.output, KIND, described, run(config))}")


if __name__ == "__main__":
    main()
