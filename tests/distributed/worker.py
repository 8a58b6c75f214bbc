"""Four processes on one host do all that the tests of this folder look at, once, and leave what they found in a file.

Run as ``python worker.py FOLDER``. Nothing is judged here: every case returns numbers.
"""

import contextlib
import copy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch's optimizers import it in their first step: once here, and not in each process
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from cases import ALPHA, LOOK_EVERY, NAN_AT, NAN_ROW, ROUNDED, SAVED, STEPS, Many, batch, groups, options
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from poprisk.errors import GradientError, NonFiniteGradientWarning, StateDictError
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._estimators.ranks import RankVariance
from poprisk.optim._estimators.variance import MicrobatchVariance

WORLD = 4
HANDED_OUT = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
LR = 0.01


def whole(x: Tensor) -> Tensor:
    """The whole of a tensor, wherever its parts are."""
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def difference(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference over the largest expected magnitude."""
    gap = max((a - e).abs().max().item() for a, e in zip(actual, expected, strict=True))
    return gap / max(e.abs().max().item() for e in expected)


def plant_nan(model: Many) -> None:
    """Makes one gradient entry NaN, in whichever process holds it."""
    for name, network in model.networks.items():
        if name.startswith("nan"):
            grad = network.hidden.weight.grad
            if not isinstance(grad, DTensor):
                grad[NAN_ROW, 2] = torch.nan
                continue
            local, rank = grad.to_local(), grad.device_mesh.get_local_rank(grad.device_mesh.ndim - 1)
            rows = -(-grad.shape[0] // grad.device_mesh.size(grad.device_mesh.ndim - 1))
            if NAN_ROW // rows == rank:
                local[NAN_ROW % rows, 2] = torch.nan


def train(model: nn.Module, networks: Many, rank: int, ranks: int, steps: int = STEPS) -> dict[str, Any]:
    """The weights every few steps, the meters and gates, and how often a NaN was complained of in this process."""
    optimizer = PopRiskAdamW.paper(groups(networks), lr=LR, gate=Gate.paper(alpha=ALPHA))
    names = list(networks.networks)
    looks, meters = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            optimizer.zero_grad()
            model(*batch(step, rank, ranks)).backward()
            if step == NAN_AT:
                plant_nan(networks)
            if step % LOOK_EVERY == LOOK_EVERY - 1:
                meters.append([m.to_floats() for m in optimizer.diagnostics()])
            optimizer.step()
            if step % LOOK_EVERY == LOOK_EVERY - 1:
                looks.append({n: [whole(p) for p in networks.networks[n].parameters()] for n in names})
    gates = {p: whole(q) for p, q in optimizer.gates().items()}
    preconditioners = {p: whole(lin.preconditioner) for p, lin in optimizer.linearize().items()}
    found: dict[str, Any] = {}
    for place, name in enumerate(names):
        parameters = list(networks.networks[name].parameters())
        found[name] = {
            "weights": [look[name] for look in looks],
            "meters": [look[place] for look in meters],
            "gates": [gates[p] for p in parameters],
            "preconditioners": [preconditioners[p] for p in parameters],
        }
    return found | {"complaints": sum(issubclass(w.category, NonFiniteGradientWarning) for w in caught)}


def equality(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """The same global batches in one process, under DDP, and under FSDP2."""
    names = tuple(name for name in options() if name not in ROUNDED)
    alone = Many(names[rank::WORLD])  # they are independent: each process trains a part of them by itself
    mine = train(alone, alone, 0, 1)
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, mine)
    found: dict[str, Any] = {"alone": every}
    plain = Many(tuple(name for name in names if not name.endswith(("-foreach", "-fused"))))  # plain tensors: one way
    found["ddp"] = train(DistributedDataParallel(plain), plain, rank, WORLD)
    sharded = Many(names)
    fully_shard(sharded, mesh=mesh)
    found["fsdp"] = train(sharded, sharded, rank, WORLD)
    complaints: list[Any] = [None] * WORLD
    dist.all_gather_object(complaints, found["fsdp"]["complaints"])
    return {**found, "complaints": complaints}


def other_meshes(rank: int) -> dict[str, Any]:
    """Replicas of shards (HSDP), parameters cut along their second axis, and states offloaded to the host."""
    names = ("soft-tensor", "soft-row", "normalized", "soft-fused", "none-fused")
    alone = Many(names)
    expected = train(alone, alone, 0, 1, steps=LOOK_EVERY)
    found = {}
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))
    for kind, kwargs in (
        ("hsdp", {"mesh": replicas}),
        ("offload", {"mesh": init_device_mesh("cpu", (WORLD,)), "offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ):
        model = Many(names)
        fully_shard(model, **kwargs)
        got = train(model, model, rank, WORLD, steps=LOOK_EVERY)
        found[kind] = {n: difference(got[n]["weights"][-1], expected[n]["weights"][-1]) for n in names}
    for granularity in ("row", "tensor"):
        found[f"second axis, {granularity}"] = sideways(rank, granularity)
    return found


def sideways(rank: int, granularity: str) -> float:
    """A matrix cut along its second axis: a row lies in four processes."""
    weights = []
    for sharded in (False, True):
        torch.manual_seed(1)
        model = nn.Linear(8, 3, bias=False)
        if sharded:
            fully_shard(model, shard_placement_fn=lambda p: Shard(1))
        optimizer = PopRiskAdamW.paper(model.parameters(), gate=Gate.paper(granularity=granularity, alpha=ALPHA), lr=LR)
        for step in range(LOOK_EVERY):
            x, _ = batch(step, rank, WORLD) if sharded else batch(step)
            optimizer.zero_grad()
            (model(x.flatten(1)) - 1).square().mean().backward()
            optimizer.step()
        weights.append([whole(model.weight)])
    return difference(weights[1], weights[0])


def rounding(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """The same gradients, bit by bit, for whole and for sharded parameters with states in bfloat16."""
    found = {}
    for name, backend in (("forloop", {"foreach": False}), ("fused", {"fused": True})):
        generator = torch.Generator().manual_seed(5)
        starts = [torch.randn(shape, generator=generator) for shape in ((5, 9), (3, 2, 2), (1, 5), (6,))]
        stream = [[torch.randn(w.shape, generator=generator) for w in starts] for _ in range(12)]
        runs = []
        for place in (lambda x: x, lambda x: distribute_tensor(x, mesh, [Shard(0)])):
            parameters = [nn.Parameter(place(w.clone())) for w in starts]
            optimizer = PopRiskAdamW.paper(parameters, gate="snr", state_dtype=torch.bfloat16, **backend)
            for row in stream:
                for p, g in zip(parameters, row, strict=True):
                    p.grad = place(g.clone())
                optimizer.step()
            runs.append([whole(optimizer.state[p][k]) for p in parameters for k in ("exp_avg_sq", "exp_var")])
        found[name] = all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    return found


# Checkpoints -----------------------------------------------------------------------------------------------------


def curve(model: Many, optimizer: PopRiskAdamW, steps: range, rank: int, ranks: int, group: Any = None) -> list[float]:
    """Trains over the steps and gives the global loss before each of them."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(*batch(step, rank, ranks))
        loss.backward()
        optimizer.step()
        total = loss.detach().double()
        if ranks > 1:
            dist.all_reduce(total, group=group)
        losses.append(total.item() / ranks)
    return losses


def load(model: Many, optimizer: PopRiskAdamW, folder: Path, group: Any) -> None:
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state["optimizer"])


