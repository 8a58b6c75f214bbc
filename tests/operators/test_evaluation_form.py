"""Windows of runs with batch statistics, dropout, augmentation, bf16 weights; of recurrent networks, LoRA, bags."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close

from poprisk import Problem, Window, train
from poprisk._core.autodiff import FlatModel
from poprisk.errors import RunError
from poprisk.operators import RunPath, StretchedWindow, evaluation_model, evaluation_of, train_kernel
from poprisk.optim import PopRiskAdamW

N = 12
RULES = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "gated": partial(PopRiskAdamW, lr=0.05),
}


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def images() -> nn.Module:
    norm = nn.BatchNorm2d(2, track_running_stats=False)
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 1), norm, nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.Tanh(), nn.Linear(6, 3))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def low() -> nn.Module:
    return plain().to(torch.bfloat16)


def jitter(inputs, generator):
    return inputs + 0.2 * torch.randn(inputs.shape, generator=generator)


class LowRank(nn.Module):
    """A frozen layer and what is learned beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 6)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    return nn.Sequential(LowRank(), nn.Tanh(), nn.Linear(6, 3))


CASES = {
    "batch normalization": (normalized, None, "batch normalization has the statistics of 12 fixed training examples"),
    "batch normalization without running statistics": (images, None, "batch normalization"),
    "dropout": (dropping, None, "dropout is off"),
    "augmentation": (plain, jitter, "examples are not augmented"),
    "bf16": (low, None, "the bfloat16 weights are not rounded between steps"),
}


def run_of(make, augment=None, rule="adamw", batch=4, steps=6, n=N, dtype=None):
    x = torch.randn(n + 3, 4, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n + 3) % 3
    if make is low:
        x = x.to(torch.bfloat16)
    problem = Problem(make, "cross_entropy", x[:n], y[:n], test=(x[n:], y[n:]), augment=augment)
    return train(problem, RULES[rule], steps, batch_size=batch, dtype=dtype, progress=False)


@pytest.mark.parametrize(
    ("case", "rule"), [*((case, "adamw") for case in CASES), *(("batch normalization", rule) for rule in RULES)]
)
def test_the_evaluation_form_carries_the_run(case, rule):
    make, augment, told = CASES[case]
    run = run_of(make, augment, rule)
    window = Window.of_run(run, start=2, dense=True)
    ops = window.dense_operators()
    assert told in window.note
    assert_close(ops.predicted_train, ops.train_displacement, rtol=1e-9, atol=1e-12)
    assert_close(ops.predicted_test, ops.test_displacement, rtol=1e-9, atol=1e-12)
    free = Window.of_run(run, start=2, dense=False)
    H = torch.randn(len(ops.output_gradient), 2, dtype=torch.float64)
    assert_close(free.test_transfer @ H, ops.test_transfer @ H, rtol=1e-8, atol=1e-10)
    assert_close(free.dissipation_gramian @ H, ops.dissipation_gramian @ H, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_full_batches_of_batch_normalization_leave_nothing_beyond_the_form(rule):
    # The fixed examples are all of them, as is the batch: its statistics, and what is differentiated, are the same.
    run = run_of(normalized, rule=rule, batch=N, dtype=torch.float64)
    found = evaluation_of(run)
    assert found.share < 1e-7
    x, _ = run.problem.batch(dtype=torch.float64)
    module = run.module(torch.float64).train()
    weights = dict(zip(run.layout.names, run.layout.split(run.weights(3)), strict=True))
    assert_close(found.model.batch_outputs(run.weights(3), x), functional_call(module, weights, (x,)))
    assert evaluation_of(run_of(normalized, rule=rule, dtype=torch.float64)).share > 0.05  # not so in minibatches


def test_more_examples_than_the_fixed_ones(monkeypatch):
    monkeypatch.setattr("poprisk.operators._evaluation.REFERENCE", 5)
    window = Window.of_run(run_of(normalized), dense=False)
    assert "statistics of 5 fixed training examples" in window.note
    both = window.model.outputs(window.model.weights, window.inputs)
    alone = torch.cat([window.model.batch_outputs(window.model.weights, x[None]) for x in window.inputs])
    assert_close(both, alone)
    w, v = window.model.weights, torch.randn_like(window.model.weights)
    steps = (window.model.batch_outputs(w + s * 1e-6 * v, window.inputs) for s in (1, -1))
    assert_close(
        window.model.jvp(w, window.inputs, v), (next(steps) - next(steps)).reshape(-1) / 2e-6, rtol=1e-6, atol=1e-8
    )


def test_kinks_beside_batch_normalization():
    make = lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))  # noqa: E731
    run = run_of(make)
    usual, split = (Window.of_run(run, dense=True, quadrature=rule).corrections() for rule in ("gauss", "kinks"))
    assert usual[:, :2].max() > 1e-6
    assert split[:, :2].max() < 1e-10


