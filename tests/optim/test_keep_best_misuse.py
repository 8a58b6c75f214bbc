"""KeepBest and TailAverage with models that are copied and saved, and with arguments that do not belong together."""

import copy
import gc
import io
import pickle
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from poprisk import KeepBest, TailAverage
from poprisk.errors import DataError, HyperparameterError, StateDictError


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


def test_arguments_that_do_not_fit_are_refused():
    x, y = block()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = functional.cross_entropy
    with pytest.raises(DataError, match=r"one length, got \[40, 30\]"):
        KeepBest(model, optimizer, (x, y[:30]), loss)
    for held in (DataLoader(TensorDataset(x, y)), zip(x, y, strict=True), {"train": (x, y)}, [x, y]):
        with pytest.raises(DataError, match="pass"):
            KeepBest(model, optimizer, held, loss)
    for wrong in (nn.CrossEntropyLoss, "cross_entropy"):
        with pytest.raises(HyperparameterError, match="loss must be a function"):
            KeepBest(model, optimizer, (x, y), wrong)
    for make in (KeepBest, TailAverage):
        with pytest.raises(HyperparameterError, match="in this order, got SGD and Linear"):
            make(optimizer, model, *([(x, y), loss] if make is KeepBest else []))
    for every in (2.5, True, x):
        with pytest.raises(HyperparameterError, match="every must be a whole number") as caught:
            KeepBest(model, optimizer, (x, y), loss, every=every)
        assert len(str(caught.value)) < 100


def test_a_state_of_something_else_is_refused():
    model, optimizer, keeper = setting(every=1)
    for state in (model.state_dict(), None, {}):
        with pytest.raises(StateDictError, match=r"expected what KeepBest.state_dict\(\) returned"):
            keeper.load_state_dict(state)
    with pytest.raises(StateDictError, match="names, steps, tails missing"):
        TailAverage(model, optimizer).load_state_dict({"means": []})
    step(model, optimizer)
    state = keeper.state_dict()
    smaller = KeepBest(model, optimizer, block(30), functional.cross_entropy, every=1)
    with pytest.raises(StateDictError, match="has 30 held-back examples, and the state was saved with 40"):
        smaller.load_state_dict(state)


@pytest.mark.parametrize("kind", ["entropy", "likelihood", "partial", "smoothed", "ignored"])
def test_weights_of_classes_keep_the_scale_of_the_loss(kind):
    weight = torch.tensor([1.0, 7.0])
    loss = {
        "entropy": nn.CrossEntropyLoss(weight=weight),
        "likelihood": nn.NLLLoss(weight=weight),
        "partial": partial(functional.cross_entropy, weight=weight),
        "smoothed": nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1),
        "ignored": nn.CrossEntropyLoss(weight=weight, ignore_index=2),
    }[kind]
    x, y = block()
    if kind == "ignored":
        y[:5] = 2
    model = nn.Sequential(nn.Linear(3, 2), nn.LogSoftmax(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = KeepBest(model, optimizer, (x, y), loss, average=None, every=1000)
    loss(model(x), y).backward()
    optimizer.step()
    risk = keeper.finish()
    assert risk.measured == 1
    assert_close(risk.value, loss(model(x), y).item(), rtol=1e-5, atol=0)


def test_weights_of_classes_of_tokens():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 7.0]))
    x, y = torch.randn(12, 2, 4), torch.arange(48).reshape(12, 4) % 2
    y[3, 1:] = -100
    model = nn.Sequential(nn.Identity(), nn.Linear(4, 4))
    keeper = KeepBest(model, torch.optim.SGD(model.parameters(), lr=0.1), (x, y), loss, average=None)
    assert_close(keeper.finish().value, loss(model(x), y).item(), rtol=1e-5, atol=0)