def described(model: Many, optimizer: PopRiskAdamW) -> dict[str, Any]:
    """Dtypes and counters of a loaded state, by network."""
    found = {}
    for name, network in model.networks.items():
        entry = optimizer.state[network.hidden.weight]
        found[name] = {k: (str(v.dtype), v.item() if v.dim() == 0 else None) for k, v in entry.items()}
    return found


def resumed(model: Many, optimizer: PopRiskAdamW, rank: int, ranks: int, group: Any = None) -> dict[str, Any]:
    about = described(model, optimizer)
    losses = curve(model, optimizer, range(10, 20), rank, ranks, group)
    return {"losses": losses, "weights": [whole(p) for p in model.parameters()], "state": about}


def checkpoints(rank: int, mesh: DeviceMesh, folder: Path) -> dict[str, Any]:
    """Saved at world size 4; resumed at 4, 2 and 1."""
    model = Many(SAVED)
    fully_shard(model, mesh=mesh)
    optimizer = PopRiskAdamW.paper(groups(model), lr=LR, gate=Gate.paper(alpha=ALPHA))
    curve(model, optimizer, range(10), rank, WORLD)
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = {
        "model": get_model_state_dict(model, options=gathered),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=gathered),
    }
    full = copy.deepcopy(full)  # torch hands out the counters themselves
    found = {"went on": resumed(model, optimizer, rank, WORLD), "gathered": from_rank_0(rank, mesh, full)}
    for ranks in (4, 2, 1):
        few = DeviceMesh("cpu", list(range(ranks)))
        if rank >= ranks:
            continue
        model = Many(SAVED)
        for p in model.parameters():  # nothing of the right start is left
            nn.init.ones_(p)
        fully_shard(model, mesh=few)
        optimizer = PopRiskAdamW.paper(groups(model), lr=LR, gate=Gate.paper(alpha=ALPHA))
        load(model, optimizer, folder, few.get_group())
        found[f"at {ranks}"] = resumed(model, optimizer, rank, ranks, few.get_group())
    dist.barrier()
    return found


