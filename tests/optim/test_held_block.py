"""What KeepBest can measure: arrays, datasets, problems, dictionaries, sequences; losses of single examples."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.data import Dataset, Subset, TensorDataset

from poprisk import Problem, hold_back
from poprisk.errors import DataError, HyperparameterError
from poprisk.optim._held_block import HeldBlock
from poprisk.optim._keep_best import KeepBest


def examples(count=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, generator=generator), torch.arange(count) % 3


class Pairs(Dataset):
    """Floats in double precision and classes as plain integers, as many datasets give them."""

    def __init__(self, x, y):
        self.inputs, self.targets = x, y

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, i):
        return self.inputs[i].double().numpy(), int(self.targets[i])


def kinds(x, y):
    from datasets import Dataset as Table

    return {
        "tensors": (x, y),
        "arrays": (x.double().numpy(), y.numpy().astype(np.int32)),
        "lists": (x.tolist(), y.tolist()),
        "list of tensors": (list(x), y.tolist()),
        "dataset": Pairs(x, y),
        "tensor dataset": TensorDataset(x, y),
        "part of a part": Subset(Subset(TensorDataset(x, y), range(40)), range(40)),
        "pairs": list(zip(x, y, strict=True)),
        "problem": Problem(nn.Linear, "cross_entropy", x, y, arguments={"in_features": 3, "out_features": 3}),
        "hugging face": Table.from_dict({"input": x.tolist(), "label": y.tolist()}),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", list(kinds(*examples())))
def test_every_kind_of_data_is_measured(kind, dtype):
    x, y = examples()
    data = kinds(x, y)[kind]
    _, held = hold_back(data, 0.5, labels=y)
    model = nn.Linear(3, 3).to(dtype)
    losses, scores, *_ = HeldBlock(held, functional.cross_entropy, None).measure(model, 7)
    _, (own_x, own_y) = hold_back((x, y), 0.5)
    outputs = model(own_x.to(dtype))
    assert_close(losses, functional.cross_entropy(outputs, own_y, reduction="none").float())
    assert_close(scores, (outputs.argmax(1) != own_y).float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = KeepBest(model, optimizer, held, functional.cross_entropy, every=2)
    for _ in range(4):
        optimizer.zero_grad()
        functional.cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()
    assert keeper.finish().valid


def test_a_problem_brings_its_loss():
    x, y = examples()
    held = kinds(x, y)["problem"]
    model = nn.Linear(3, 3)
    losses, *_ = HeldBlock(held, None, None).measure(model, 16)
    assert_close(losses, functional.cross_entropy(model(x), y, reduction="none"))


def test_several_inputs_and_numpy_targets():
    x = np.random.default_rng(0).normal(size=(12, 2))
    model = nn.Bilinear(2, 2, 1)
    losses, scores, *_ = HeldBlock((x, -x, x[:, :1]), functional.mse_loss, None).measure(model, 5)
    inputs = torch.from_numpy(x).float()
    assert_close(losses, (model(inputs, -inputs) - inputs[:, :1]).square().squeeze(1))
    assert scores is losses


def sequences(count=24, length=6, classes=5):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(classes, (count, length), generator=generator)
    targets = tokens.roll(-1, 1)
    for i in range(count):
        targets[i, 1 + i % length :] = -100
    return tokens, targets


LOSSES = {
    "flattened": (lambda o, t: functional.cross_entropy(o.flatten(0, 1), t.flatten()), False),
    "classes second": (functional.cross_entropy, True),
    "module": (nn.CrossEntropyLoss(), True),
    "control flow": (lambda o, t: functional.cross_entropy(o[t != -100], t[t != -100]), False),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("batch_size", [5, 24])
def test_tokens_that_are_not_ignored_are_averaged(name, batch_size):
    loss, second = LOSSES[name]
    tokens, targets = sequences()
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    forward = nn.Sequential(model, Turned()) if second else model
    losses, scores, *_ = HeldBlock((tokens, targets), loss, None).measure(forward, batch_size)
    assert scores is losses  # the accuracy of tokens is not chosen by mistake
    assert losses.shape == (24,)
    whole = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    assert_close(losses.mean(), whole.detach())


class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Causal(nn.Module):
    """Returns its loss and logits, as language models of transformers do; the next token is the target."""

    def __init__(self, shift=True, extra=0.0):
        super().__init__()
        self.net, self.shift, self.extra = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5)), shift, extra

    def forward(self, input_ids, labels=None):
        logits = self.net(input_ids)
        o, t = (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)
        loss = functional.cross_entropy(o.flatten(0, 1), t.flatten()) + self.extra
        return SimpleNamespace(loss=loss, logits=logits)


class Texts(Dataset):
    def __init__(self, count=48):
        self.tokens, self.labels = sequences(count)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        labels = self.labels[i].clone()
        labels[1] = 0  # at least one target after a shift
        return {"input_ids": self.tokens[i], "labels": labels, "text": "left out"}


@pytest.mark.parametrize("shift", [True, False])
def test_a_model_that_returns_its_loss_needs_none(shift):
    data, model = Texts(), Causal(shift)
    block = HeldBlock(data, None, None)
    losses, scores, *_ = block.measure(model, 10)
    assert not block.by_batch
    assert len(losses) == 48
    assert scores is losses
    labels = torch.stack([data[i]["labels"] for i in range(48)])
    assert_close(losses.mean(), model(data.tokens, labels).loss.detach())


def test_the_mean_loss_of_batches_where_no_more_is_known():
    data, model = Texts(), Causal(extra=1.0)
    block = HeldBlock(data, None, None)
    losses, *_ = block.measure(model, 10)
    assert block.by_batch
    assert len(losses) == 16
    again, *_ = block.measure(model, 10)
    assert torch.equal(losses, again)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = KeepBest(model, optimizer, data, every=1)
    labels = torch.stack([data[i]["labels"] for i in range(48)])
    model(data.tokens, labels).loss.backward()
    optimizer.step()
    risk = keeper.finish()
    assert risk.valid
    assert "tells only the mean loss of a batch, so 16 batches" in risk.reason


class Classifier(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.net, self.classes = nn.Linear(3, classes), classes

    def forward(self, x, labels=None):
        logits = self.net(x)
        if self.classes == 1:
            return {"loss": functional.mse_loss(logits.squeeze(1), labels), "logits": logits}
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def test_classes_and_numbers_of_a_model_that_returns_its_loss():
    x, y = examples()
    model = Classifier(3)
    losses, scores, *_ = HeldBlock([{"x": a, "label": b} for a, b in zip(x, y, strict=True)], None, None).measure(
        model, 9
    )
    assert_close(losses.mean(), model(x, y)["loss"].detach())
    assert set(scores.tolist()) == {0.0, 1.0}
    model = Classifier(1)
    rows = [{"x": a, "labels": float(b)} for a, b in zip(x, y, strict=True)]
    losses, scores, *_ = HeldBlock(rows, None, None).measure(model, 9)
    assert_close(losses.mean(), model(x, y.float())["loss"].detach())
    assert scores is losses


@pytest.mark.parametrize("metric", [None, "loss", "probability"])
@pytest.mark.parametrize(
    "loss",
    [
        functional.cross_entropy,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5])),
        lambda outputs, targets: 2 * functional.cross_entropy(outputs, targets),  # without an option for reduction
    ],
)
def test_labels_that_are_ignored_are_left_out(loss, metric):
    """A label of -100 has no loss, and is no error."""
    x, y = examples()
    some = y.clone()
    some[::4] = -100
    model = nn.Linear(3, 3)
    kept = some != -100
    found = HeldBlock((x, some), loss, metric).measure(model, 16)
    expected = HeldBlock((x[kept], y[kept]), loss, metric).measure(model, 16)
    assert_close(found, expected)
    assert_close(found[0].mean(), loss(model(x), some).detach())
    with pytest.raises(DataError, match="labels of all held-back examples are ignored"):
        HeldBlock((x, torch.full_like(y, -100)), loss, metric).measure(model, 16)


def test_whole_numbers_that_are_no_classes_are_not_ignored():
    x, y = torch.randn(12, 3), torch.arange(12)
    y[3] = -100
    model, loss = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), lambda o, t: (o - t).square().mean()
    losses, *_ = HeldBlock((x, y), loss, None).measure(model, 5)
    assert len(losses) == 12
    assert_close(losses.mean(), loss(model(x), y).detach())


def test_what_cannot_be_measured():
    x, y = examples()
    with pytest.raises(HyperparameterError, match="needs the loss"):
        HeldBlock((x, y), None, None)
    with pytest.raises(DataError, match="without a loss"):
        HeldBlock(TensorDataset(x, y), None, None).measure(nn.Linear(3, 3), 8)
    with pytest.raises(DataError, match="one row of class scores"):
        HeldBlock((x, x), functional.mse_loss, "accuracy").measure(nn.Linear(3, 3), 8)
    with pytest.raises(DataError, match="must be a tensor"):
        HeldBlock([(x[0], "a"), (x[1], "b")], functional.mse_loss, None).measure(nn.Linear(3, 3), 8)
