"""How soon AdamW generalizes on modular division at a high learning rate, on a CPU.

``python -m poprisk_lab.paper.grokking.quick_adamw OUTPUT`` writes ``lab/results/grokking_adamw.json``: some minutes on
one core. The settings are those of the public suites with ten times their learning rate; nothing is searched. A
training ends when it reaches the target.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from poprisk._core.seeds import stream
from poprisk._core.store import save_result
from poprisk_lab.paper.grokking.task import TEST_ACCURACY, GrokkingTask, ModularTransformer, division_table

KIND = "grokking_adamw"


@dataclass(frozen=True)
class QuickConfig:
    """What is trained.

    Attributes:
        task: The problem; its number of steps is the limit.
        lr: Learning rate.
        weight_decay: Weight decay.
        beta2: AdamW's β2.
        lr_warmup: Number of steps in which the learning rate rises from zero.
        every: Number of steps between measurements.
        seeds: Seeds for weights, split and batches.
    """

    task: GrokkingTask = field(default_factory=lambda: GrokkingTask(steps=3000))
    lr: float = 1e-2
    weight_decay: float = 1.0
    beta2: float = 0.98
    lr_warmup: int = 10
    every: int = 50
    seeds: tuple[int, ...] = (0, 1, 2)


SMOKE = QuickConfig(GrokkingTask(modulus=7, width=8, heads=2, hidden=16, batch_size=4, steps=6), every=3, seeds=(0,))


def train(config: QuickConfig, seed: int) -> dict[str, Any]:
    """One training, up to the target: the measured accuracies, and the first measured step at the target or None."""
    task, table = config.task, division_table(config.task, seed)
    network = ModularTransformer(task.modulus, task.width, task.heads, task.hidden, task.layers)
    network.load_state_dict(task.initial(seed))
    betas = (0.9, config.beta2)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.lr, betas=betas, weight_decay=config.weight_decay)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / max(1, config.lr_warmup)))
    generator = torch.Generator().manual_seed(stream(seed, "quick batches"))
    order, curve = torch.empty(0, dtype=torch.long), []
    for step in range(1, task.steps + 1):
        if len(order) < task.batch_size:
            order = torch.randperm(task.train_size, generator=generator)
        rows, order = table.train[order[: task.batch_size]], order[task.batch_size :]
        optimizer.zero_grad()
        F.cross_entropy(network(rows[:, :2]), rows[:, 2]).backward()
        optimizer.step()
        warmup.step()
        if step % config.every == 0:
            curve.append([step, accuracy(network, table.test)])
            if curve[-1][1] >= (TEST_ACCURACY.target or 1):
                return {"seed": seed, "reached": step, "curve": curve}
    return {"seed": seed, "reached": None, "curve": curve}


@torch.no_grad()
def accuracy(network: ModularTransformer, rows: Tensor) -> float:
    """Share of right answers."""
    return float((network(rows[:, :2]).argmax(1) == rows[:, 2]).double().mean())


def run(config: QuickConfig) -> dict[str, Any]:
    """Every seed in turn."""
    return {"runs": [train(config, seed) for seed in config.seeds]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and store the result."""
    parser = argparse.ArgumentParser(
        prog="python -m poprisk_lab.paper.grokking.quick_adamw", description="AdamW at a high learning rate."
    )
    parser.add_argument("output", type=Path, help="file for the result")
    parser.add_argument("--smoke", action="store_true", help="a tiny network, a few seconds")
    options = parser.parse_args(arguments)
    config = SMOKE if options.smoke else QuickConfig()
    print(f"Wrote {save_result(options.output, KIND, asdict(config), run(config))}")


if __name__ == "__main__":
    main()
