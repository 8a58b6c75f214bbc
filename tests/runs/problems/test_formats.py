# type: ignore  # the project checks the types of src and lab/src
"""Problems take what people have: NumPy arrays, datasets, loaders, losses as modules, a module itself."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from poprisk import Problem, RiskMeter, analyze, audit, population_risk, train
from poprisk.errors import DataError, HyperparameterError, PopRiskWarning

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(12) % 2
VALUES = X.sum(1, keepdim=True)


class Listed(Dataset):
    """Examples that are made one by one."""

    def __init__(self, transform=lambda x: x):
        self.transform = transform

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return self.transform(X[i]), int(CLASSES[i])


def linear(loss, *examples, out=2, **options):
    arguments = {"in_features": 3, "out_features": out}
    return Problem(nn.Linear, loss, *examples, arguments=arguments, **options)


@pytest.mark.parametrize(
    "examples",
    [
        (X.double().numpy(), CLASSES.int().numpy()),
        (X.tolist(), CLASSES.tolist()),
        (list(X), CLASSES.numpy().astype(np.uint8)),
        (X.numpy()[::-1][::-1], CLASSES.numpy()),
        (X.numpy().astype(">f4"), CLASSES.numpy().astype(">i8")),
        (TensorDataset(X, CLASSES),),
        (Listed(),),
        (DataLoader(Listed(), batch_size=5, shuffle=True, drop_last=True),),
    ],
    ids=["numpy", "lists", "tensors in a list", "strides", "big-endian", "tensor dataset", "dataset", "loader"],
)
def test_every_form_is_the_same_problem(examples):
    assert linear("cross_entropy", *examples).fingerprint == linear("cross_entropy", X, CLASSES).fingerprint


def test_a_table_and_a_test_set_in_any_form():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X.numpy(), columns=list("abc"))
    problem = linear("cross_entropy", table, pandas.Series(CLASSES.numpy()), test=Listed())
    assert torch.equal(problem.inputs, X)
    assert problem.test is not None
    assert torch.equal(problem.test[0], X)
    assert torch.equal(problem.test[1], CLASSES)
    assert torch.equal(linear("cross_entropy", X, CLASSES, test=(X.numpy(), CLASSES.numpy())).test[0], X)


def test_several_inputs_from_a_dataset():
    inputs, targets = (problem := linear("squared", TensorDataset(X, X, VALUES))).inputs, problem.targets
    assert isinstance(inputs, tuple)
    assert len(inputs) == 2
    assert torch.equal(targets, VALUES)


@pytest.mark.parametrize(
    ("loss", "targets", "batch"),
    [
        (nn.MSELoss(), torch.cat([VALUES, -VALUES], 1), F.mse_loss),
        (nn.L1Loss(), torch.cat([VALUES, -VALUES], 1), F.l1_loss),
        (nn.HuberLoss(delta=0.3), torch.cat([VALUES, -VALUES], 1), lambda u, y: F.huber_loss(u, y, delta=0.3)),
        (nn.CrossEntropyLoss(), CLASSES, F.cross_entropy),
        (
            nn.CrossEntropyLoss(label_smoothing=0.2),
            CLASSES,
            lambda u, y: F.cross_entropy(u, y, label_smoothing=0.2),
        ),
        (nn.CrossEntropyLoss(), F.one_hot(CLASSES).float(), F.cross_entropy),
    ],
    ids=["mse", "l1", "huber", "cross-entropy", "smoothed", "class probabilities"],
)
def test_a_loss_module_has_torchs_own_mean(loss, targets, batch):
    problem, outputs = linear(loss, X, targets), X[:, :2]
    even = torch.full((12,), 1 / 12)
    assert torch.allclose(problem.batch_loss(outputs, targets), batch(outputs, targets))
    assert torch.allclose(problem.batch_loss(outputs, targets, even), batch(outputs, targets))


def test_places_of_one_example_are_averaged():
    places = torch.arange(24).reshape(12, 2) % 3
    outputs = torch.randn(12, 3, 2, generator=torch.Generator().manual_seed(1))
    problem = Problem(nn.Identity, nn.CrossEntropyLoss(), outputs, places)
    assert torch.allclose(problem.batch_loss(outputs, places), F.cross_entropy(outputs, places))


def test_two_outcomes_are_the_logistic_loss():
    problem = linear(nn.BCEWithLogitsLoss(), X, CLASSES.float().unsqueeze(1), out=1)
    assert problem.loss == "logistic"
    expected = F.binary_cross_entropy_with_logits(X[:, :1], CLASSES.float().unsqueeze(1))
    assert torch.allclose(problem.batch_loss(X[:, :1], problem.targets), expected)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.MSELoss(reduction="sum"), "must have reduction='mean', got 'sum'"),
        (nn.CrossEntropyLoss(weight=torch.ones(2)), "class weights must be the mean of its examples' losses"),
    ],
)
def test_a_loss_that_is_no_mean_is_refused(loss, message):
    with pytest.raises(HyperparameterError, match=message):
        linear(loss, X, CLASSES)


def test_targets_are_not_broadcast():
    problem = linear(nn.MSELoss(), X, VALUES.squeeze(1), out=1)
    with pytest.raises(DataError, match=r"shape of one example's outputs, \[1\], got \[\]"):
        train(problem, torch.optim.SGD, steps=1, progress=False)


def test_a_module_is_copied_with_its_weights_and_left_alone():
    module = nn.Linear(3, 2)
    before = module.weight.detach().clone()
    problem = Problem(module, "cross_entropy", X, CLASSES)
    module.weight.data.zero_()
    run = train(problem, lambda p: torch.optim.SGD(p, lr=0.5), steps=3, progress=False)
    assert torch.equal(problem.module().weight, before)
    assert torch.equal(run.weights(0)[:6], before.flatten())
    assert not torch.equal(run.weights(3)[:6], before.flatten())
    assert not module.weight.any()


def test_a_module_with_arguments_is_refused():
    with pytest.raises(HyperparameterError, match="built already"):
        Problem(nn.Linear(3, 2), "cross_entropy", X, CLASSES, arguments={"out_features": 2})


class Stream(IterableDataset):
    def __iter__(self):
        return iter(Listed())

    def __len__(self):
        return 12


class Changing(Listed):
    """300 examples, more than are read at once, of which the last ones have another form."""

    def __init__(self, *late):
        super().__init__()
        self.late = late

    def __len__(self):
        return 300

    def __getitem__(self, i):
        return self.late if i > 280 else (X[0], 1)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ((X,), "training targets are missing"),
        ((Listed(), CLASSES), "targets must be left out with a Listed"),
        ((Stream(),), "must have __len__ and __getitem__"),
        ((X, ["cat", "dog"] * 6), "number the classes"),
        (([[1.0], [1.0, 2.0]], [0, 1]), "cannot be made an array"),
        (([torch.ones(2), torch.ones(3)], [0, 1]), "2 different ones"),
        ((Listed(lambda x: x + torch.rand(3)),), "another example each time"),
        ((Listed(lambda x: object()),), "do not make a batch of tensors"),
        ((TensorDataset(X),), "a tuple of inputs and target, got 1 part"),
        ((TensorDataset(X[:0], CLASSES[:0]),), "is empty"),
        ((TensorDataset(X.to_sparse(), CLASSES),), "an ordinary tensor with values, got a sparse_coo one"),
        ((TensorDataset(X.to("meta"), CLASSES),), "got a meta one"),
        ((Changing(torch.ones(4), 1),), "do not make a batch of tensors: .*give them one form"),
        ((Changing(X[0], 1, 1),), "do not make a batch of tensors"),
        ((Listed(lambda x: (x, x)),), r"got one within it: return \(x1, x2, target\)"),
        ((Listed(lambda x: x * float("nan")),), "inputs must be finite, but 12 of 12"),
        ((DataLoader(Listed(), sampler=SubsetRandomSampler(range(5))),), "must draw all 12 examples, but draws 5"),
        ((X, CLASSES + 0j), "targets must be real numbers, got torch.complex64"),
        ((np.ma.masked_less(X.numpy(), 0), CLASSES), "must all have values, got an array with masked ones"),
    ],
)
def test_what_is_no_data_is_refused(examples, message):
    with pytest.raises(DataError, match=message):
        linear("cross_entropy", *examples)


def test_the_parts_of_a_test_set_are_counted():
    with pytest.raises(
        DataError, match=r"test must have inputs and targets, got 3 parts: pass \(\(x1, x2\), targets\)"
    ):
        linear("cross_entropy", X, CLASSES, test=(X, X, CLASSES))


def test_the_loader_of_a_tensor_dataset_collates():
    def doubled(batch):
        inputs, targets = default_collate(batch)
        return 2 * inputs, targets

    loader = DataLoader(TensorDataset(X, CLASSES), batch_size=4, collate_fn=doubled)
    assert torch.equal(linear("cross_entropy", loader).inputs, 2 * X)
    whole = DataLoader(Listed(), batch_size=None)
    assert torch.equal(linear("cross_entropy", whole).inputs, X)


def test_missing_values_may_be_meant():
    data = Listed(lambda x: x * float("nan"))
    with pytest.warns(PopRiskWarning, match="used because of allow_nonfinite=True"):
        assert linear("cross_entropy", data, allow_nonfinite=True).inputs.isnan().all()


def test_functions_take_the_path_of_a_run(tmp_path):
    run = train(Problem.build(two_classes), torch.optim.AdamW, steps=4, path=tmp_path / "run", progress=False)
    path = tmp_path / "run"
    assert population_risk(path, controls=0).value == population_risk(run, controls=0).value
    assert audit(str(path), progress=False).columns.keys() == audit(run, progress=False).columns.keys()
    assert analyze(str(path), progress=False).curves.steps == analyze(run, progress=False).curves.steps
    assert RiskMeter("leverage").read(path).best_step == RiskMeter("leverage").read(run).best_step
    with pytest.raises(DataError, match="run must be Run, str or Path, got Linear"):
        analyze(nn.Linear(3, 2))


def two_classes():
    return linear("cross_entropy", X, CLASSES)


def test_examples_as_dictionaries_are_refused():
    class Mapped(Listed):
        def __getitem__(self, i):
            return {"input": X[i], "label": 0}

    with pytest.raises(DataError, match="got dict: pass arrays instead"):
        linear("cross_entropy", Mapped())
