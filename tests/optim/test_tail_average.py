"""TailAverage against the definition: weights of each step, several tails, buffers, low precision, resume."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from poprisk import PopRiskAdamW
from poprisk.errors import HyperparameterError, RunError, StateDictError
from poprisk.optim._tail_average import TailAverage


def drift(model, optimizer, steps, seed=0):
    """Random gradients; the weights after each step."""
    generator = torch.Generator().manual_seed(seed)
    path = []
    for _ in range(steps):
        for each in model.parameters():
            each.grad = torch.randn(each.shape, generator=generator).to(each.dtype)
        optimizer.step()
        path.append(torch.cat([p.detach().flatten().double() for p in model.parameters()]))
    return torch.stack(path)


def weights_of_steps(tail, steps):
    """Written out from the recursion: step k keeps what later steps leave of it."""
    c = 1 / tail
    shares = [c / (t + c - 1) for t in range(1, steps + 1)]
    rest, found = 1.0, []
    for share in reversed(shares):
        found.append(rest * share)
        rest *= 1 - share
    return torch.tensor(found[::-1], dtype=torch.float64)


@pytest.mark.parametrize("tail", [1.0, 0.5, 0.1, 0.01])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_the_mean_has_the_weights_of_polynomial_decay(tail, make):
    model = nn.Linear(3, 2).double()
    optimizer = make(model.parameters(), lr=0.1)
    average = TailAverage(model, optimizer, tail=tail)
    path = drift(model, optimizer, 40)
    weights = weights_of_steps(tail, 40)
    assert_close(weights.sum(), torch.tensor(1.0, dtype=torch.float64))
    with average.swapped():
        found = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert_close(found, weights @ path)


def test_a_tail_of_one_is_the_mean_and_one_half_grows_linearly():
    assert_close(weights_of_steps(1.0, 7), torch.full((7,), 1 / 7, dtype=torch.float64))
    k = torch.arange(1, 8, dtype=torch.float64)
    assert_close(weights_of_steps(0.5, 7), k / k.sum())


def test_several_tails_are_those_of_one_at_a_time():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    several = TailAverage(model, optimizer, tail=(0.1, 0.5))
    single = [TailAverage(model, optimizer, tail=tail) for tail in (0.1, 0.5)]
    drift(model, optimizer, 20)
    for which, other in enumerate(single):
        with several.swapped(which):
            found = model.weight.clone()
        with other.swapped():
            assert torch.equal(found, model.weight)


def test_swapping_gives_the_weights_back_even_after_an_error():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = TailAverage(model, optimizer)
    drift(model, optimizer, 5)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(KeyError), average.swapped():
        raise KeyError
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("closed", [False, True])
def test_a_step_inside_of_the_block_is_refused(closed):
    """It would be lost when the weights come back."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    average = TailAverage(model, optimizer)
    drift(model, optimizer, 3)
    if closed:
        average.close()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    with (
        pytest.raises(RunError, match=r"optimizer.step\(\) was called inside `with average.swapped\(\):`"),
        average.swapped(),
    ):
        optimizer.step()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    optimizer.step()  # outside, it goes on
    assert average.steps == (3 if closed else 4)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("make", [torch.optim.AdamW, PopRiskAdamW])
def test_a_copy_has_the_average_and_stands_still(make, copied):
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1)
    average = TailAverage(model, optimizer)
    drift(model, optimizer, 3)
    before = [each.clone() for each in average.state_dict()["means"][0]]
    twin, twin_optimizer, other = copied((model, optimizer, average))
    drift(twin, twin_optimizer, 2)
    drift(model, optimizer, 2, seed=1)
    assert (average.steps, other.steps) == (5, 3)
    assert_close(other.state_dict()["means"][0], before, rtol=0, atol=0)
    with other.swapped():
        assert torch.equal(twin.weight, before[0])
    again = TailAverage(twin, twin_optimizer)
    again.load_state_dict(other.state_dict())
    drift(twin, twin_optimizer, 1)
    assert again.steps == 4


def test_training_does_not_notice():
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.load_state_dict(first.state_dict())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (first, second)]
    average = TailAverage(first, optimizers[0])
    drift(first, optimizers[0], 5)
    with average.swapped():
        pass
    drift(first, optimizers[0], 5, seed=1)
    drift(second, optimizers[1], 5)
    drift(second, optimizers[1], 5, seed=1)
    assert torch.equal(first.weight, second.weight)


def test_sixteen_bit_weights_are_averaged_in_float32():
    """A bfloat16 mean would stand still: one step in a thousand is below its rounding."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = TailAverage(model, optimizer, tail=1.0)
    for step in range(2000):
        with torch.no_grad():
            model.weight.fill_(float(step % 2))
        average.update()
    mean = average.state_dict()["means"][0][0]
    assert mean.dtype == torch.float32
    assert_close(mean.item(), 0.5, atol=1e-3, rtol=0)


@pytest.mark.parametrize("buffers", ["average", "copy"])
def test_statistics_of_batch_normalization(buffers):
    model = nn.BatchNorm1d(1, momentum=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    average = TailAverage(model, optimizer, tail=1.0, buffers=buffers)
    for value in (1.0, 2.0, 6.0):
        model(torch.tensor([[value - 1], [value + 1]])).sum().backward()
        optimizer.step()
    with average.swapped():
        found = model.running_mean.item()
        assert model.num_batches_tracked.item() == 3
    assert_close(found, 3.0 if buffers == "average" else 6.0)
    assert_close(model.running_mean.item(), 6.0)


def test_resuming_gives_the_same_bits():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = TailAverage(model, optimizer, tail=(0.1, 1.0))
    drift(model, optimizer, 7)
    saved = copy.deepcopy((model.state_dict(), average.state_dict()))
    drift(model, optimizer, 5, seed=1)
    again = nn.Linear(3, 2)
    again.load_state_dict(saved[0])
    other = torch.optim.SGD(again.parameters(), lr=0.1)
    resumed = TailAverage(again, other, tail=(0.1, 1.0))
    resumed.load_state_dict(saved[1])
    drift(again, other, 5, seed=1)
    assert resumed.steps == average.steps == 12
    for one, two in zip(average.state_dict()["means"], resumed.state_dict()["means"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_what_does_not_fit_is_refused():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tail in (0.0, 1.5, (), float("nan")):
        with pytest.raises(HyperparameterError, match="tail must be in"):
            TailAverage(model, optimizer, tail=tail)
    with pytest.raises(HyperparameterError, match="buffers must be"):
        TailAverage(model, optimizer, buffers="keep")
    with pytest.raises(HyperparameterError, match="no parameter"):
        TailAverage(nn.Linear(1, 1).requires_grad_(False), optimizer)
    state = TailAverage(model, optimizer, tail=0.5).state_dict()
    with pytest.raises(StateDictError, match="tails"):
        TailAverage(model, optimizer, tail=0.1).load_state_dict(state)
