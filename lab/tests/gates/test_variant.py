"""The variants as a torch optimizer: equal to the comparison engine's trainings, resumable, refusing what cannot be."""

import copy
from dataclasses import replace

import pytest
import torch

from poprisk._core.seeds import stream
from poprisk.cli._demonstration.training import epoch_batches
from poprisk.errors import GradientError, HyperparameterError
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.stack import Member, Stack
from poprisk_lab.gates.optimizer import VariantAdamW
from poprisk_lab.gates.plan import SMOKE
from poprisk_lab.gates.variants import NEED_HALVES, VARIANTS

CPU = torch.device("cpu")
PLAIN = [name for name in VARIANTS if name not in NEED_HALVES]


@pytest.mark.parametrize("name", ["agreement_after_first_pass", "latched_agreement", "hysteresis", "pass_agreement"])
def test_it_is_the_training_of_the_study(name):
    bench = next(b for b in SMOKE.benches() if b.task.name == "teacher_40")
    task = replace(bench.task, steps=20)
    hyper = ARMS[name].hyper({"lr": 0.01, "gate_warmup": bench.pass_steps})
    stack = Stack(task, [Member(ARMS[name], hyper, 0)], CPU)
    wanted = stack.layout.views(stack.train().weights)

    weights = {key: value.clone().requires_grad_() for key, value in task.initial(0).items()}
    optimizer = VariantAdamW(weights.values(), lr=0.01, variant=name, steps_per_pass=bench.pass_steps)
    cohort, ((name, (count, size)),) = task.cohort([0], CPU), task.streams.items()
    batches = epoch_batches(count, size, [stream(0, f"batches:{name}")])
    for _ in range(task.steps):
        optimizer.zero_grad()
        cohort.losses({key: w[None] for key, w in weights.items()}, {name: next(batches)}).sum().backward()
        optimizer.step()
    for key, w in weights.items():
        torch.testing.assert_close(w.detach(), wanted[key][0].detach(), rtol=1e-4, atol=1e-6)


def steps(model, optimizer, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(8, 3, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("name", PLAIN)
def test_every_variant_trains_and_resumes_exactly(name, tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    start = copy.deepcopy(model.state_dict())
    optimizer = VariantAdamW(model.parameters(), lr=0.05, variant=name, steps_per_pass=4)
    steps(model, optimizer, 6)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    steps(model, optimizer, 6, seed=1)
    assert any(not torch.equal(start[key], value) for key, value in model.state_dict().items())

    other = copy.deepcopy(model)
    again = VariantAdamW(other.parameters(), lr=1.0, variant=name, steps_per_pass=4)
    half = torch.load(tmp_path / "half.pt")
    other.load_state_dict(half["model"])
    again.load_state_dict(half["optimizer"])
    steps(other, again, 6, seed=1)
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_groups_schedulers_and_parameters_without_a_gradient():
    used, unused, closure_loss = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True), []
    groups = [{"params": [used]}, {"params": [unused], "lr": 0.5}]
    optimizer = VariantAdamW(groups, lr=0.1, steps_per_pass=10, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)

    def closure():
        optimizer.zero_grad()
        loss = used.sum()
        loss.backward()
        closure_loss.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == closure_loss[0] == 3.0
    torch.testing.assert_close(used.detach(), torch.full((3,), 0.9))
    scheduler.step()
    optimizer.step(closure)
    torch.testing.assert_close(used.detach(), torch.full((3,), 0.85))
    assert torch.equal(unused.detach(), torch.ones(2))
    assert unused not in optimizer.state


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"variant": "nonsense"}, "must be one of .*agreement_after_first_pass"),
        ({"variant": "held_apart"}, "compares the halves of a batch"),
        ({}, "give steps_per_pass"),
        ({"steps_per_pass": 0}, "steps_per_pass must be a finite number ≥ 1"),
        ({"steps_per_pass": 5, "lr": -1.0}, "lr must be"),
        ({"steps_per_pass": 5, "eps": 0.0}, "eps must be"),
        ({"steps_per_pass": 5, "betas": (0.9, 1.0)}, r"betas\[1\] must be"),
    ],
)
def test_refusals(options, words):
    with pytest.raises(HyperparameterError, match=words):
        VariantAdamW([torch.zeros(2, requires_grad=True)], **options)


def test_parameters_it_cannot_train_are_refused():
    with pytest.raises(GradientError, match="float32 or float64"):
        VariantAdamW([torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)], steps_per_pass=5)
    table = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = VariantAdamW(table.parameters(), steps_per_pass=5)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(GradientError, match="sparse=False"):
        optimizer.step()
