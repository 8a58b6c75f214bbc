"""Sharded parameters in a process group of one: what is refused, and how it is said."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from poprisk.errors import DataError, GradientError, HyperparameterError, StateDictError
from poprisk.optim import Gate, join_gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._estimators.ranks import RankVariance
from poprisk.optim._estimators.variance import MicrobatchVariance


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def sharded(mesh, *placements):
    from torch.distributed.tensor import DTensor, Shard

    return nn.Parameter(DTensor.from_local(torch.ones(3, 2), mesh, placements or [Shard(0)]))


def stepped(parameter, **options):
    optimizer = PopRiskAdamW([parameter], **join_gate(options))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_a_state_is_loaded_into_its_own_layout(mesh):
    whole, parts = stepped(nn.Parameter(torch.ones(3, 2))), stepped(sharded(mesh))
    with pytest.raises(StateDictError, match=r"exp_avg of parameter 0 is a whole tensor, the parameter is sharded"):
        parts.load_state_dict(whole.state_dict())
    with pytest.raises(
        StateDictError, match=r"is a sharded tensor, the parameter is whole: .*set_optimizer_state_dict"
    ):
        whole.load_state_dict(parts.state_dict())
    parts.load_state_dict(copy.deepcopy(parts.state_dict()))
    assert parts.param_groups[0]["params"][0].grad is not None


def test_what_sharded_parameters_cannot_do_is_refused(mesh):
    from torch.distributed.tensor import Partial

    with pytest.raises(HyperparameterError, match="`differentiable` does not support sharded parameters"):
        PopRiskAdamW([sharded(mesh)], differentiable=True)
    partial = sharded(mesh, Partial())
    with pytest.raises(GradientError, match="must be sharded or replicated, got the placements"):
        stepped(partial)
    with pytest.raises(DataError, match="got sharded parameters: use "):
        MicrobatchVariance([sharded(mesh)])


def test_a_rank_variance_needs_a_wrapped_model(mesh):
    with pytest.raises(DataError, match=r"needs a DistributedDataParallel model .* got Linear"):
        RankVariance(nn.Linear(2, 1))
    source = RankVariance(nn.parallel.DistributedDataParallel(nn.Linear(2, 1)))
    with pytest.raises(DataError, match="cannot be copied or pickled"):
        copy.deepcopy(source)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_one_sample_leaves_the_optimizer_to_the_stream(mesh, kind):
    from torch.distributed.fsdp import fully_shard

    weights = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        if wrapped and kind == "fsdp":
            fully_shard(model, mesh=mesh)
        run = nn.parallel.DistributedDataParallel(model) if wrapped and kind == "ddp" else model
        optimizer = PopRiskAdamW(model.parameters(), variance=RankVariance(run) if wrapped else None)
        for step in range(4):
            optimizer.zero_grad()
            run(torch.eye(4) + step).square().mean().backward()
            optimizer.step()
        weights.append([getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_micro_batches_of_one_rank_are_samples_too(mesh, kind):
    from torch.distributed.fsdp import fully_shard

    found = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        if wrapped and kind == "fsdp":
            fully_shard(model, mesh=mesh)
        run = nn.parallel.DistributedDataParallel(model) if wrapped and kind == "ddp" else model
        with RankVariance(run) if wrapped else MicrobatchVariance(model.parameters()) as source:
            for k in range(3):
                run(torch.eye(4) + k).square().mean().backward()
            found.append([getattr(v, "full_tensor", lambda v=v: v)() for v in source.variances([*model.parameters()])])
    for got, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_there_is_one_rank_variance_at_a_time(mesh, kind):
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(4, 3)
    model = fully_shard(model, mesh=mesh) if kind == "fsdp" else nn.parallel.DistributedDataParallel(model)
    first = RankVariance(model)
    with pytest.raises(DataError, match="has a RankVariance already, and there can be one at a time"):
        RankVariance(model)
    first.close()
    RankVariance(model).close()
    with pytest.raises(DataError, match="none of which belongs to its model"):
        stepped(nn.Parameter(torch.ones(2)), variance=RankVariance(model))


def test_a_ddp_model_with_another_hook_is_refused(mesh):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    model.register_comm_hook(None, fp16_compress_hook)
    with pytest.raises(DataError, match="communication hook of the DDP model, and this model already has one"):
        RankVariance(model)
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


def test_flattened_parameters_have_no_rows():
    parameter = nn.Parameter(torch.ones(6))
    parameter._fsdp_flattened = True  # as FSDP1 marks what it flattens, with and without use_orig_params
    PopRiskAdamW([parameter], gate=Gate(normalize=True))  # each process takes the means over its own part
    for gate in (Gate(granularity="row"), Gate(granularity="tensor")):
        with pytest.raises(HyperparameterError, match=r"got the flattened parts of FullyShardedDataParallel \(FSDP1\)"):
            PopRiskAdamW([parameter], gate=gate)


@pytest.mark.parametrize(("name", "saved", "here", "lost"), [
    ("gate", "soft", None, ("exp_var", "var_step")), ("alpha", "calibrated", 0.3, ("var_gain",)),
])  # fmt: skip
def test_a_state_that_lost_its_variance_is_refused(name, saved, here, lost):
    """dcp.load reads what the new optimizer has, and no more."""
    parameter = nn.Parameter(torch.ones(3))
    state = stepped(parameter, **{"gate": "soft", name: saved}).state_dict()
    second = PopRiskAdamW([parameter], **join_gate({"gate": "soft", name: here}))
    second.load_state_dict(copy.deepcopy(state))
    second = PopRiskAdamW([parameter], **join_gate({"gate": "soft", name: here}))
    for entry in lost:
        del state["state"][0][entry]
    with pytest.raises(StateDictError, match=f"saved with {name}='{saved}' and came without its {lost[-1]}"):
        second.load_state_dict(state)


def test_a_state_dict_says_dtypes_in_words():
    parameter = nn.Parameter(torch.ones(3))
    saved = stepped(parameter, state_dtype=torch.bfloat16).state_dict()
    assert saved["param_groups"][0]["state_dtype"] == {"v": "bfloat16", "s": "bfloat16"}
    fresh = PopRiskAdamW([parameter])
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["state_dtype"] == {"v": torch.bfloat16, "s": torch.bfloat16}
    assert fresh.state[parameter]["exp_var"].dtype == torch.bfloat16
    with pytest.raises(HyperparameterError, match="state_dtype must be"):
        PopRiskAdamW([parameter], state_dtype="float8")
