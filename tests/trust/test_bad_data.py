"""Data that cannot be meant are refused before anything is trained, with their number and the first of them."""

from functools import partial

import jaxtyping
import numpy as np
import pytest
import torch
from cli_calls import call
from torch import nn

from poprisk import Problem, Recorder, RiskMeter, analyze, audit, population_risk, train
from poprisk.errors import DataError, HyperparameterError, PopRiskWarning, RunError
from poprisk.risk import Unrolled

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def network(outputs=2):
    return nn.Linear(3, outputs)


def having(x, value, *rows):
    x = x.clone()
    x[list(rows)] = value
    return x


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(value):
    said = r"inputs must be finite, but 2 of 12 examples have NaN or infinite values, the first is example 4"
    with pytest.raises(DataError, match=f"training {said}"):
        Problem(network, "cross_entropy", having(X, value, 4, 7), Y)
    with pytest.raises(DataError, match=f"test {said}"):
        Problem(network, "cross_entropy", X, Y, test=(having(X, value, 4, 7), Y))
    with pytest.raises(DataError, match=r"training targets must be finite.*example 0: .*allow_nonfinite=True"):
        Problem(network, "squared", X, having(X[:, :2], value, 0))
    with pytest.raises(DataError, match=r"inputs\[1\] must be finite"):
        Problem(network, "squared", (X, having(X, value, 1)), X)
    with pytest.warns(PopRiskWarning, match="because of allow_nonfinite=True"):
        assert len(Problem(network, "cross_entropy", having(X, value, 4), Y, allow_nonfinite=True)) == 12


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        ("cross_entropy", having(Y, -1, 3, 5), "2 of 12 examples have others, the first is example 3"),
        ("cross_entropy", torch.full((12,), -100), "all are -100, the label that cross_entropy ignores"),
        (
            "cross_entropy",
            having(X[:, :2].abs(), -0.5, 2),
            "1 of 12 examples have others, the first is",
        ),
        ("logistic", having(Y.float(), 5.0, 1), "0, 1 or a probability .* 1 of 12 examples have others, the first is"),
        ("logistic", 2.0 * Y - 1, "map the two classes to 0 and 1"),
    ],
)
def test_targets_that_do_not_fit_the_loss(loss, targets, message):
    with pytest.raises(DataError, match=message):
        Problem(partial(network, 1 if loss == "logistic" else 2), loss, X, targets)


@pytest.mark.parametrize("loss", ["cross_entropy", nn.CrossEntropyLoss(label_smoothing=0.1)])
def test_labels_beyond_the_outputs(loss):
    said = "class indices from 0 to 1, as the model has 2 outputs, but 2 of 12 examples have others"
    with pytest.raises(DataError, match=f"training targets must be {said}, the first is example 3.* with 7: give"):
        train(Problem(network, loss, X, having(Y, 7, 3, 5)), torch.optim.SGD, 1, progress=False)
    problem = Problem(partial(network, 7), loss, X, having(Y, 7, 4), test=(X, having(Y, 6, 0)))
    with pytest.raises(DataError, match=r"training targets .* 1 of 12 .* the first is example 4"):
        train(problem, torch.optim.SGD, 1, progress=False)
    problem = Problem(partial(network, 2), loss, X, Y, test=(X, having(Y, 2, 0)))
    with pytest.raises(DataError, match=r"test targets .* the first is example 0"):
        train(problem, torch.optim.SGD, 1, progress=False)


def test_labels_of_places():
    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 5))

        def forward(self, x):
            return x[:, None] * self.weight

    x = torch.randn(12, 5)
    with pytest.raises(DataError, match=r"0 to 2, as the model has 3 outputs, but 1 of 12 .* example 2 with 3: give"):
        train(Problem(Places, "cross_entropy", x, having(torch.zeros(12, 5).long(), 3, 2)), torch.optim.SGD, 1)


def test_sets_without_differences():
    x, y = X.repeat(2, 1), Y.repeat(2)
    with pytest.warns(PopRiskWarning, match="training inputs are the same for all 24 examples, from example 0 on"):
        Problem(network, "cross_entropy", torch.zeros_like(x), y)
    with pytest.warns(PopRiskWarning, match="training targets are the same for all 24 examples"):
        Problem(network, "cross_entropy", x, torch.zeros_like(y))


@pytest.mark.parametrize("every", [1, 4])
def test_a_run_whose_loss_is_not_finite_is_not_analyzed(every, tmp_path, capsys):
    problem = Problem(partial(network, 1), "squared", 10 * X, X[:, :1])
    grows = partial(torch.optim.SGD, lr=1e8)
    run = train(problem, grows, 12, every=every, path=tmp_path / "run", progress=False)
    first = int((~run.losses.isfinite()).nonzero()[0])
    assert 0 < first < 12
    for analysis in (population_risk, audit, analyze, RiskMeter().read, Unrolled):
        with pytest.raises(RunError, match=f"not finite from step {first} of 12 on.*lower learning rate"):
            analysis(run)
    code, out, err = call(capsys, "analyze", tmp_path / "run")
    assert (code, out) == (2, "")
    assert f"from step {first} of 12 on" in err.splitlines()[-1]