def from_rank_0(rank: int, mesh: DeviceMesh, full: dict[str, Any]) -> dict[str, Any]:
    """A state gathered whole in rank 0, and handed out again."""
    model = Many(SAVED)
    fully_shard(model, mesh=mesh)
    optimizer = PopRiskAdamW.paper(groups(model), lr=LR, gate=Gate.paper(alpha=ALPHA))
    handed_out = HANDED_OUT
    set_model_state_dict(model, full["model"], options=handed_out)
    set_optimizer_state_dict(model, optimizer, optim_state_dict=full["optimizer"], options=handed_out)
    return resumed(model, optimizer, rank, WORLD)


def from_adamw(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """AdamW's state, shard by shard; gathered in rank 0 and handed out, to an AdamW first, and to ours at once."""
    model = Many(("soft-element",))
    fully_shard(model, mesh=mesh)
    first = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        first.zero_grad()
        model(*batch(step, rank, WORLD)).backward()
        first.step()
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = copy.deepcopy(get_optimizer_state_dict(model, first, options=gathered))
    model.zero_grad()  # else torch makes no room for the states it hands out
    found = {}
    again = torch.optim.AdamW(model.parameters())
    set_optimizer_state_dict(model, again, optim_state_dict=copy.deepcopy(full), options=HANDED_OUT)
    for name, source in (("sharded", first), ("handed out", again)):
        second = PopRiskAdamW.paper(model.parameters(), lr=LR)
        second.load_state_dict(source.state_dict())
        state = second.state[next(model.parameters())]
        same = (torch.equal(whole(second.state[p]["exp_avg"]), whole(first.state[p]["exp_avg"])) for p in second.state)
        found[name] = (second.went_on_from_adamw, second.param_groups[0]["lr"], sorted(state), all(same))
    third = PopRiskAdamW.paper(model.parameters(), lr=LR)
    try:  # rank 0 sees that AdamW's options were laid over ours; the others have only the values
        set_optimizer_state_dict(model, third, optim_state_dict=full, options=HANDED_OUT)
    except StateDictError as error:
        found["at once"] = str(error)
    return found


def in_one_process(folder: Path) -> dict[str, Any]:
    """The same checkpoint as a plain torch file, without any process group."""
    dcp_to_torch_save(folder, folder / "plain.pt")
    saved = torch.load(folder / "plain.pt", weights_only=False)
    model = Many(SAVED)
    optimizer = PopRiskAdamW.paper(groups(model), lr=LR, gate=Gate.paper(alpha=ALPHA))
    model.load_state_dict(saved["model"])
    set_optimizer_state_dict(model, optimizer, optim_state_dict=saved["optimizer"])
    return resumed(model, optimizer, 0, 1)


# Variance from ranks ---------------------------------------------------------------------------------------------


def variance_in_one_process(step: int, samples: int, clip: float | None = None) -> list[Tensor]:
    """The oracle: one process, one backward per sample."""
    model = Many(("soft-element",))
    with MicrobatchVariance(model.parameters()) as source:
        for k in range(samples):
            (model(*batch(step, k, samples)) / samples).backward()
        _clip(model, clip)
        return _given(source, model)


def refuses(source: RankVariance, model: nn.Module) -> bool:
    """Whether this rank refuses to give a variance."""
    try:
        source.variances(list(model.parameters()))
    except GradientError:
        return True
    return False


def _clip(model: nn.Module, clip: float | None) -> None:
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)


