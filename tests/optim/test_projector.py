"""PopulationProjectorDescent against the dense formula, and as a torch optimizer."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from oracles.population import dense_projector, rate_matrix_loop
from poprisk.errors import BackendWarning, DataError, GradientError, HyperparameterError
from poprisk.optim._projector_descent import PopulationProjectorDescent


def _problem(b: int = 6, d: int = 4):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(b, d, generator=generator, dtype=torch.float64)
    y = x @ torch.arange(1.0, d + 1, dtype=torch.float64) + 0.1 * torch.randn(
        b, generator=generator, dtype=torch.float64
    )
    w = nn.Parameter(torch.zeros(d, dtype=torch.float64))
    return x, y, w


def _losses(x, y, w):
    return lambda: (x @ w - y).square() / 2


def test_a_step_is_the_dense_formula():
    x, y, w = _problem()
    optimizer = PopulationProjectorDescent([w], lr=0.1, weight_decay=0.3)
    for _ in range(5):
        before = w.detach().clone()
        G = (x @ before - y)[:, None] * x
        M, rate = dense_projector(rate_matrix_loop(G), torch.ones(4, dtype=torch.float64))
        losses = optimizer.step(_losses(x, y, w))
        assert_close(losses, (x @ before - y).square() / 2)
        assert_close(w.detach(), before - 0.1 * M @ G.mean(dim=0) - 0.1 * 0.3 * before, rtol=1e-10, atol=1e-12)
        assert_close(optimizer.rate, 0.1 * rate, rtol=1e-10, atol=1e-12)
        assert w.grad is None


def test_with_adam_s_base():
    x, y, w = _problem()
    optimizer = PopulationProjectorDescent([w], lr=0.1, base="adam", beta2=0.9, eps=1e-3)
    v = torch.zeros(4, dtype=torch.float64)
    for t in range(1, 6):
        before = w.detach().clone()
        G = (x @ before - y)[:, None] * x
        v = 0.9 * v + 0.1 * G.mean(dim=0) ** 2
        P = 1 / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
        M, _ = dense_projector(rate_matrix_loop(G), P)
        optimizer.step(_losses(x, y, w))
        assert_close(w.detach(), before - 0.1 * M @ G.mean(dim=0), rtol=1e-9, atol=1e-12)


def test_the_learning_rates_of_groups_are_part_of_the_metric():
    x, y, _ = _problem()
    a, b = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
    frozen = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
    optimizer = PopulationProjectorDescent([{"params": [a, frozen], "lr": 0.1}, {"params": [b], "lr": 0.4}])
    optimizer.step(lambda: (x @ torch.cat([a, b]) - y).square() / 2)
    G = -y[:, None] * x
    M, _ = dense_projector(rate_matrix_loop(G), torch.tensor([0.1, 0.1, 0.4, 0.4], dtype=torch.float64))
    assert_close(torch.cat([a, b]).detach(), -M @ G.mean(dim=0), rtol=1e-10, atol=1e-12)


def test_pure_disagreement_is_decay_alone():
    w = nn.Parameter(torch.ones(2, dtype=torch.float64))
    g = torch.tensor([[1.0, 2.0], [-1.0, -2.0]], dtype=torch.float64)
    optimizer = PopulationProjectorDescent([w], lr=0.5, weight_decay=0.1)
    optimizer.step(lambda: g @ w)
    assert_close(w.detach(), torch.full((2,), 0.95, dtype=torch.float64))


def test_unused_parameters_and_shapes():
    torch.manual_seed(0)
    model, unused = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), nn.Parameter(torch.ones(2))
    optimizer = PopulationProjectorDescent([*model.parameters(), unused], lr=0.1)
    x = torch.randn(5, 3)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(lambda: model(x).squeeze(-1).square())
    assert_close(unused.detach(), torch.ones(2))
    assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("base", ["identity", "adam"])
def test_the_loss_goes_down(base):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(64, 2)
    y = torch.sin(x[:, :1]) + 0.5 * x[:, 1:]
    optimizer = PopulationProjectorDescent(model.parameters(), lr={"identity": 0.1, "adam": 0.01}[base], base=base)
    history = []
    for step in range(120):
        rows = torch.arange(64).roll(7 * step)[:16]
        optimizer.step(lambda rows=rows: (model(x[rows]) - y[rows]).square().sum(dim=1) / 2)
        history.append(((model(x) - y).square().sum(dim=1) / 2).mean().item())
    assert history[-1] < 0.25 * history[0]


@pytest.mark.parametrize("base", ["identity", "adam"])
def test_state_dict_round_trip(base):
    x, y, w = _problem()
    optimizer = PopulationProjectorDescent([w], lr=0.1, base=base, weight_decay=0.01)
    for _ in range(3):
        optimizer.step(_losses(x, y, w))
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    twin = nn.Parameter(w.detach().clone())
    other = PopulationProjectorDescent([twin], lr=9.0)
    other.load_state_dict(torch.load(saved))
    again = copy.deepcopy(optimizer)
    third = again.param_groups[0]["params"][0]
    for _ in range(3):
        optimizer.step(_losses(x, y, w))
        other.step(_losses(x, y, twin))
        again.step(_losses(x, y, third))
    assert_close(twin, w, rtol=0, atol=0)
    assert_close(third, w, rtol=0, atol=0)


def test_a_scheduler_sets_the_learning_rate():
    x, y, w = _problem()
    optimizer = PopulationProjectorDescent([w], lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    optimizer.step(_losses(x, y, w))
    scheduler.step()
    before = w.detach().clone()
    optimizer.step(_losses(x, y, w))
    assert_close(w.detach(), before)


class _Stubborn(torch.autograd.Function):
    """A square whose backward looks at a value, which vmap does not allow."""

    @staticmethod
    def forward(ctx, u):
        ctx.save_for_backward(u)
        return u.square() / 2

    @staticmethod
    def backward(ctx, grad):
        (u,) = ctx.saved_tensors
        return grad * u if grad.sum().item() else grad * 0


def test_models_without_a_batched_backward_go_one_by_one():
    x, y, w = _problem()
    twin = nn.Parameter(w.detach().clone())
    optimizer, other = (PopulationProjectorDescent([p], lr=0.1) for p in (w, twin))
    optimizer.step(_losses(x, y, w))
    with pytest.warns(BackendWarning, match="one by one"):
        other.step(lambda: _Stubborn.apply(x @ twin - y))
    assert_close(twin.detach(), w.detach())
    other.step(lambda: _Stubborn.apply(x @ twin - y))  # said once


@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda w: w.square().sum(), r"vector of at least 2, got a tensor of shape \[\].*reduction='none'"),
        (lambda w: w.square()[:1], r"shape \[1\]"),
        (lambda w: torch.stack([w, w]), r"shape \[2, 3\]"),
        (lambda w: None, "got None"),
        (lambda w: w.detach(), "must carry a graph"),
        (lambda w: torch.ones(3, requires_grad=True) * 2, "none of the parameters"),
    ],
    ids=["scalar", "one", "matrix", "none", "detached", "foreign"],
)
def test_wrong_closures_are_refused(closure, message):
    w = nn.Parameter(torch.ones(3))
    optimizer = PopulationProjectorDescent([w])
    with pytest.raises(DataError, match=message):
        optimizer.step(lambda: closure(w))
    assert_close(w.detach(), torch.ones(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number ≥ 0, got -1.0"),
        ({"lr": float("nan")}, "lr must be"),
        ({"eps": 0.0}, "eps must be a finite number > 0, got 0.0"),
        ({"beta2": 1.0}, r"beta2 must be a number in \[0, 1\), got 1.0"),
        ({"weight_decay": "a"}, "weight_decay must be a finite number ≥ 0, got 'a'"),
        ({"base": "sgd"}, "base must be one of .*, got 'sgd'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(HyperparameterError, match=message):
        PopulationProjectorDescent([{"params": [nn.Parameter(torch.ones(2))], **options}])


@pytest.mark.parametrize(
    "p",
    [
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, dtype=torch.bfloat16),
        torch.eye(2).to_sparse(),
    ],
    ids=["complex", "half", "sparse"],
)
def test_unsupported_parameters_are_refused(p):
    with pytest.raises(GradientError, match="float32 or float64"):
        PopulationProjectorDescent([nn.Parameter(p)])


def test_a_refused_group_is_not_kept():
    optimizer = PopulationProjectorDescent([nn.Parameter(torch.ones(2))])
    with pytest.raises(HyperparameterError, match="lr"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.filterwarnings("ignore::poprisk.errors.BackendWarning")
def test_sparse_gradients_are_refused():
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = PopulationProjectorDescent(table.parameters())
    with pytest.raises(GradientError, match="sparse=False"):
        optimizer.step(lambda: table(torch.tensor([1, 2])).sum(dim=1))