def test_stretches_of_an_evaluated_run_carry_it():
    run = run_of(normalized, batch=3, steps=8)
    found = evaluation_of(run, start=2)
    inputs, targets = run.problem.batch(dtype=torch.float64)
    test = torch.randn(3, 4, dtype=torch.float64)
    path = RunPath.read(found.trajectory, found.model, inputs, targets, test, start=2)
    swept = StretchedWindow(path, 3).forward(path.output_gradient[:, None], source=True)
    moved = (path.test_outputs(-1) - path.test_outputs(0)).reshape(-1)
    assert_close(-swept.test.sum(1), moved, rtol=1e-9, atol=1e-12)


def test_kernels_of_the_evaluation_form():
    run = run_of(normalized)
    model = evaluation_model(run, torch.float64)
    x, _ = run.problem.batch(dtype=torch.float64)
    J = model.output_jacobian(model.weights, x).flatten(0, 1)
    for method in ("auto", "layer factors", "vector products"):
        assert_close(train_kernel(model, model.weights, x, method=method), J @ J.T)


def test_what_has_no_evaluation_form_is_refused():
    def make():
        norm = nn.InstanceNorm1d(2, track_running_stats=True)
        return nn.Sequential(nn.Unflatten(1, (2, 2)), norm, nn.Flatten(), nn.Linear(4, 3))

    with pytest.raises(RunError, match=r"InstanceNorm1d '1' has no evaluation form.*use track_running_stats=False"):
        Window.of_run(run_of(make))


class Final(nn.Module):
    """What a recurrent layer says at the end."""

    def __init__(self, layer) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.LazyLinear(3)
        self(torch.zeros(1, 4))

    def forward(self, x):
        return self.head(self.layer(x.reshape(len(x), 2, 2))[0][:, -1])


class Cells(nn.Module):
    """A cell called twice."""

    def __init__(self, cell) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 3)

    def forward(self, x):
        first, second = x[:, :2], x[:, 2:]
        state = self.cell(second, self.cell(first))
        return self.head(state[0] if isinstance(state, tuple) else state)


RECURRENT = {
    "RNN": lambda: Final(nn.RNN(2, 4, batch_first=True)),
    "RNN, ReLU": lambda: Final(nn.RNN(2, 4, nonlinearity="relu", bias=False, batch_first=True)),
    "GRU": lambda: Final(nn.GRU(2, 4, batch_first=True)),
    "GRU, two layers, both ways": lambda: Final(nn.GRU(2, 4, 2, bidirectional=True, batch_first=True)),
    "LSTM": lambda: Final(nn.LSTM(2, 4, batch_first=True)),
    "LSTM, projected": lambda: Final(nn.LSTM(2, 4, proj_size=3, batch_first=True)),
    "RNNCell": lambda: Cells(nn.RNNCell(2, 4)),
    "GRUCell": lambda: Cells(nn.GRUCell(2, 4, bias=False)),
    "LSTMCell": lambda: Cells(nn.LSTMCell(2, 4)),
}


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:LSTM with projections")
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_networks(name):
    torch.manual_seed(0)
    module, x = RECURRENT[name]().double(), torch.randn(5, 4, dtype=torch.float64)
    model = FlatModel(module, "cross_entropy")
    w, v = model.weights, torch.randn(model.size, dtype=torch.float64)
    assert_close(model.outputs(w, x), module(x))
    J = model.output_jacobian(w, x).flatten(0, 1)
    module(x).sum().backward()
    plain_gradient = torch.cat([p.grad.reshape(-1) for p in module.parameters()])
    assert_close(J.sum(0), plain_gradient)
    assert_close(model.jvp(w, x, v), J @ v)
    assert_close(model.vjp(w, x, J @ v), J.T @ J @ v)


@pytest.mark.filterwarnings("ignore:Lazy modules", "ignore:LSTM with projections")
@pytest.mark.parametrize("make", [RECURRENT["GRU"], RECURRENT["LSTMCell"], adapted])
def test_windows_of_recurrent_and_adapted_networks_are_exact(make):
    run = run_of(make, dtype=torch.float64)
    window = Window.of_run(run, dense=True)
    ops = window.dense_operators()
    assert not window.note
    assert window.model.size == run.num_weights == sum(p.numel() for p in make().parameters() if p.requires_grad)
    assert_close(ops.predicted_test, ops.test_displacement, rtol=1e-10, atol=1e-12)
