"""Every recorded step, rebuilt from what was recorded and the batch's own gradient, is the step that was taken."""

from functools import partial

import pytest
import torch
from tiny_problems import classification, regression, tied
from torch import nn
from torch.optim import SGD, Adam, AdamW

from poprisk.errors import RunError
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.runs._linearize import optimizer_name
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._training import train

EXACT = 1e-12  # relative, float64

OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.3),
    "sgd decay": partial(SGD, lr=0.3, weight_decay=0.1),
    "sgd momentum": partial(SGD, lr=0.1, momentum=0.9),
    "sgd momentum dampening decay": partial(SGD, lr=0.1, momentum=0.8, dampening=0.3, weight_decay=0.05),
    "sgd nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd nesterov decay foreach": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True),
    "sgd nesterov foreach": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "sgd fused": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, fused=True),
    "sgd tensor lr": partial(SGD, lr=torch.tensor(0.125), momentum=0.9),
    "adam": partial(Adam, lr=0.05),
    "adam decay": partial(Adam, lr=0.05, weight_decay=0.1),
    "adam amsgrad": partial(Adam, lr=0.05, amsgrad=True, weight_decay=0.1),
    "adam decay foreach": partial(Adam, lr=0.05, weight_decay=0.1, foreach=True),
    "adam fused": partial(Adam, lr=0.05, weight_decay=0.1, fused=True),
    "adamw": partial(AdamW, lr=0.05, weight_decay=0.2),
    "adamw loop": partial(AdamW, lr=0.05, weight_decay=0.2, foreach=False),
    "adamw foreach": partial(AdamW, lr=0.05, weight_decay=0.2, foreach=True),
    "adamw fused": partial(AdamW, lr=0.05, weight_decay=0.2, fused=True),
    "poprisk soft": partial(
        PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha=0.1, normalize=False), weight_decay=0.01, lr=0.05
    ),
    "poprisk hard": partial(PopRiskAdamW, weight_decay=0.01, lr=0.05, gate=Gate("hard", alpha=0.1, normalize=False)),
    "poprisk snr": partial(PopRiskAdamW, gate=Gate("snr", strength=1.0, normalize=False), weight_decay=0.01, lr=0.05),
    "poprisk calibrated": partial(
        PopRiskAdamW,
        gate=Gate("soft", strength=1.0, alpha="calibrated", centering="corrected", normalize=False),
        weight_decay=0.01,
        lr=0.05,
    ),
    "poprisk gated decay rows": partial(
        PopRiskAdamW,
        gate=Gate("soft", strength=1.0, alpha=0.1, gated_decay=True, granularity="row", normalize=False),
        weight_decay=0.01,
        lr=0.05,
    ),
    "poprisk shared": partial(
        PopRiskAdamW,
        gate=Gate("soft", strength=1.0, alpha=0.1, rho=0.9, normalize=False),
        weight_decay=0.01,
        lr=0.05,
        state="shared",
        betas=(0.9, 0.9),
    ),
    "poprisk default": partial(PopRiskAdamW, lr=0.05),
    "poprisk relative hard": partial(PopRiskAdamW, gate=Gate("hard", alpha=0.1), lr=0.05),
    "poprisk relative decay rows": partial(
        PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha=0.1, gated_decay=True, granularity="row"), lr=0.05
    ),
    "poprisk relative shared": partial(
        PopRiskAdamW, gate=Gate("snr", rho=0.9, warmup_steps=2), lr=0.05, state="shared", betas=(0.9, 0.9)
    ),
    "poprisk no gate": partial(PopRiskAdamW, weight_decay=0.01, lr=0.05, gate=None),
    "poprisk foreach": partial(
        PopRiskAdamW,
        gate=Gate("soft", strength=1.0, alpha=0.1, normalize=True),
        weight_decay=0.01,
        lr=0.05,
        foreach=True,
    ),
}


def record(
    problem, make_optimizer, *, steps=6, batch=4, parts=1, clip=None, scale=1.0, groups=None, every=1, criterion=None
):
    """A loop as a user writes it: nothing of ours in it but the recorder."""
    model = problem.module(torch.float64)
    optimizer = make_optimizer(model.parameters() if groups is None else groups(model))
    generator = torch.Generator().manual_seed(5)
    criterion = criterion or (nn.CrossEntropyLoss() if problem.loss == "cross_entropy" else half_squares)
    recorder = Recorder(None, model, optimizer, problem=problem, every=every)
    for _ in range(steps):
        pieces = torch.randperm(len(problem), generator=generator)[:batch].chunk(parts)
        with recorder.step(list(pieces), loss_scale=scale) as step:
            optimizer.zero_grad()
            for piece in pieces:
                loss = criterion(model(problem.inputs[piece]), problem.targets[piece])
                (scale * loss / parts).backward()
            step.loss = loss
            if scale != 1.0:
                for p in model.parameters():
                    p.grad.mul_(1 / scale)
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return recorder.close(), model


def half_squares(outputs, targets):
    return 0.5 * (outputs - targets).square().sum(1).mean()


def assert_every_step_is_rebuilt(run, problem, tolerance=EXACT):
    model = problem.model(torch.float64)
    for k in range(run.num_steps):
        step, w = run.step(k), run.weights(k)
        inputs, targets = problem.batch(step.batch, dtype=torch.float64)
        gradients = model.per_example_gradients(w, inputs, targets)
        f = (step.selection / len(problem)) @ gradients + step.coupled_decay * w
        v = step.momentum * run.buffer(k) + step.new_gradient * f
        moved = -step.preconditioner * (step.buffer_share * v + step.direct_share * f) - step.decay * w + step.source
        actual = run.weights(k + 1) - w
        assert (moved - actual).norm() <= tolerance * actual.norm() + 1e-15 * w.norm()
        if torch.as_tensor(step.momentum).any():
            torch.testing.assert_close(
                v * (torch.as_tensor(step.momentum) > 0), run.buffer(k + 1), rtol=1e-9, atol=1e-15
            )
        assert isinstance(step.source, float)
        assert step.source == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_minibatch_steps(name):
    problem = classification()
    run, model = record(problem, OPTIMIZERS[name])
    assert_every_step_is_rebuilt(run, problem)
    final = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    assert torch.equal(run.weights(6), final)
    assert (run.weights(6) - run.weights(0)).norm() > 1e-3


