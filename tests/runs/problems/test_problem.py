"""What a problem is, what is kept of it, and by what it is recognised."""

import functools
import json

import pytest
import torch
from torch import nn

from poprisk._core.store.import_paths import importable, resolve
from poprisk.errors import DataError, HyperparameterError
from poprisk.runs._formats import as_factory
from poprisk.runs._problem import Problem

INPUTS, LABELS = torch.linspace(-1, 1, 12).reshape(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])


def make(width=3):
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 3))


def classes(shift=0.0):
    return Problem(make, "cross_entropy", INPUTS + shift, LABELS, name="classes", arguments={"width": 4})


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(5, 3), nn.Linear(2, 3)

    def forward(self, codes, x):
        return self.table(codes) + self.linear(x)


def test_models_are_new_and_start_alike():
    problem = classes()
    torch.manual_seed(9)
    before = torch.get_rng_state()
    one, other = problem.model(torch.float64), problem.model(torch.float64)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.weights, other.weights)
    assert one.module is not other.module
    assert one.size == 4 * 3 + 5 * 3
    another = Problem(make, "cross_entropy", INPUTS, LABELS, arguments={"width": 4}, seed=1)
    assert not torch.equal(another.model(torch.float64).weights, one.weights)
    assert problem.model().weights.dtype == torch.float32


def test_batches_and_their_loss():
    problem = classes()
    model = problem.model(torch.float64)
    rows = torch.tensor([4, 1, 1])
    inputs, targets = problem.batch(rows, dtype=torch.float64)
    assert inputs.dtype == torch.float64
    assert targets.tolist() == [1, 1, 1]
    losses = model.per_example_losses(model.weights, inputs, targets)
    outputs = model.module(inputs)
    torch.testing.assert_close(problem.batch_loss(outputs, targets), losses.mean())
    omega = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(problem.batch_loss(outputs, targets, omega), (omega * losses).sum())
    assert len(problem.batch()[1]) == len(problem) == 6


@pytest.mark.parametrize("loss", ["squared", lambda u, y: (u - y).abs().sum()])
def test_losses_of_regression(loss):
    problem = Problem(make, loss, INPUTS, torch.ones(6, 3))
    model = problem.model()
    outputs = model.module(INPUTS)
    expected = model.per_example_losses(model.weights, INPUTS, torch.ones(6, 3)).mean()
    torch.testing.assert_close(problem.batch_loss(outputs, problem.targets), expected)


def test_several_inputs():
    codes = torch.tensor([0, 1, 2, 3, 4, 0])
    problem = Problem(Sum, "cross_entropy", (codes, INPUTS), LABELS)
    inputs, _ = problem.batch(torch.tensor([5, 0]), dtype=torch.float64)
    assert [x.dtype for x in inputs] == [torch.int64, torch.float64]
    assert problem.model(torch.float64).outputs(problem.model(torch.float64).weights, inputs).shape == (2, 3)
    assert problem.show(2) == "example 2: input int64 [] and float32 [2], target 2"
    assert set(problem.description["data"]) == {"inputs[0]", "inputs[1]", "targets"}


