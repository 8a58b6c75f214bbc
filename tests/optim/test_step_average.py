"""Means that the fused kernel moves in its own pass: the same as a hook's, whatever happens between the steps."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from poprisk.optim import PopRiskAdamW, TailAverage, _tail_average

GATES = [None, "snr", "hard"]


def small_model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(dtype)


def steps(model, optimizer, count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) if p.requires_grad else None
        optimizer.step()


@pytest.fixture
def moved_by_hook(monkeypatch):
    """The tensors that hooks have moved, by their address."""
    seen, original = [], _tail_average.move

    def move(means, current, weight):
        seen.extend(m.data_ptr() for m in means)
        original(means, current, weight)

    monkeypatch.setattr(_tail_average, "move", move)
    return seen


def means(average, which=0):
    return average.state_dict()["means"][which]


def check_alike(in_step, by_hook, moved_by_hook, *, exact=False):
    """The first average of parameters was never moved by the hook, and all means are the same."""
    count = in_step._tensors.trained
    assert not {m.data_ptr() for m in means(in_step)[:count]} & set(moved_by_hook)
    assert {m.data_ptr() for m in means(by_hook)} <= set(moved_by_hook)
    assert in_step.steps == by_hook.steps
    for which in range(len(in_step.tails)):
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-6, "atol": 1e-7}
        assert_close(means(in_step, which), means(by_hook, which), **tolerance)


@pytest.mark.parametrize("tail", [0.2, (0.1, 0.5)], ids=["one", "two"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_means_are_those_of_the_hook(gate, dtype, tail, moved_by_hook):
    model = small_model(dtype)
    optimizer = PopRiskAdamW(model.parameters(), lr=0.05, gate=gate, fused=True if gate is None else None)
    in_step, by_hook = (TailAverage(model, optimizer, tail=tail) for _ in range(2))
    steps(model, optimizer, 12)
    check_alike(in_step, by_hook, moved_by_hook)


def test_sixteen_bit_weights_are_averaged_as_they_are_stored(moved_by_hook):
    model = small_model(torch.bfloat16)
    optimizer = PopRiskAdamW(model.parameters(), lr=0.05, gate="snr")
    in_step, by_hook = (TailAverage(model, optimizer) for _ in range(2))
    steps(model, optimizer, 12)
    check_alike(in_step, by_hook, moved_by_hook)


@pytest.mark.parametrize("gate", GATES)
def test_training_is_that_without_an_average(gate):
    followed, alone = small_model(), small_model()
    optimizers = [PopRiskAdamW(m.parameters(), lr=0.05, gate=gate) for m in (followed, alone)]
    TailAverage(followed, optimizers[0])
    for model, optimizer in zip((followed, alone), optimizers, strict=True):
        steps(model, optimizer, 12)
    assert_close(list(followed.parameters()), list(alone.parameters()), rtol=0, atol=0)


def test_several_groups_frozen_and_idle_parameters(moved_by_hook):
    """A parameter that is frozen at first, one that never has a gradient, and a group that opts out of the gate."""
    model = small_model()
    groups = [
        {"params": list(model[0].parameters())},
        {"params": list(model[1].parameters()), "gate": None, "fused": True},
    ]
    optimizer = PopRiskAdamW([*groups, {"params": list(model[2].parameters())}], lr=0.05)
    model[2].bias.requires_grad_(False)
    in_step, by_hook = (TailAverage(model, optimizer) for _ in range(2))
    steps(model, optimizer, 4)
    check_alike(in_step, by_hook, moved_by_hook)
    model[2].bias.requires_grad_(True)
    steps(model, optimizer, 4, seed=1)
    check_alike(in_step, by_hook, moved_by_hook)
    for p in model.parameters():
        p.grad = None
    model[0].weight.grad = torch.ones_like(model[0].weight)
    optimizer.step()  # the others stand still, and their means come closer
    assert_close(means(in_step), means(by_hook), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}], ids=["foreach", "forloop"])
def test_where_no_kernel_steps_the_hook_moves_everything(options, moved_by_hook):
    model = small_model()
    optimizer = PopRiskAdamW(model.parameters(), lr=0.05, **options)
    average = TailAverage(model, optimizer)
    steps(model, optimizer, 3)
    assert {m.data_ptr() for m in means(average)} <= set(moved_by_hook)


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_an_overflow_that_the_step_skips_does_not_count(overflow):
    model = small_model()
    optimizer = PopRiskAdamW(model.parameters(), lr=0.05, fused=True)
    in_step, by_hook = (TailAverage(model, optimizer) for _ in range(2))
    steps(model, optimizer, 3)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(overflow)  # as GradScaler does
    before = copy.deepcopy(model.state_dict())
    steps(model, optimizer, 1, seed=1)
    del optimizer.grad_scale, optimizer.found_inf
    assert torch.equal(before["0.weight"], model.state_dict()["0.weight"]) == bool(overflow)
    steps(model, optimizer, 2, seed=2)
    assert in_step.steps == by_hook.steps == 6 - bool(overflow)
    assert_close(means(in_step), means(by_hook), rtol=1e-6, atol=1e-7)


def test_resuming_gives_the_same_bits():
    model = small_model()
    optimizer = PopRiskAdamW(model.parameters(), lr=0.05)
    average = TailAverage(model, optimizer)
    steps(model, optimizer, 5)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), average.state_dict()))
    steps(model, optimizer, 4, seed=1)
    again = small_model()
    other = PopRiskAdamW(again.parameters(), lr=0.05)
    resumed = TailAverage(again, other)
    steps(again, other, 2, seed=3)  # its own steps are forgotten
    for each, state in zip((again, other, resumed), saved, strict=True):
        each.load_state_dict(state)
    steps(again, other, 4, seed=1)
    assert_close(means(resumed), means(average), rtol=0, atol=0)
    assert_close(list(again.parameters()), list(model.parameters()), rtol=0, atol=0)


def test_a_closed_average_stands_still_and_another_takes_its_place(moved_by_hook):
    model = small_model()
    optimizer = PopRiskAdamW(model.parameters(), lr=0.05)
    first = TailAverage(model, optimizer)
    steps(model, optimizer, 3)
    first.close()
    before = [m.clone() for m in means(first)]
    second, by_hook = (TailAverage(model, optimizer) for _ in range(2))
    steps(model, optimizer, 3, seed=1)
    assert_close(means(first), before, rtol=0, atol=0)
    check_alike(second, by_hook, moved_by_hook)


def test_what_earlier_hooks_do_to_the_weights_is_averaged():
    model = small_model()
    optimizer = PopRiskAdamW(model.parameters(), lr=0.5)

    def clamp(*_):
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.125, 0.125)

    clamp()
    optimizer.register_step_post_hook(clamp)
    average = TailAverage(model, optimizer, buffers="copy")
    steps(model, optimizer, 6)
    assert all(m.abs().max() <= 0.125 for m in means(average))


def test_without_a_gate_it_is_torch_s_adamw_bit_for_bit():
    ours, theirs = small_model(), small_model()
    optimizer = PopRiskAdamW(ours.parameters(), lr=0.05, gate=None)
    TailAverage(ours, optimizer)
    steps(ours, optimizer, 12)
    steps(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.05), 12)
    assert_close(list(ours.parameters()), list(theirs.parameters()), rtol=0, atol=0)