@pytest.mark.parametrize("name", ["sgd momentum", "sgd nesterov", "adam decay", "adamw", "poprisk soft"])
def test_clipped_accumulated_and_scaled(name):
    problem = regression()
    run, _ = record(problem, OPTIMIZERS[name], parts=2, clip=0.05, scale=1024.0)
    assert_every_step_is_rebuilt(run, problem)
    plain = len(problem) / 4
    assert all(bool((run.step(k).selection < 0.9 * plain).all()) for k in range(6))  # clipping really happened


@pytest.mark.parametrize("name", ["sgd", "sgd momentum dampening decay", "adam", "adamw", "poprisk gated decay rows"])
def test_two_groups_and_shared_weights(name):
    problem = tied()

    def groups(model):
        own = {"lr": 0.02, "weight_decay": 0.3}
        return [
            {"params": list(model.head.parameters()), **own},
            {"params": [p for n, p in model.named_parameters() if p.requires_grad and n[:4] != "head"]},
        ]

    run, model = record(problem, OPTIMIZERS[name], groups=groups)
    assert_every_step_is_rebuilt(run, problem)
    assert run.num_weights == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert run.layout.groups[-1] != run.layout.groups[0]


def test_groups_with_and_without_momentum():
    problem = classification()

    def groups(model):
        return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "momentum": 0.0}]

    run, _ = record(problem, partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1), groups=groups)
    assert_every_step_is_rebuilt(run, problem)
    assert not run.buffer(3)[-21:].any()


def test_momentum_switched_on_by_a_schedule():
    problem = classification()
    model = problem.module()
    model.double()
    optimizer = SGD(model.parameters(), lr=0.1)
    recorder = Recorder(None, model, optimizer, problem=problem)
    for k in range(4):
        optimizer.param_groups[0]["momentum"] = 0.5 if k >= 2 else 0.0
        optimizer.param_groups[0]["lr"] = 0.1 / (k + 1)
        with recorder.step(torch.arange(12)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(problem.inputs), problem.targets).backward()
            optimizer.step()
    run = recorder.close()
    assert_every_step_is_rebuilt(run, problem)
    assert [run.step(k).momentum for k in range(4)] == [0.0, 0.0, 0.5, 0.5]
    assert [run.options(k)[0]["lr"] for k in range(4)] == [0.1 / (k + 1) for k in range(4)]


def test_whatever_else_moves_the_weights_is_the_source():
    problem = classification()
    model = problem.module(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1)
    recorder = Recorder(None, model, optimizer, problem=problem)
    with recorder.step(torch.arange(12)):
        nn.functional.cross_entropy(model(problem.inputs), problem.targets).backward()
        optimizer.step()
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
    run = recorder.close()
    step, w = run.step(0), run.weights(0)
    f = problem.model(torch.float64).per_example_gradients(w, problem.inputs, problem.targets).mean(0)
    torch.testing.assert_close(w - step.preconditioner * f + step.source, run.weights(1), rtol=1e-13, atol=1e-15)
    assert step.source.abs().max() > 0.1
    assert not step.source[24:].abs().max() > 1e-15


@pytest.mark.parametrize("seed", [0, 2, 7])
def test_a_gate_that_is_nearly_closed_is_not_taken_for_something_else_that_moves_the_weights(seed):
    """Biases start at zero, where nothing but the gate's own rounding is left of a step."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 6, generator=generator), torch.randint(0, 2, (60,), generator=generator)

    def network():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 300), nn.LayerNorm(300), nn.GELU(), nn.Linear(300, 2))

    paper = partial(PopRiskAdamW, lr=0.01, gate=Gate.paper())
    run = train(Problem(network, "cross_entropy", x, y), paper, 6, batch_size=20, progress=False)
    assert [run.step(k).source for k in range(6)] == [0.0] * 6


def test_recording_starts_in_the_middle_of_a_training():
    problem = classification()
    model = problem.module(torch.float64)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)

    def one_step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(problem.inputs), problem.targets).backward()
        optimizer.step()

    one_step()
    recorder = Recorder(None, model, optimizer, problem=problem)
    with recorder.step(torch.arange(12)):
        one_step()
    run = recorder.close()
    assert run.buffer(0).norm() > 0
    assert run.step(0).new_gradient == 0.5
    assert_every_step_is_rebuilt(run, problem)


def test_other_optimizers_are_refused_by_name():
    w = [torch.zeros(1, requires_grad=True)]
    for optimizer in (torch.optim.RMSprop(w), torch.optim.NAdam(w), type("MySGD", (SGD,), {})(w)):
        with pytest.raises(RunError, match=f"{type(optimizer).__name__} cannot be recorded.*torch.optim.SGD"):
            optimizer_name(optimizer)
    with pytest.raises(RunError, match="maximize=True cannot be recorded"):
        optimizer_name(Adam(w, maximize=True))
    with pytest.raises(RunError, match="differentiable=True"):
        optimizer_name(SGD(w, differentiable=True))
    with pytest.raises(RunError, match="signal='batch' has no linearization"):
        optimizer_name(PopRiskAdamW(w, gate=Gate(signal="batch")))