def test_a_loss_that_was_not_finite_for_a_while(tmp_path):
    problem = Problem(network, "cross_entropy", X, Y)
    module = problem.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with Recorder(None, module, optimizer, problem=problem, verify_steps=0) as recorder:
        for k in range(4):
            with recorder.step(torch.arange(12)) as step:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(module(X), Y)
                loss.backward()
                step.loss = loss.detach() * (float("inf") if k == 1 else 1.0)
                optimizer.step()
    assert len(audit(recorder.run, tier="any", progress=False)) == 12


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 2)

    def forward(self, x):
        return self.table(x).sum(1)


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x.add_(1.0))


NLL = nn.NLLLoss()
LAST = having(Y, 9, 11)
IGNORED = having(Y, -100, 11)
LATE = [
    ({"loss": NLL, "targets": LAST}, "loss must take .* Target 9 is out of bounds"),
    ({"loss": nn.functional.cross_entropy, "targets": LAST}, "loss must take .* Target 9 is out of bounds"),
    ({"loss": NLL, "targets": IGNORED}, "loss must be finite, got nan for training target -100"),
    (
        {"make_model": Embedded, "inputs": having(torch.ones(12, 4).long(), 7, 11)},
        "the model must take the training inputs .int64 ",
    ),
    ({"make_model": Adds}, "the model must leave its inputs as they are, but changed them"),
    ({"loss": lambda u, y: u.sum() if u.sum() > 0 else -u.sum()}, "the loss of a batch must be computed, but .* vmap"),
    ({"loss": lambda u, y: torch.complex(u[0], u[1])}, "a scalar for one example, got torch.complex64"),
    ({"batch_loss": lambda u, y: None}, "batch_loss must return one number as a tensor, got NoneType"),
    ({"make_model": lambda: nn.Linear(3, 2, device="meta")}, "must return a module with values, got one on the meta"),
]


@pytest.mark.parametrize(("wrong", "message"), LATE)
def test_what_goes_wrong_after_the_first_examples_is_said_before_a_step(wrong, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    given = {"make_model": network, "loss": "cross_entropy", "inputs": X, "targets": Y} | wrong
    before = given["inputs"].clone()
    with pytest.raises(DataError, match=message) as caught:
        train(Problem(**given), torch.optim.SGD, 1, batch_size=2, progress=False)
    assert str(caught.value).isprintable()
    assert torch.equal(given["inputs"], before)


OBJECTS = torch.ones(12, 3).numpy().astype(object)
IMAGES = torch.zeros(12, 6, 6, 3, dtype=torch.uint8)
NEW_USERS = [
    ({"inputs": OBJECTS}, r"got object \[12, 3\]: use .astype\('float32'\) if all of it is numbers"),
    ({"targets": ["cat", "dog"] * 6}, "number the classes: _, targets = numpy.unique"),
    ({"targets": Y[:, None]}, r"int64 \[\d, 1\], but .*: pass targets.squeeze\(1\)"),
    ({"targets": nn.functional.one_hot(Y)}, r"pass targets.argmax\(1\) if they are one-hot"),
    (
        {"inputs": IMAGES, "make_model": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 2))},
        r"convert images, x.permute\(0, 3, 1, 2\).float\(\) / 255 if their colours are last",
    ),
    ({"inputs": {"x": X}}, "training inputs must be numbers, got dict: pass tensors, arrays or a Dataset"),
    ({"test": ()}, "test targets are missing: pass inputs and targets"),
    ({"test": (1, 2)}, "test inputs and targets must have the same number of examples, at least 1"),
]