def test_augmentation_follows_its_generator():
    def flip(x, generator):
        return x * torch.randint(2, (len(x), 1), generator=generator)

    problem = Problem(make, "cross_entropy", INPUTS, LABELS, augment=flip)
    draws = [problem.batch(generator=torch.Generator().manual_seed(s))[0] for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(problem.batch()[0], INPUTS)


def test_showing_an_example():
    assert classes().show(1) == "example 1: input float32 [2], target 1"
    custom = Problem(make, "cross_entropy", INPUTS, LABELS, show=lambda i: f"<{i}>")
    assert custom.show(3) == "<3>"
    for wrong in (-1, 6):
        with pytest.raises(DataError, match="must lie in 0 … 5"):
            custom.show(wrong)


def test_fingerprint_is_of_every_bit():
    base = classes()
    assert base.fingerprint == classes().fingerprint == base.to("cpu").fingerprint
    changed = INPUTS.clone()
    changed[3, 1] = torch.nextafter(changed[3, 1], torch.tensor(9.0))
    others = [
        Problem(make, "cross_entropy", changed, LABELS),
        Problem(make, "cross_entropy", INPUTS.double(), LABELS),
        Problem(make, "cross_entropy", INPUTS.reshape(6, 2, 1), LABELS),
        Problem(make, "cross_entropy", INPUTS, LABELS.flip(0)),
        Problem(make, "cross_entropy", INPUTS.flip(0), LABELS),
    ]
    assert len({base.fingerprint, *(p.fingerprint for p in others)}) == 6
    assert Problem(make, "cross_entropy", INPUTS.T.contiguous().T, LABELS).fingerprint == base.fingerprint
    imaginary = torch.complex(INPUTS, -INPUTS).conj().imag
    assert Problem(make, "cross_entropy", imaginary, LABELS).fingerprint == base.fingerprint


def test_a_built_problem_comes_back():
    problem = Problem.build(classes, shift=0.5)
    description = json.loads(json.dumps(problem.description))
    again = Problem.from_description(description)
    assert torch.equal(again.inputs, problem.inputs)
    assert description["source"]["arguments"] == {"shift": 0.5}
    assert Problem.build(description["source"]["path"], shift=0.5).fingerprint == problem.fingerprint
    description["source"]["arguments"] = {"shift": 0.25}  # as if the function's data had changed
    with pytest.raises(DataError, match="not trained on the examples"):
        Problem.from_description(description, trust=True)


def test_a_problem_made_by_hand_says_what_is_needed():
    with pytest.raises(DataError, match=r"not made by Problem.build; pass problem=….*test_problem:make"):
        Problem.from_description(classes().description)
    local = Problem.build(lambda: classes(0.0))
    with pytest.raises(DataError, match="lambda or nested function"):
        Problem.from_description(local.description)


def test_bad_input():
    with pytest.raises(HyperparameterError, match="a module or a function that builds one, got a str"):
        as_factory("nn.Linear")
    with pytest.raises(HyperparameterError, match="loss must be one of"):
        Problem(make, "hinge", INPUTS, LABELS)
    with pytest.raises(DataError, match="training inputs and targets must have the same number"):
        Problem(make, "cross_entropy", INPUTS, LABELS[:5])
    with pytest.raises(DataError, match="test inputs and targets"):
        Problem(make, "cross_entropy", INPUTS, LABELS, test=(INPUTS[:0], LABELS[:0]))
    with pytest.raises(DataError, match="must return a torch module, got int"):
        Problem(lambda: 3, "cross_entropy", INPUTS, LABELS).module()
    with pytest.raises(DataError, match="must return a Problem, got dict"):
        Problem.build(dict)


def test_importable_functions_and_others():
    assert resolve(importable(make).path) is make
    assert importable(functools.partial(make, width=2), {"depth": 1}).arguments == {"width": 2, "depth": 1}

    def local():
        pass

    reasons = {
        "lambda or nested function": local,
        "positional arguments": functools.partial(make, 2),
        "no import path": functools.partial(make).__call__,
    }
    for reason, function in reasons.items():
        found = importable(function)
        assert found.path is None
        assert reason in found.reason
    assert "not JSON values" in importable(make, {"width": torch.zeros(1)}).reason
    script = type("Script", (), {"__module__": "__main__"})
    assert "__main__" in importable(script).reason
    for wrong in ("json", "json:nothing", "no_such_module:f", ":x"):
        with pytest.raises(DataError):
            resolve(wrong)


def make_square(width=2, bias=True):
    return nn.Linear(width, width, bias=bias)


def absolute(outputs, target):
    return (outputs - target).abs().sum()


def cubed(outputs, target):
    return (outputs - target).abs().pow(3).sum()


def test_another_model_or_loss_is_not_the_same_problem():
    data = (torch.eye(2), torch.ones(2, 2))
    recorded = Problem(make_square, absolute, *data, arguments={"width": 2}).description
    same = Problem(make_square, absolute, *data, arguments={"width": 2})
    same.check_is(recorded)
    unnamed = Problem(lambda: make_square(2), lambda u, y: 1.0 * absolute(u, y), *data)
    unnamed.check_is(recorded)  # nothing to compare by; the recorded steps decide
    same.check_is(unnamed.description)
    others = {
        r"make_model=.*make_square\(width=2\), but problem 'problem' has make_model="
        r".*make_square\(bias=False, width=2\).*wrap it in a lambda": Problem(
            make_square, absolute, *data, arguments={"width": 2, "bias": False}
        ),
        r"make_model=.*make_square\(width=2\), .* has make_model=torch.nn.modules.linear:Linear": Problem(
            nn.Linear, absolute, *data, arguments={"in_features": 2, "out_features": 2}
        ),
        r"loss=.*absolute\(\), .* has loss=.*cubed\(\): pass the one that was used": Problem(
            make_square, cubed, *data, arguments={"width": 2}
        ),
        r"loss=.*absolute\(\), .* has loss=.*squared": Problem(make_square, "squared", *data, arguments={"width": 2}),
    }
    for message, other in others.items():
        with pytest.raises(DataError, match=message):
            other.check_is(recorded)
    named = Problem(make_square, "squared", *data, arguments={"width": 2}).description
    with pytest.raises(DataError, match=r"trained with loss='squared', .* has loss=.*absolute"):
        same.check_is(named)
