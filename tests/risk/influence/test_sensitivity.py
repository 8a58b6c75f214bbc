"""Derivatives through a run: against trainings by brute force, forward against adjoint, and what is refused."""

import pytest
import torch
from recorded import Case
from torch import nn
from torch.testing import assert_close

from oracles.influence import central_difference, flat
from poprisk._core.autodiff.flat import FlatModel
from poprisk.errors import DataError, RunError
from poprisk.risk._influence.batch_derivatives import GeneralBatch
from poprisk.risk._influence.linear_stack import StackBatch, linear_layers
from poprisk.risk._influence.matrix import influence_matrix
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._training import train


def row_error(found, expected):
    """Largest deviation of an entry, relative to its row's norm."""
    return float(((found - expected).abs() / expected.norm(dim=1, keepdim=True)).max())


def differenced_matrix(case):
    """J by central differences of real trainings, column by column."""
    n = len(case.inputs)
    eye = torch.eye(n, dtype=torch.float64)
    columns = [central_difference(lambda e, j=j: case.own_losses(case.again(alpha=1 - e * eye[j]))) for j in range(n)]
    return torch.stack(columns, 1)


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [(kind, rule) for kind in ("mlp", "smooth cnn", "transformer") for rule in ("momentum", "adam")]
    + [("mlp", rule) for rule in ("nesterov", "coupled adam", "adamw", "soft", "snr", "row")]
    + [("mlp", rule) for rule in ("default", "relative soft", "relative row")],
)
def test_entries_are_differences_of_real_trainings(kind, optimizer):
    case = Case(kind, optimizer)
    J = influence_matrix(case.run)
    assert row_error(J, differenced_matrix(case)) < 1e-6
    assert float(J.norm()) > 1e-3


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_clipping_and_schedules_are_differentiated(optimizer):
    case = Case("mlp", optimizer, clip_norm=0.2, schedule=lambda k: 1 / (1 + k))
    assert any(case.run.recorded(k).factor(k)[0] < 1 for k in range(7))
    assert Unrolled(case.run).note == ""
    assert row_error(influence_matrix(case.run), differenced_matrix(case)) < 1e-6


def test_labels_inputs_and_initial_weights_are_differences_too():
    case = Case("mlp", "adam", loss="squared")
    unrolled = Unrolled(case.run)
    n, d, p = 6, unrolled.num_weights, 3
    shift, move = torch.randn(n, p, dtype=torch.float64), torch.randn(n, 4, dtype=torch.float64)
    first, w = torch.randn(d, dtype=torch.float64), case.run.weights(0)
    measured = {
        "labels": central_difference(lambda e: flat(case.again(shift=e * shift))),
        "inputs": central_difference(lambda e: flat(case.again(inputs=case.inputs + e * move))),
        "initial": central_difference(lambda e: flat(case.again(initial=w + e * first))),
    }
    for (name, expected), direction in zip(measured.items(), (shift, move, first), strict=True):
        found = unrolled.forward(**{name: direction.unsqueeze(-1)}).squeeze(1)
        assert float((found - expected).norm() / expected.norm()) < 1e-6, name


@pytest.mark.parametrize(("kind", "optimizer"), [
    ("mlp", "soft"), ("smooth cnn", "nesterov"), ("mlp", "row"), ("mlp", "default")
])  # fmt: skip
def test_forward_is_the_adjoints_transpose(kind, optimizer):
    case = Case(kind, optimizer, clip_norm=0.5)
    unrolled = Unrolled(case.run)
    n, d = 6, unrolled.num_weights
    kinds = {
        "weights": torch.randn(n, 2, dtype=torch.float64),
        "labels": torch.randn(n, 3, 2, dtype=torch.float64),
        "inputs": torch.randn(*case.inputs.shape, 2, dtype=torch.float64),
        "initial": torch.randn(d, 2, dtype=torch.float64),
    }
    C = torch.randn(d, 3, dtype=torch.float64)
    back = unrolled.adjoint(C, wrt=tuple(kinds))
    expected = sum(getattr(back, name).flatten(1) @ x.flatten(0, -2) for name, x in kinds.items())
    assert_close(C.T @ unrolled.forward(**kinds), expected, rtol=1e-10, atol=1e-12)


