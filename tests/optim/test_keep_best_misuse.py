"""KeepBest and TailAverage with models that are copied and saved, and with arguments that do not belong together."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from poprisk import KeepBest, TailAverage
from poprisk.errors import HyperparameterError


def block(count=40):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def setting(loss=functional.cross_entropy, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, KeepBest(model, optimizer, block(), loss, **options)


def step(model, optimizer):
    x, y = block()
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [saved, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_can_be_copied_while_it_is_followed(duplicate):
    model, optimizer, keeper = setting(every=1)
    step(model, optimizer)
    other = duplicate(model)
    seen = keeper.state_dict()["budget"]["seen"]
    step(other, torch.optim.SGD(other.parameters(), lr=0.1))  # not counted
    assert keeper.state_dict()["budget"]["seen"] == seen == 40
    step(model, optimizer)
    assert keeper.state_dict()["budget"]["seen"] == 80
    assert keeper.steps == 2
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))


def test_a_copy_of_the_model_does_not_keep_the_keeper():
    model, optimizer, keeper = setting()
    other, gone = copy.deepcopy(model), weakref.ref(keeper)
    del optimizer, keeper
    gc.collect()
    assert gone() is None
    assert other(block()[0]).shape == model(block()[0]).shape == (40, 2)


def test_a_second_finish_leaves_the_model_alone():
    model, optimizer, keeper = setting()
    step(model, optimizer)
    risk = keeper.finish()
    step(model, optimizer)
    weights = copy.deepcopy(model.state_dict())
    assert keeper.finish() is risk
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_an_optimizer_of_another_model_is_refused():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for make in (
        lambda: KeepBest(model, optimizer, block(), functional.cross_entropy),
        lambda: TailAverage(model, optimizer),
    ):
        with pytest.raises(HyperparameterError, match="none of its 2 parameters is one of the 2 trained parameters"):
            make()
    optimizer.add_param_group({"params": [model.bias]})  # some of them are enough
    TailAverage(nn.DataParallel(model), optimizer)
    flat = torch.zeros(8, requires_grad=True)  # a flattened copy, as of a wrapper that shards
    TailAverage(model, torch.optim.SGD([flat], lr=0.1))


def test_a_replaced_optimizer_is_reported():
    model, optimizer, keeper = setting()
    for _ in range(3):
        step(model, optimizer)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        step(model, other)
    assert "160 examples were trained on without a step of this optimizer" in keeper.finish().reason
    model, optimizer, keeper = setting()
    step(model, optimizer)
    step(model, other)  # a last batch without a step, as gradient accumulation may leave
    assert keeper.finish().reason == "step 1 of 1, chosen among 1 measurement"