def _given(source: Any, model: nn.Module) -> list[Tensor]:
    return [whole(v) for v in source.variances(list(model.parameters()))]


def _samples(model: nn.Module, step: int, rank: int, micro: int, quiet: Any = None) -> None:
    """One backward per micro-batch of this rank; all but the last inside ``quiet``."""
    for k in range(micro):
        silent = quiet is not None and k < micro - 1
        with quiet() if silent else contextlib.nullcontext():
            loss = model(*batch(step, rank * micro + k, WORLD * micro))
            (loss / micro).backward()


def variances(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """By DDP and FSDP2, with and without micro-batches, clipped, after a skipped step: relative to the oracle."""
    found: dict[str, Any] = {}

    def compare(name: str, source: Any, model: nn.Module, step: int, samples: int, clip: float | None = None) -> None:
        _clip(model, clip)
        found[name] = difference(_given(source, model), variance_in_one_process(step, samples, clip))
        model.zero_grad()

    ddp = DistributedDataParallel(Many(("soft-element",)))
    with RankVariance(ddp) as source:
        for clip in (None, 0.05):
            _samples(ddp, 1, rank, 1)
            compare(f"ddp, clip {clip}", source, ddp, 1, WORLD, clip)
        for clip in (None, 0.05):
            _samples(ddp, 2, rank, 4, quiet=ddp.no_sync)
            compare(f"ddp, no_sync, clip {clip}", source, ddp, 2, 4 * WORLD, clip)
        _samples(ddp, 3, rank, 2)
        compare("ddp, micro-batches in step", source, ddp, 3, 2 * WORLD)
        for to_none in (True, False):
            _samples(ddp, 4, rank, 1)
            ddp.zero_grad(set_to_none=to_none)  # a step skipped
            _samples(ddp, 5, rank, 2, quiet=ddp.no_sync)
            compare(f"ddp, after a skipped step, {to_none}", source, ddp, 5, 2 * WORLD)
        _samples(ddp, 5, rank, 1)
        _given(source, ddp)
        _samples(ddp, 5, rank, 1)  # gradients not cleared
        found["ddp, not cleared"] = refuses(source, ddp)
        ddp.zero_grad()
        gradients = _gradients(ddp, rank)
    found["ddp, closed"] = difference(_gradients(ddp, rank), gradients)

    for kind, shape in (("fsdp", (WORLD,)), ("hsdp", (2, 2))):
        model = Many(("soft-element",))
        fully_shard(model.networks["soft-element"].hidden, mesh=_mesh(shape))
        fully_shard(model, mesh=_mesh(shape))
        with RankVariance(model) as source:
            for clip in (None, 0.05):
                _samples(model, 1, rank, 1)
                compare(f"{kind}, clip {clip}", source, model, 1, WORLD, clip)
            _samples(model, 2, rank, 2)
            compare(f"{kind}, micro-batches", source, model, 2, 2 * WORLD)
            _samples(model, 4, rank, 1)
            model.zero_grad()  # a step skipped
            _samples(model, 5, rank, 2)
            compare(f"{kind}, after a skipped step", source, model, 5, 2 * WORLD)
            for p in model.parameters():  # what set_to_none=False leaves after a step
                p.grad = torch.zeros_like(p)
            _samples(model, 5, rank, 2)
            compare(f"{kind}, on zeros", source, model, 5, 2 * WORLD)
            if kind == "fsdp":
                _samples(model, 5, rank, 1)
                _given(source, model)
                _samples(model, 5, rank, 1)  # gradients not cleared
                found["fsdp, not cleared"] = refuses(source, model)
                model.zero_grad()
            model.set_requires_gradient_sync(False)
            loss = model(*batch(6, 2 * rank, 2 * WORLD)) / 2
            loss.backward()
            model.set_requires_gradient_sync(True)
            loss = model(*batch(6, 2 * rank + 1, 2 * WORLD)) / 2
            loss.backward()
            compare(f"{kind}, accumulated without synchronization", source, model, 6, WORLD)
            gradients = _gradients(model, rank)
        found[f"{kind}, closed"] = difference(_gradients(model, rank), gradients)
    return found | gated_by_ranks(rank, mesh) | unusual(rank, mesh) | {"agree": agreement(rank), **far_below(rank)}


def unusual(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Replicas added up late, replicas of whole models, frozen layers set free, float64, a source after a source."""
    found: dict[str, Any] = {}
    name = "soft-element"

    def compare(label: str, source: Any, model: nn.Module, step: int, samples: int) -> None:
        found[label] = difference(_given(source, model), variance_in_one_process(step, samples))
        model.zero_grad()

    for kind, shape in (("hsdp", (2, 2)), ("replicas only", (WORLD, 1))):
        model = Many((name,))
        fully_shard(model, mesh=_mesh(shape))
        with RankVariance(model) as source:
            for k in range(2):
                model.set_requires_all_reduce(k == 1)
                (model(*batch(3, 2 * rank + k, 2 * WORLD)) / 2).backward()
            compare(f"{kind}, added up late", source, model, 3, 2 * WORLD)
            _samples(model, 4, rank, 2)
            compare(f"{kind}, micro-batches again", source, model, 4, 2 * WORLD)
    model = Many((name,))
    model.networks[name].filter.requires_grad_(False)
    fully_shard(model, mesh=mesh)
    with RankVariance(model) as source:
        _samples(model, 3, rank, 1)
        source.reset()
        model.zero_grad()
        model.networks[name].filter.requires_grad_(True)
        _samples(model, 4, rank, 1)
        compare("fsdp, set free", source, model, 4, WORLD)
    model = Many((name,)).double()
    fully_shard(model, mesh=mesh)
    with RankVariance(model) as source:
        model(*(x.double() for x in batch(5, rank, WORLD))).backward()
        compare("fsdp, float64", source, model, 5, WORLD)
    ddp = DistributedDataParallel(Many((name,)))
    for step in (1, 2):
        with RankVariance(ddp) as source:
            _samples(ddp, step, rank, 1)
            compare(f"ddp, source {step}", source, ddp, step, WORLD)
    return found


def agreement(rank: int) -> bool:
    """Whether all ranks have the same variances, bit by bit: else the replicas of DDP would drift apart."""
    ddp = DistributedDataParallel(Many(("soft-element",)))
    given = []
    with RankVariance(ddp) as source:
        for quiet in (None, ddp.no_sync):
            _samples(ddp, 3, rank, 3, quiet=quiet)
            given += _given(source, ddp)
            ddp.zero_grad()
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, given)
    return all(torch.equal(a, b) for other in every for a, b in zip(given, other, strict=True))


def far_below(rank: int) -> dict[str, float]:
    """Noise far below the signal, where squares of the gradients would cancel: each entry, relative to float64."""
    found = {}
    for kind, shape in (("ddp", ()), ("fsdp", (WORLD,)), ("hsdp", (2, 2))):
        plain, model = Many(("soft-element",)), Many(("soft-element",))
        if shape:
            fully_shard(model, mesh=_mesh(shape))
        runs = model if shape else DistributedDataParallel(model)
        for label, micro, quiet in (("", 1, None), (", micro-batches", 2, None if shape else runs.no_sync)):
            samples = []
            for k in range(WORLD * micro):
                plain.zero_grad()
                x, y = batch(8, k, WORLD * micro, examples=256)
                (plain(x, y - 3) / (WORLD * micro)).backward()
                samples.append([p.grad.double() for p in plain.parameters()])
            exact = [torch.stack(xs).var(0) * (WORLD * micro) for xs in zip(*samples, strict=True)]
            with RankVariance(runs) as source:
                for k in range(micro):
                    with quiet() if quiet is not None and k < micro - 1 else contextlib.nullcontext():
                        x, y = batch(8, rank * micro + k, WORLD * micro, examples=256)
                        (runs(x, y - 3) / micro).backward()
                given = _given(source, model)
                model.zero_grad()
            pairs = zip(given, exact, strict=True)
            found[f"{kind}, far below{label}"] = max(
                ((v - e).abs() / e.clamp(min=e.mean())).max().item() for v, e in pairs
            )
    return found


def _gradients(model: nn.Module, rank: int) -> list[Tensor]:
    _samples(model, 7, rank, 1)
    gradients = [whole(p.grad) for p in model.parameters()]
    model.zero_grad()
    return gradients


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "parts")[-len(shape) :])


def gated_by_ranks(rank: int, mesh: DeviceMesh) -> dict[str, float]:
    """Training on the variance from ranks: DDP, FSDP2 and the oracle's micro-batches, weights after some steps."""
    weights = {}
    for kind in ("alone", "ddp", "fsdp"):
        model: nn.Module = Many(("soft-fused",))
        samples, share = (WORLD, 0) if kind == "alone" else (1, rank)
        if kind == "fsdp":
            fully_shard(model, mesh=mesh)
        runs = DistributedDataParallel(model) if kind == "ddp" else model
        with MicrobatchVariance(model.parameters()) if kind == "alone" else RankVariance(runs) as source:
            optimizer = PopRiskAdamW.paper(
                model.parameters(), variance=source, lr=LR, gate=Gate.paper(alpha=ALPHA), fused=True
            )
            for step in range(LOOK_EVERY):
                optimizer.zero_grad()
                for k in range(samples):
                    (runs(*batch(step, share + k, WORLD)) / samples).backward()
                optimizer.step()
        weights[kind] = [whole(p) for p in model.parameters()]
    return {f"trained, {kind}": difference(weights[kind], weights["alone"]) for kind in ("ddp", "fsdp")}


def example(rank: int, folder: Path) -> dict[str, Any]:
    """The example script's own training, as torchrun would start it."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "distributed"))
    import train as script

    return {kind: script.train(kind, folder / kind, steps=20) for kind in ("ddp", "fsdp")}


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    start = time.perf_counter()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    found: dict[str, Any] = {}
    for name, case in {
        "equality": lambda: equality(rank, mesh),
        "other meshes": lambda: other_meshes(rank),
        "rounding": lambda: rounding(rank, mesh),
        "checkpoints": lambda: checkpoints(rank, mesh, folder / "checkpoint"),
        "from adamw": lambda: from_adamw(rank, mesh),
        "variances": lambda: variances(rank, mesh),
        "example": lambda: example(rank, folder),
    }.items():
        found[name] = case()
        if rank == 0:
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    dist.destroy_process_group()
    if rank == 0:
        found["in one process"] = in_one_process(folder / "checkpoint")
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # forked from a process that has imported torch and run no backward: four imports are saved
    mp.start_processes(main, (Path(sys.argv[1]),), nprocs=WORLD, start_method="fork")
