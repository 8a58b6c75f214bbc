"""Two processes with a model under FSDP2 multiply with its tangent kernel, and leave the products in a file."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from poprisk.errors import DataError, RunError
from poprisk.operators import ShardedKernel

WORLD, EACH = 2, 4


class Network(nn.Module):
    """Residual blocks, a parameter of the root itself, and a frozen one; sizes that do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([block() for _ in range(2)])
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.head = nn.Linear(7, 3)
        self.embed.bias.requires_grad_(False)

    def forward(self, x):
        h = self.embed(x)
        for each in self.blocks:
            h = h + each(h)
        return self.head(self.scale * h)


class Borrowing(Network):
    """Uses a block's weights outside of its forward pass."""

    def forward(self, x):
        block: Any = self.blocks[0]
        weight = block[3].weight
        return super().forward(x) + (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).mean()


def block():
    return nn.Sequential(nn.Linear(7, 11), nn.LayerNorm(11), nn.GELU(), nn.Linear(11, 7))


def data():
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(WORLD * EACH, n, dtype=torch.float64, generator=generator) for n in (5, 3))


def sharded(model):
    mesh = init_device_mesh("cpu", (WORLD,))
    model = model.double()
    for each in model.blocks:
        fully_shard(each, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD)
    x, v = (part[EACH * rank : EACH * (rank + 1)] for part in data())
    model = sharded(Network())
    K = ShardedKernel(model, x)
    found = {"plain": K @ v, "half": ShardedKernel(model, x, preconditioner=0.5) @ v}
    M = [torch.full_like(p, 2.0 + i) for i, p in enumerate(K.parameters)]
    found["diagonal"] = ShardedKernel(model, x, preconditioner=M) @ v
    gradients: Any = K.adjoint(v)
    found["local"] = torch.tensor([sum(g.to_local().numel() for g in gradients), sum(p.numel() for p in K.parameters)])
    found["left"] = torch.tensor([p.grad is not None for p in model.parameters()])
    model(x).sum().backward()  # training goes on
    found["trains"] = torch.tensor([p.grad is not None for p in model.parameters() if p.requires_grad])
    refused = []
    for wrong in (lambda: ShardedKernel(Network(), x), lambda: ShardedKernel(sharded(Borrowing()), x)):
        try:
            wrong()
        except (DataError, RunError) as error:
            refused.append(str(error))
    torch.save({**found, "refused": refused}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(main, (Path(sys.argv[1]),), nprocs=WORLD, start_method="fork")
