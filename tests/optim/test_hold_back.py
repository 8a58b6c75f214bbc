"""hold_back: sizes, strata, seeds, and every kind of data it takes."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from poprisk import Problem, Run, train
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
    x, y = torch.zeros(50, 3), torch.zeros(50)
    for data, message in (
        ([x, y], "pass a tuple"),
        ({"x": x, "y": y}, "got dict: pass"),
        (DataLoader(TensorDataset(x, y)), "pass the dataset"),
        ({1, 2, 3}, "pass the dataset"),
    ):
        with pytest.raises(DataError, match=message):
            hold_back(data)
    with pytest.raises(DataError, match=r"got Tensor: use hold_back\(\(x, y\), 0.05\)"):
        hold_back(x, y)
    assert len(hold_back([x[0], x[1], x[2]], 0.4)[1]) == 1  # three examples


def problem(count=60, show=None):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 3, generator=generator)
    options = {"arguments": {"in_features": 3, "out_features": 3}, "test": (x[:5], torch.zeros(5, dtype=torch.long))}
    return Problem(torch.nn.Linear, "cross_entropy", x, torch.arange(count) % 3, show=show, **options)


def test_a_problem_is_split_and_keeps_its_test_set():
    whole = problem(show=lambda i: f"number {i}")
    rest, held = hold_back(whole, 0.1)
    assert (len(rest), len(held), len(whole)) == (54, 6, 60)
    assert held.targets.bincount().tolist() == [2, 2, 2]
    assert rest.test is whole.test
    assert held.test is None
    assert len({whole.fingerprint, rest.fingerprint, held.fingerprint}) == 3
    place = next(i for i in range(60) if torch.equal(whole.inputs[i], held.inputs[0]))
    assert held.show(0) == f"number {place}"


def test_a_run_of_the_rest_of_a_problem_is_opened_by_its_path(tmp_path):
    whole = Problem.build(problem, count=40)
    rest, held = hold_back(whole, 0.2)
    again = Problem.from_description(rest.description)
    assert torch.equal(again.targets, rest.targets)
    assert torch.equal(Problem.from_description(held.description).inputs, held.inputs)
    twice, _ = hold_back(rest, 0.25)
    assert Problem.from_description(twice.description).fingerprint == twice.fingerprint
    assert "splits" not in whole.description
    train(rest, torch.optim.SGD, steps=3, batch_size=8, path=tmp_path / "run", progress=False)
    assert len(Run.load(tmp_path / "run").problem) == 32


def test_a_problem_may_have_inputs_of_several_tensors():
    x = torch.arange(20.0).reshape(20, 1)
    data = Problem(
        torch.nn.Bilinear,
        "squared",
        (x, -x),
        x,
        arguments=dict.fromkeys(("in1_features", "in2_features", "out_features"), 1),
    )
    rest, held = hold_back(data, 0.25)
    assert len(rest) == 15
    assert torch.equal(held.inputs[0], -held.inputs[1])


def test_a_hugging_face_dataset_keeps_its_kind():
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": [[float(i)] for i in range(40)], "label": [i % 2 for i in range(40)]})
    rest, held = hold_back(data, 0.1)
    assert isinstance(rest, datasets.Dataset)
    assert sorted(held["label"]) == [0, 0, 1, 1]
    ragged = datasets.Dataset.from_dict({"labels": [[0] * (1 + i % 3) for i in range(40)]})
    assert len(hold_back(ragged, 0.1)[1]) == 4


def test_lists_tables_and_parts_of_parts():
    inputs, labels = [[float(i)] for i in range(20)], ["yes", "no"] * 10
    (rest, _), (held, names) = hold_back((inputs, labels), 0.2)
    assert isinstance(held, list)
    assert sorted(names) == ["no", "no", "yes", "yes"]
    assert len(rest) + len(held) == 20
    part = Subset(Subset(TensorDataset(torch.arange(40), torch.arange(40) % 2), range(0, 40, 2)), range(10))
    assert len(hold_back(part, 0.2)[1]) == 2
    pairs = list(zip(inputs, labels, strict=True))
    assert hold_back(pairs, 0.2)[1][0] in pairs
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"a": range(20)}, index=range(100, 120))
    _, (rows, targets) = hold_back((table, table["a"] % 2), 0.2)
    assert (rows["a"] % 2).tolist() == targets.tolist()
    assert targets.sum() == 2
    rest, held = hold_back(table, 0.2)
    assert isinstance(held, pandas.DataFrame)
    assert sorted([*rest.index, *held.index]) == list(range(100, 120))
    assert len(held) == 4
