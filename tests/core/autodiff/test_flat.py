"""The flat view of a module against plain autograd, example by example."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.autodiff.losses import cross_entropy_loss, resolve_loss, squared_loss
from poprisk.errors import DataError, HyperparameterError


def _network(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def _data(b: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(b, 4), draw(b, 3)


def _loop_gradient(module: nn.Module, value: torch.Tensor) -> torch.Tensor:
    parts = torch.autograd.grad(value, list(module.parameters()), retain_graph=True)
    return torch.cat([g.reshape(-1) for g in parts])


@pytest.mark.parametrize("chunk_size", [None, 1, 4])
@pytest.mark.parametrize("name", ["squared", "cross_entropy"])
def test_everything_equals_a_loop_over_examples(name, chunk_size):
    module, (x, y) = _network(), _data()
    if name == "cross_entropy":
        y = y.argmax(dim=1)
    model = FlatModel(module, name, chunk_size=chunk_size)
    w, loss = model.weights, resolve_loss(name)
    outputs = module(x)
    losses = [loss(outputs[a], y[a]) for a in range(6)]
    assert_close(model.outputs(w, x), outputs.detach())
    assert_close(model.per_example_losses(w, x, y), torch.stack(losses).detach())
    gradients = torch.stack([_loop_gradient(module, each) for each in losses])
    assert_close(model.per_example_gradients(w, x, y), gradients)
    assert_close(model.losses_and_gradients(w, x, y), (torch.stack(losses).detach(), gradients))
    J = torch.stack([torch.stack([_loop_gradient(module, u) for u in outputs[a]]) for a in range(6)])
    assert_close(model.output_jacobian(w, x), J)
    r = model.output_gradient(w, x, y)
    assert_close(torch.einsum("bpd,bp->bd", J, r), gradients)  # Eq. per_example_triple: g_a = J_aᵀ r_a
    if name == "squared":
        assert_close(r, (outputs - y).detach())


def test_other_weights_leave_the_module_alone():
    module, (x, _) = _network(), _data()
    model = FlatModel(module, "squared")
    before = model.weights
    doubled = model.outputs(2 * before, x)
    assert_close(model.weights, before)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(2)
    assert_close(doubled, module(x).detach())
    assert all(p.grad is None for p in module.parameters())


def test_one_row_of_weights_for_each_example():
    module, (x, y) = _network(), _data()
    model = FlatModel(module, "squared", chunk_size=4)
    W = model.weights * torch.linspace(0.5, 2, 6, dtype=torch.float64)[:, None]
    expected = torch.cat([model.per_example_losses(W[a], x[a : a + 1], y[a : a + 1]) for a in range(6)])
    assert_close(model.per_example_losses(W, x, y), expected)


class _Tied(nn.Module):
    """An encoder and a decoder that share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


def test_shared_weights_are_one_piece():
    torch.manual_seed(0)
    module, (x, _) = _Tied().double(), _data()
    model = FlatModel(module, "squared")
    assert model.size == 16
    loss = squared_loss(module(x[:1])[0], x[0])
    assert_close(model.per_example_gradients(model.weights, x[:1], x[:1])[0], _loop_gradient(module, loss))


def test_frozen_parameters_are_constants():
    module, (x, y) = _network(), _data()
    whole = FlatModel(module, "squared")
    expected = whole.per_example_gradients(whole.weights, x, y)
    for p in module[0].parameters():
        p.requires_grad_(False)
    model = FlatModel(module, "squared")
    assert model.size == 18
    assert_close(model.per_example_gradients(model.weights, x, y), expected[:, -18:])


