"""hold_back: sizes, strata, seeds, and every kind of data it takes."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from poprisk.errors import DataError
from poprisk.optim._hold_back import hold_back


class Numbered(Dataset):
    def __init__(self, count, targets=None):
        self.count, self.read = count, 0
        if targets is not None:
            self.targets = targets

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        self.read += 1
        return index, index % 3


def test_every_example_is_in_one_part():
    data = Numbered(101)
    train, held = hold_back(data, 0.1, seed=3)
    assert isinstance(train, Subset)
    assert len(held) == 10
    assert sorted([*train.indices, *held.indices]) == list(range(101))
    assert data.read == 0


def test_the_seed_decides():
    parts = [hold_back(Numbered(100), seed=seed)[1].indices for seed in (0, 0, 1)]
    assert parts[0] == parts[1] != parts[2]


@pytest.mark.parametrize("kind", ["tuple", "arrays", "tensors", "targets", "subset"])
def test_classes_keep_their_shares(kind):
    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    inputs = torch.arange(100.0)
    data = {
        "tuple": (inputs, labels),
        "arrays": (inputs.numpy(), labels.numpy()),
        "tensors": TensorDataset(inputs, labels),
        "targets": Numbered(100, labels.tolist()),
        "subset": Subset(TensorDataset(inputs, labels), list(range(100))),
    }[kind]
    _, held = hold_back(data, 0.1)
    index = held.indices if isinstance(held, Subset) else np.asarray(held[0]).astype(int).tolist()
    assert labels[index].bincount().tolist() == [6, 3, 1]


def test_numbers_are_not_classes():
    _, (_, targets) = hold_back((torch.arange(40.0), torch.randn(40)), 0.25)
    assert len(targets) == 10


def test_nothing_held_back():
    data = (torch.zeros(3), torch.zeros(3))
    assert hold_back(data, 0) == (data, None)


@pytest.mark.parametrize("share", [-0.1, 1.0, True, "a tenth"])
def test_shares_out_of_range(share):
    with pytest.raises(DataError, match="share must be"):
        hold_back(Numbered(10), share)


def test_what_cannot_be_split():
    with pytest.raises(DataError, match="must have a length"):
        hold_back(iter([1, 2]))
    with pytest.raises(DataError, match="one length"):
        hold_back((torch.zeros(3), torch.zeros(4)))
    with pytest.raises(DataError, match="at least 2"):
        hold_back(Numbered(1))
    with pytest.raises(DataError, match="one entry for each"):
        hold_back(Numbered(10), labels=[0, 1])