def test_a_frozen_gate_is_held():
    case = Case("mlp", "soft")
    unrolled = Unrolled(case.run, gate="frozen")
    assert "gate is held" in unrolled.note
    rule, n = unrolled.rule, 6
    gates, w, state = [], case.run.weights(0), rule.initial(case.run.weights(0))
    for k in range(7):
        g = unrolled.batch(k).gradient
        gates.append(rule.gate(k, w, g, state))
        w, state = rule.step(k, w, g, state)

    def end(epsilon):
        w, state = case.run.weights(0), rule.initial(case.run.weights(0))
        alpha = torch.ones(n, dtype=torch.float64)
        alpha[1] += epsilon
        for k in range(7):
            batch = case.run.batch(k)
            slopes = unrolled.model.per_example_gradients(w, case.inputs[batch], case.targets[batch])
            w, state = rule.step(k, w, (alpha[batch, None] * slopes).mean(0), state, gate=gates[k])
        return w

    found = unrolled.forward(weights=torch.eye(n, dtype=torch.float64)[:, 1:2]).squeeze(1)
    expected = central_difference(end)
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    free = Unrolled(case.run).forward(weights=torch.eye(n, dtype=torch.float64)[:, 1:2]).squeeze(1)
    assert float((found - free).norm() / free.norm()) > 1e-3