class _Counter(nn.Module):
    """Writes a buffer on every call."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.scale


def test_buffers_are_never_written():
    module, (x, _) = _Counter(), _data()
    model = FlatModel(module, "squared")
    model.per_example_gradients(model.weights, x, x)
    assert_close(module.calls, torch.zeros((), dtype=torch.float64))


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2).double()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self.layer(a) * b).sum(dim=-1)


def test_several_inputs_and_scalar_outputs():
    module, (x, y) = _Two(), _data()
    model = FlatModel(module, "squared", chunk_size=4)
    pair = (x[:, :2], x[:, 2:])
    assert_close(model.outputs(model.weights, pair), module(*pair).detach().unsqueeze(1))
    loss = squared_loss(module(*pair)[3], y[3, 0])
    assert_close(model.per_example_gradients(model.weights, pair, y[:, 0])[3], _loop_gradient(module, loss))


def test_normalization_with_fixed_statistics_is_taken():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)).double().eval()
    model, (x, _) = FlatModel(module, "squared"), _data()
    assert_close(model.outputs(model.weights, x), module(x).detach())


def test_attention_and_embeddings_are_taken():
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Embedding(7, 4), nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    ).double()
    tokens, y = torch.arange(6).view(2, 3), torch.zeros(2, 3, 4, dtype=torch.float64)
    model = FlatModel(module, "squared")
    loss = squared_loss(module(tokens)[1], y[1])
    assert_close(model.per_example_gradients(model.weights, tokens, y)[1], _loop_gradient(module, loss))
    assert model.outputs(model.weights, tokens).shape == (2, 12)


@pytest.mark.parametrize(
    ("child", "remedy"),
    [
        (nn.BatchNorm1d(4), r"BatchNorm1d '1'.*training mode.*\.eval\(\)"),
        (nn.BatchNorm1d(4, track_running_stats=False).eval(), "no running statistics.*GroupNorm"),
        (nn.Dropout(0.1), r"Dropout '1'.*draws at random.*\.eval\(\)"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "InstanceNorm1d '1'.*running statistics"),
        (nn.RReLU(), "draws at random"),
    ],
)
def test_modules_that_mix_or_draw_are_refused(child, remedy):
    module, x = nn.Sequential(nn.Linear(4, 4), child).double(), _data()[0]
    model = FlatModel(module, "squared")
    for call in (model.outputs, model.output_jacobian):
        with pytest.raises(DataError, match=remedy):
            call(model.weights, x)
    for call in (model.per_example_losses, model.per_example_gradients, model.output_gradient):
        with pytest.raises(DataError, match=remedy):
            call(model.weights, x, x)


@pytest.mark.parametrize("child", [nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(4, 4, 2, dropout=0.1)])
def test_dropout_inside_other_layers_is_refused(child):
    model = FlatModel(child, "squared")
    with pytest.raises(DataError, match="draws at random"):
        model.outputs(model.weights, torch.ones(2, 4))


class _Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(x), 0.5, self.training)


class _Pair(_Functional):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layer(x), x


def test_functional_dropout_is_refused_when_it_runs():
    module, (x, y) = _Functional(), _data()
    model = FlatModel(module, "squared")
    with pytest.raises(DataError, match="draws at random"):
        model.per_example_gradients(model.weights, x, y)
    module.eval()
    assert model.per_example_gradients(model.weights, x, y).shape == (6, 15)


def test_refusals():
    module, (x, y) = _network(), _data()
    with pytest.raises(HyperparameterError, match="'hinge'"):
        FlatModel(module, "hinge")
    with pytest.raises(DataError, match="no trainable parameter"):
        FlatModel(nn.Tanh(), "squared")
    model = FlatModel(module, lambda u, y: (u - y).square())
    with pytest.raises(DataError, match=r"scalar for one example, got shape \[3\]"):
        model.per_example_losses(model.weights, x, y)
    model = FlatModel(module, "squared")
    with pytest.raises(DataError, match="one and the same number of examples"):
        model.per_example_losses(model.weights, x, y[:3])
    with pytest.raises(DataError, match=r"flat vector \[43\]"):
        model.outputs(model.weights[:-1], x)
    with pytest.raises(DataError, match="one tensor whose first axis"):
        FlatModel(_Pair(), "squared").outputs(torch.zeros(15, dtype=x.dtype), x)


def test_losses():
    u, y = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 0.0, 0.0])
    assert_close(squared_loss(u, y), torch.tensor(6.5))
    assert_close(cross_entropy_loss(u, torch.tensor(0)), u.exp().sum().log() - 1)
    assert_close(cross_entropy_loss(u, y), u.exp().sum().log() - 1)
    with pytest.raises(DataError, match=r"outputs, \[3\], got \[\]"):
        squared_loss(u, y[0])
    places = torch.stack([u, 2 * u], dim=1)
    expected = cross_entropy_loss(u, torch.tensor(0)) + cross_entropy_loss(2 * u, torch.tensor(1))
    assert_close(cross_entropy_loss(places, torch.tensor([0, 1])), expected)