@pytest.mark.parametrize(("wrong", "message"), NEW_USERS)
def test_what_new_users_pass_is_answered_with_what_to_do(wrong, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    given = {"make_model": network, "loss": "cross_entropy", "inputs": X, "targets": Y} | wrong
    with pytest.raises(DataError, match=message) as caught:
        train(Problem(**given), torch.optim.SGD, 1, progress=False)
    assert str(caught.value).isprintable()


class Twice(nn.Module):
    """A module that is registered under two names."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second, self.last = self.first, nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.second(self.first(x)))


class Tied(Twice):
    """A parameter of two modules."""

    def __init__(self):
        super().__init__()
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("model", [Twice, Tied])
def test_shared_modules_and_weights_train_as_in_a_plain_loop(model):
    """``torch.func.functional_call`` leaves its tensors behind in a module that has two names."""
    problem = Problem(model, "cross_entropy", X, Y)
    run = train(problem, partial(torch.optim.SGD, lr=0.5), 3, progress=False)
    module = problem.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(X), Y).backward()
        optimizer.step()
    assert torch.equal(run.weights(3), torch.cat([p.detach().reshape(-1) for p in module.parameters()]))
    assert not run.obstacles
    assert population_risk(run, progress=False).training_loss < float(run.losses[0])


def test_an_augmentation_in_place_leaves_the_examples_alone():
    before = X.clone()
    problem = Problem(network, "cross_entropy", X, Y, augment=lambda x, generator: x.add_(1.0))
    train(problem, torch.optim.SGD, 2, batch_size=4, progress=False)
    assert torch.equal(X, before)


OWN = np.random.default_rng(0)
UNSEEDED = {
    "torch": lambda x, generator: x + torch.randn(x.shape),
    "numpy": lambda x, generator: x + torch.from_numpy(np.random.normal(size=tuple(x.shape))).float(),  # noqa: NPY002
    "own generator": lambda x, generator: x + float(OWN.normal()),
    "flips all or none": lambda x, generator: x.flip(1) if torch.rand(()) < 0.5 else x,
    "in place": lambda x, generator: x.mul_(torch.rand(len(x), 1)),
}


@pytest.mark.parametrize("augment", UNSEEDED.values(), ids=UNSEEDED)
def test_an_augmentation_that_does_not_follow_its_generator_is_refused(augment, tmp_path):
    numpys = np.random.get_state()  # noqa: NPY002
    problem, path = Problem(network, "cross_entropy", X, Y, augment=augment), tmp_path / "run"
    with pytest.raises(DataError, match=r"generators with the same seed, but .*: draw all its random numbers from"):
        train(problem, torch.optim.SGD, 2, batch_size=4, path=path, progress=False)
    model, before = problem.module(), torch.random.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(DataError, match=r"must return the same inputs for generators with the same seed") as caught:
        Recorder(path, model, optimizer, problem=problem)
    assert str(caught.value).isprintable()
    assert not path.exists()
    assert torch.equal(torch.random.get_rng_state(), before)
    np.random.set_state(numpys)  # noqa: NPY002


def test_an_augmentation_from_its_generator_or_not_recorded_is_accepted():
    follows = Problem(network, "cross_entropy", X, Y, augment=lambda x, g: x + torch.randn(x.shape, generator=g))
    assert train(follows, torch.optim.SGD, 2, batch_size=4, progress=False).num_steps == 2
    seeds = lambda x, g: x + float(np.random.default_rng(g.initial_seed()).normal())  # noqa: E731
    assert train(Problem(network, "cross_entropy", X, Y, augment=seeds), torch.optim.SGD, 1, progress=False).num_steps
    problem = Problem(network, "cross_entropy", X, Y, augment=UNSEEDED["torch"])
    model = problem.module()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    Recorder(None, model, optimizer, problem=problem, augmentation="unseeded")


def test_a_factory_that_returns_the_same_module_again():
    module = network()
    problem = Problem(lambda: module, "cross_entropy", X, Y)
    train(problem, torch.optim.SGD, 1, progress=False)
    with pytest.raises(
        DataError, match="must build a new module each time, got the same again: pass the module itself"
    ):
        train(problem, torch.optim.SGD, 1, progress=False)
    problem = Problem(module, "cross_entropy", X, Y)
    same = [train(problem, torch.optim.SGD, 1, progress=False).weights(1) for _ in range(2)]
    assert torch.equal(*same)
    module.left = (each for each in ())
    with pytest.raises(HyperparameterError, match=r"must be one that can be copied, got Linear: .*; pass a function"):
        Problem(module, "cross_entropy", X, Y)


def test_good_data_stay_good():
    with pytest.warns(PopRiskWarning, match="1 of 12 examples have only the label -100.*the first is example 3"):
        some_ignored = Problem(network, "cross_entropy", X, having(Y, -100, 3))
    probabilities = Problem(network, "cross_entropy", X, torch.softmax(X[:, :2], 1))
    logistic = Problem(partial(network, 1), "logistic", X, Y.float())
    whole_numbers = Problem(network, "cross_entropy", torch.randint(5, (12, 3)), Y)
    assert [len(each) for each in (some_ignored, probabilities, logistic, whole_numbers)] == [12] * 4
    assert int(some_ignored.targets[3]) == -100


def test_the_command_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad_task.py").write_text(
        "import test_bad_data as t\nfrom poprisk import Problem\n"
        "def nan(): return Problem(t.network, 'cross_entropy', t.having(t.X, float('nan'), 2), t.Y)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "train", "bad_task.py:nan", "--steps", 2)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "the first is example 2" in err