@pytest.mark.parametrize("optimizer", ["adam", "soft", "snr", "default"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_weight_that_never_had_a_gradient_makes_no_nan(optimizer, dtype):
    case = Case("mlp", optimizer)
    inputs = case.inputs.clone()
    inputs[:, 0] = 0.0  # a border pixel
    case.inputs, case.problem = inputs, Problem(case.make, "cross_entropy", inputs, case.targets)
    case.run = train(case.problem, case.optimizer, 7, batch_size=3, dtype=torch.float64, progress=False)
    J = influence_matrix(Unrolled(case.run, dtype=dtype))
    assert bool(J.isfinite().all())
    tolerance = 1e-6 if dtype == torch.float64 else 1e-2
    assert row_error(J.double(), differenced_matrix(case)) < tolerance


@pytest.mark.parametrize("kind", ["mlp", "relu"])
@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_written_out_derivatives_equal_automatic_ones(kind, loss):
    case = Case(kind, loss=loss)
    model = FlatModel(case.make(), loss)
    layers = linear_layers(model)
    assert layers is not None
    shares = torch.rand(6, dtype=torch.float64)
    fast = StackBatch(layers, model, model.weights, case.inputs, case.targets, shares)
    plain = GeneralBatch(model, model.weights, case.inputs, case.targets, shares)
    V, source = torch.randn(4, model.size, dtype=torch.float64), torch.randn(4, 6, 3, dtype=torch.float64)
    assert_close(fast.gradient, plain.gradient, rtol=1e-12, atol=1e-13)
    for rho in (None, source):
        for a, b in zip(fast.push(V, rho), plain.push(V, rho), strict=True):
            assert_close(a, b, rtol=1e-12, atol=1e-12)
    rows = torch.tensor([5, 0, 5, 3])
    assert_close(fast.push_alone(V, rows), plain.push_alone(V, rows), rtol=1e-12, atol=1e-12)
    alone = sum(fast.push_alone(V[:1].expand(6, -1), torch.arange(6)))
    assert_close(alone, plain.push(V[:1])[0][0], rtol=1e-12, atol=1e-12)


def test_shared_or_hooked_layers_are_left_to_automatic_differentiation():
    shared = nn.Linear(3, 3)
    assert linear_layers(FlatModel(nn.Sequential(shared, nn.Tanh(), shared), "squared")) is None
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_hook(lambda *_: None)
    assert linear_layers(FlatModel(hooked, "squared")) is None
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    frozen[0].weight.requires_grad_(False)
    assert linear_layers(FlatModel(frozen, "squared")) is None


def test_kinks_are_named():
    assert Unrolled(Case("relu", "momentum", steps=1).run).kinks == ("ReLU",)
    assert Unrolled(Case("mlp", "momentum", steps=1).run).kinks == ()


def test_little_memory_and_sparse_recording_change_nothing():
    case = Case("mlp", "soft", steps=9)
    expected = influence_matrix(case.run)
    tight = Unrolled(case.run, memory=24_000)
    assert tight._states.every > 1
    assert tight.columns_at_a_time() < 6
    assert_close(influence_matrix(tight), expected, rtol=1e-10, atol=1e-13)
    sparse = Case("mlp", "soft", steps=9, every=4)
    assert_close(influence_matrix(sparse.run), expected, rtol=1e-10, atol=1e-13)


def test_single_precision_and_windows():
    case = Case("mlp", "adam")
    expected = influence_matrix(case.run)
    assert row_error(influence_matrix(Unrolled(case.run, dtype=torch.float32)).double(), expected) < 1e-3
    eye = torch.eye(6, dtype=torch.float64)
    late = Unrolled(case.run, start=4)
    early = Unrolled(case.run, stop=4)
    assert early.last_weights.equal(case.run.weights(4))
    batches = torch.cat(case.batches[4:]).unique()
    moved = late.forward(weights=eye).norm(dim=0)
    assert sorted(moved.nonzero().flatten().tolist()) == batches.tolist()


def test_the_spot_check_trains_and_agrees():
    case = Case("mlp", "adam", clip_norm=0.3)
    found = Unrolled(case.run).spot_check(count=2)
    assert found.worst < 1e-6
    assert found.trainings == 4
    with pytest.raises(RunError, match="use start=0"):
        Unrolled(case.run, start=1).spot_check()


def test_what_is_refused():
    case = Case("mlp", "momentum")
    unrolled = Unrolled(case.run)
    d = unrolled.num_weights
    with pytest.raises(DataError, match="query 1 is not finite"):
        unrolled.adjoint(torch.tensor([[0.0, float("inf")]], dtype=torch.float64).expand(d, 2))
    with pytest.raises(DataError, match="direction of change"):
        unrolled.forward()
    with pytest.raises(DataError, match="weights must be"):
        unrolled.forward(weights=torch.zeros(5, 1, dtype=torch.float64))
    with pytest.raises(DataError, match="start < stop"):
        Unrolled(case.run, start=7)
    with pytest.raises(RunError, match="float32 or float64"):
        Unrolled(case.run, dtype=torch.bfloat16)
    with pytest.raises(DataError, match="at least 3"):
        Unrolled(Case("mlp", "momentum", n=2, batch_size=1).run)
    tokens = Unrolled(Case("transformer", "momentum", steps=2).run)
    with pytest.raises(DataError, match="floating-point input"):
        tokens.adjoint(torch.zeros(tokens.num_weights, 1, dtype=torch.float64), wrt=("inputs",))


def test_losses_that_are_no_mean_and_inputs_that_changed_are_refused():
    case = Case("mlp", "momentum")
    options = {"batch_size": 3, "dtype": torch.float64, "progress": False}

    def largest(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets, reduction="none").max()

    mixed = Problem(case.make, "cross_entropy", case.inputs, case.targets, batch_loss=largest)
    model = mixed.module(torch.float64)
    optimizer = case.optimizer(model.parameters())
    recorder = Recorder(None, model, optimizer, problem=mixed, verify_steps=0)
    with recorder.step(torch.arange(6)):
        largest(model(case.inputs), case.targets).backward()
        optimizer.step()
    with pytest.raises(DataError, match="mean of its examples' losses"):
        Unrolled(recorder.close())
    jittered = Problem(case.make, "cross_entropy", case.inputs, case.targets, augment=lambda x, g: x + 0.1)
    with pytest.raises(RunError, match="augmented"):
        Unrolled(train(jittered, case.optimizer, 2, **options))
