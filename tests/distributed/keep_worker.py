"""Two processes train with KeepBest and TailAverage under DDP and FSDP2, and leave what they found in a file.

Run as ``python keep_worker.py FOLDER``. Nothing is judged here.
"""

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it in their first step: once here, and not in each process
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from poprisk import KeepBest

WORLD, STEPS, BATCH, HELD = 2, 30, 16, 23


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(160, 6, generator=generator)
    y = (x[:, 0] > 0).long()
    return x, torch.where(torch.rand(160, generator=generator) < 0.3, 1 - y, y)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 15), nn.Tanh(), nn.Linear(15, 2))  # rows that two ranks do not divide evenly


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name.removeprefix("module."): whole(value) for name, value in model.state_dict().items()}


def keeper_of(model: nn.Module, path: Path | None, **options: Any) -> tuple[torch.optim.Optimizer, KeepBest]:
    x, y = examples()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"average": (0.2, 0.5), "path": path, "every": 3, **options}
    return optimizer, KeepBest(model, optimizer, (x[:HELD], y[:HELD]), functional.cross_entropy, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int, ranks: int) -> None:
    x, y = examples()
    for step in steps:
        index = torch.randint(HELD, 160, (BATCH,), generator=torch.Generator().manual_seed(step))
        part = index[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
        optimizer.zero_grad()
        functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()


def ended(model: nn.Module, keeper: KeepBest) -> dict[str, Any]:
    """Weights of training, means and kept weights, and the estimate."""
    last = weights(model)
    with keeper.average.swapped(1):
        mean = weights(model)
    back = weights(model)
    risk = keeper.finish()
    moments = [(each.step, each.tail, each.losses) for each in keeper.curve.moments]
    facts = (risk.value, risk.standard_error, risk.step, risk.tail, risk.accuracy)
    return {"last": last, "mean": mean, "back": back, "kept": weights(model), "risk": facts, "moments": moments}


def resumed(rank: int, folder: Path, mesh: Any) -> dict[str, Any]:
    """Saved by torch.distributed.checkpoint in the middle; a new model goes on from there."""
    model = network()
    fully_shard(model, mesh=mesh)
    optimizer, keeper = keeper_of(model, None)
    train(model, optimizer, range(18), rank, WORLD)
    names = {id(p): name for name, p in model.named_parameters()}
    plain = {name: p.to_local().clone() for name, p in model.named_parameters()}
    adam = {names[id(p)]: {k: local(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    dcp.save({"keeper": keeper.state_dict()}, checkpoint_id=folder)
    before = copy.deepcopy(keeper.curve.packed())
    again = network()
    fully_shard(again, mesh=mesh)
    other, second = keeper_of(again, None)
    train(again, other, range(100, 102), rank, WORLD)  # states to be replaced
    with torch.no_grad():
        for name, p in again.named_parameters():
            p.to_local().copy_(plain[name])
            for key, value in adam[name].items():
                local_of(other.state[p][key]).copy_(value)
    state = {"keeper": second.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    second.load_state_dict(state["keeper"])
    same = second.curve.packed() == before
    placements = all(isinstance(x, DTensor) for x in second.average.state_dict()["means"][0])
    train(again, other, range(18, STEPS), rank, WORLD)
    return {**ended(again, second), "same curve": same, "sharded means": placements}


def local_of(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def local(x: Tensor) -> Tensor:
    return local_of(x).clone()


def main(rank: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), WORLD), rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    found: dict[str, Any] = {}
    model = network()
    wrapped = DistributedDataParallel(model)
    optimizer, keeper = keeper_of(wrapped, folder / "ddp.safetensors")
    train(wrapped, optimizer, range(STEPS), rank, WORLD)
    found["ddp"] = ended(wrapped, keeper)
    model = network()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, keeper = keeper_of(model, folder / "fsdp.safetensors")
    train(model, optimizer, range(STEPS), rank, WORLD)
    found["fsdp"] = ended(model, keeper)
    found["resumed"] = resumed(rank, folder / "checkpoint", mesh)
    # Batches of different sizes: the processes still measure at the same steps.
    model = network()
    wrapped = DistributedDataParallel(model)
    optimizer, keeper = keeper_of(wrapped, None, cost=0.2, every=None)
    x, y = examples()
    for _ in range(12):
        optimizer.zero_grad()
        functional.cross_entropy(wrapped(x[30 : 34 + 40 * rank]), y[30 : 34 + 40 * rank]).backward()
        optimizer.step()
    found["uneven"] = [each.step for each in keeper.curve.moments]
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, found)
    dist.destroy_process_group()
    if rank == 0:
        model = network()
        optimizer, keeper = keeper_of(model, None)
        train(model, optimizer, range(STEPS), 0, 1)
        torch.save({"ranks": every, "alone": ended(model, keeper)}, folder / "found.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    mp.start_processes(main, (Path(sys.argv[1]),), nprocs=WORLD, start_method="fork")
