"""What only a CUDA device can show of sharded parameters: the Triton kernel on a shard, and states on the host.

One process is a mesh too: DTensors, FSDP2 and its offloading are the real ones, only the messages are to oneself.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._estimators.ranks import RankVariance
from poprisk.optim._estimators.variance import MicrobatchVariance
from poprisk.optim._shards import Shard
from poprisk.optim._updates import GroupMemory

pytestmark = pytest.mark.gpu


@pytest.fixture
def mesh():
    """A process group of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "beside another"])
def test_the_kernel_rounds_a_shard_as_its_place_in_the_whole(mesh, others):
    from torch.distributed.tensor import distribute_tensor

    generator = torch.Generator("cuda").manual_seed(0)
    rows, cut = [torch.randn(9, 700, device="cuda", generator=generator) for _ in range(6)], 4
    whole = [nn.Parameter(torch.ones(9, 700, device="cuda")), nn.Parameter(torch.ones(5, device="cuda"))][: 1 + others]
    parts = [nn.Parameter(distribute_tensor(p.detach().clone()[cut:] if i == 0 else p.detach().clone(), mesh))
             for i, p in enumerate(whole)]  # fmt: skip
    options = {"gate": "snr", "state_dtype": torch.bfloat16, "fused": True}
    one, two = PopRiskAdamW.paper(whole, **options), PopRiskAdamW.paper(parts, **options)
    memory = two._memories.setdefault(id(two.param_groups[0]), GroupMemory())
    memory.shards[parts[0]] = Shard(parts[0])
    memory.shards[parts[0]].offset = cut * 700
    for g in rows:
        whole[0].grad, parts[0].grad = g, distribute_tensor(g[cut:], mesh)
        for p, q in zip(whole[1:], parts[1:], strict=True):
            p.grad, q.grad = torch.ones_like(p), distribute_tensor(torch.ones_like(p), mesh)
        one.step()
        two.step()
    for name in ("exp_avg_sq", "exp_var"):
        assert torch.equal(one.state[whole[0]][name][cut:], two.state[parts[0]][name].to_local()), name
    assert torch.equal(whole[0][cut:], parts[0].to_local())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model: nn.Module, granularity: str, steps: int = 20, **options) -> list[torch.Tensor]:
    gate = Gate.paper(alpha=0.3, granularity=granularity)
    optimizer = PopRiskAdamW.paper(model.parameters(), gate=gate, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        (model(torch.randn(16, 7, generator=generator).cuda()) - 1).square().mean().backward()
        optimizer.step()
    optimizer.diagnostics()
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("granularity", ["element", "tensor"])
@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("backend", [{"fused": True}, {"foreach": False}], ids=str)
@pytest.mark.filterwarnings("ignore::poprisk.errors.BackendWarning")
def test_fsdp_equals_the_plain_module(mesh, granularity, offload, backend):
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    expected = train(network().cuda(), granularity, **backend)
    model = network().cuda() if not offload else network()
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy())
    for got, want in zip(train(model, granularity, **backend), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    assert {p.device.type for p in model.parameters()} == {"cpu" if offload else "cuda"}


def test_ddp_gives_the_variance_of_its_micro_batches(mesh):
    plain, x = network().cuda(), torch.randn(12, 7, device="cuda")
    ddp = nn.parallel.DistributedDataParallel(network().cuda())
    found = []
    for model, source in ((plain, MicrobatchVariance(plain.parameters())), (ddp, RankVariance(ddp))):
        with source:
            for part in x.chunk(4):
                (model(part).square().mean() / 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            found.append(source.variances(list(model.parameters())))
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-9)
