"""PopRiskAdamW on several processes: DDP or FSDP2, the variance from ranks, and a checkpoint for any number of them.

Run on a CPU: torchrun --standalone --nproc-per-node 4 examples/distributed/train.py --kind fsdp --output /tmp/run
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from poprisk import PopRiskAdamW, RankVariance

INPUTS, BATCH, MICRO_BATCHES = 20, 64, 2  # of each rank


def points(count: int, seed: int, flipped: float) -> tuple[Tensor, Tensor]:
    """Points on two sides of a plane, some with the wrong side's label."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=generator)
    y = x[:, :4].sum(1) > 0
    wrong = torch.rand(count, generator=generator) < flipped
    return x, (y ^ wrong).long()


def distribute(model: nn.Module, kind: str) -> nn.Module:
    """The one line that differs."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model)  # in place: parameters are DTensors from here on, so build the optimizer afterwards
    return model


def step(model: nn.Module, optimizer: PopRiskAdamW, seed: int) -> Tensor:
    """One step of the usual loop: every rank has examples of its own, in two micro-batches."""
    optimizer.zero_grad()
    x, y = points(BATCH, seed * dist.get_world_size() + dist.get_rank(), flipped=0.2)
    losses = []
    for xs, ys in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        loss = nn.functional.cross_entropy(model(xs), ys) / MICRO_BATCHES
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return torch.stack(losses).sum()


def save(model: nn.Module, optimizer: PopRiskAdamW, folder: Path) -> None:
    """Every rank writes its part; any number of ranks can read it."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: PopRiskAdamW, folder: Path) -> None:
    weights, state = get_state_dict(model, optimizer)  # says what to read, and of which shapes and dtypes
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def train(kind: str, output: Path, steps: int) -> dict[str, Any]:
    """Trains, and writes a checkpoint; goes on from one if it is there."""
    torch.manual_seed(0)
    model = distribute(nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, 2)), kind)
    with RankVariance(model) as variance:  # each rank's micro-batches are samples of the gradient
        optimizer = PopRiskAdamW(model.parameters(), lr=1e-2, variance=variance)
        if (output / ".metadata").exists():
            load(model, optimizer, output)
        begin = int(optimizer.state[next(model.parameters())]["step"]) if optimizer.state else 0
        for number in range(begin, begin + steps):
            loss = step(model, optimizer, number)
        save(model, optimizer, output)
    dist.all_reduce(loss)
    meters = optimizer.overall_diagnostics().to_floats()  # the whole model's, so every rank must ask
    x, y = points(1000, seed=10**6, flipped=0.0)
    with torch.no_grad():
        accuracy = (model(x).argmax(1) == y).float().mean().item()
    return {
        "steps": begin + steps,
        "loss": loss.item() / dist.get_world_size(),
        "accuracy": accuracy,
        "mean_gate": meters["mean_gate"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint; if there is one, go on")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    found = train(options.kind, options.output, options.steps)
    if dist.get_rank() == 0:
        print("PopRiskAdamW: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
