"""Jacobian and Hessian products of a batch against naive autograd, finite differences and each other."""

import jaxtyping
import pytest
import torch
from networks import build, draw
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from oracles import derivatives as naive
from poprisk._core.autodiff import blocks
from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.autodiff.loss_derivatives import loss_gradients, loss_hessians
from poprisk._core.autodiff.losses import logistic_loss, resolve_loss
from poprisk._core.autodiff.ways import JacobianWay, take_first_way
from poprisk.errors import BackendWarning, DataError

KINDS = ["mlp", "cnn", "transformer", "normalized"]


def _random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@pytest.fixture
def unchecked(monkeypatch):
    """Without the shape checks of the test suite, as users run it."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def _close(actual, expected, tolerance=1e-12):
    """Relative to the largest entry."""
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("chunk_size", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_jacobian(kind, chunk_size):
    module, x = build(kind), draw(kind)
    model = FlatModel(module, "squared", chunk_size=chunk_size)
    w = model.weights + 0.1
    J = naive.jacobian(module, w, x)
    V, C = _random(model.size, 3), _random(J.shape[0], 4)
    JV, JC = model.jvp(w, x, V), model.vjp(w, x, C)
    _close(JV, J @ V)
    _close(JC, J.T @ C)
    _close(model.jvp(w, x, V[:, 1]), J @ V[:, 1])
    _close(model.vjp(w, x, C[:, 2]), J.T @ C[:, 2])
    assert_close(C.T @ JV, JC.T @ V, rtol=1e-12, atol=1e-12 * float(C.norm() * JV.norm()))
    _close(J, model.output_jacobian(w, x).flatten(0, 1))
    assert model.jacobian_way is JacobianWay.FORWARD


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_limits_of_differences(kind):
    module, x = build(kind), draw(kind)
    model = FlatModel(module, "squared")
    w, v, h = model.weights, _random(model.size), 1e-5
    difference = (naive.outputs(module, w + h * v, x) - naive.outputs(module, w - h * v, x)) / (2 * h)
    _close(model.jvp(w, x, v), difference, 1e-7)  # h² and eps/h


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_its_examples(kind):
    module, x = build(kind), draw(kind)
    model = FlatModel(module, "squared")
    outputs = model.batch_outputs(model.weights, x)
    assert_close(outputs, module(x).detach(), rtol=1e-13, atol=1e-13)
    _close(outputs.flatten(1), model.outputs(model.weights, x), 1e-13)


def test_buffers_are_never_written_and_weights_stay():
    module, x = build("transformer"), draw("transformer")
    model = FlatModel(module, "squared")
    before = model.weights
    model.jvp(before, x, _random(model.size))
    model.vjp(before, x, _random(25))
    assert_close(module.calls, torch.zeros((), dtype=torch.float64))
    assert_close(model.weights, before, rtol=0, atol=0)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("limit", [30_000, 100_000])
def test_blocks_of_examples_and_columns_change_nothing(limit, monkeypatch):
    module, x = build("mlp"), draw("mlp", 150)
    model = FlatModel(module, "cross_entropy")
    w, V, C, y = model.weights, _random(model.size, 7), _random(450, 7), torch.arange(150) % 3
    whole = model.jvp(w, x, V), model.vjp(w, x, C), model.hvp(w, x, y, V), model.batch_outputs(w, x)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", limit)
    rows, columns = blocks.plan_blocks(150, 7, model._probe(w, x).held, 2 * model.size, 8)
    assert rows < 150
    assert columns < 7
    split = model.jvp(w, x, V), model.vjp(w, x, C), model.hvp(w, x, y, V), model.batch_outputs(w, x)
    for a, b in zip(whole, split, strict=True):
        _close(a, b, 1e-13)


@pytest.mark.parametrize("limit", [2**20, 2**24, 2**28])
@pytest.mark.parametrize("per_example", [1, 1000, 10**6])
def test_blocks_stay_within_their_limit(limit, per_example, monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", limit)
    rows, columns = blocks.plan_blocks(5000, 30, per_example, 100, 4)
    assert 1 <= rows <= 5000
    assert 1 <= columns <= 30
    assert (rows, columns) == (1, 1) or 4 * columns * (rows * per_example + 100) <= limit
    assert [i for s in blocks.slices(5000, rows) for i in range(5000)[s]] == list(range(5000))


def test_no_columns_give_no_columns():
    module, x = build("mlp"), draw("mlp")
    model = FlatModel(module, "squared")
    assert model.jvp(model.weights, x, _random(model.size, 0)).shape == (15, 0)
    assert model.vjp(model.weights, x, _random(15, 0)).shape == (model.size, 0)


class _Cube(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class _NoForwardMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Cube.apply(self.layer(x))


def test_double_backward_takes_over_where_forward_mode_is_missing():
    module, x = _NoForwardMode(), draw("mlp")
    model = FlatModel(module, "squared")
    V, y = _random(model.size, 3), _random(5, 3)
    with pytest.warns(BackendWarning, match="no forward mode, so products use double backward"):
        JV = model.jvp(model.weights, x, V)
    _close(JV, naive.jacobian(module, model.weights, x) @ V)
    assert model.jacobian_way is JacobianWay.DOUBLE_BACKWARD
    _close(model.jvp(model.weights, x, V), JV, 0)  # remembered: warns no more
    with pytest.warns(BackendWarning):
        HV = model.hvp(model.weights, x, y, V)
    loss = lambda w: naive.mean_loss(module, resolve_loss("squared"), w, x, y)  # noqa: E731
    _close(HV, torch.autograd.functional.hessian(loss, model.weights) @ V)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_rows_take_over_where_double_backward_is_missing_too(monkeypatch):
    module, x = nn.EmbeddingBag(7, 4).double(), torch.arange(6).view(2, 3)
    model = FlatModel(module, "squared")
    V = _random(model.size, 3)
    with pytest.warns(BackendWarning) as warned:
        JV = model.jvp(model.weights, x, V)
    assert [str(w.message).split(":")[0] for w in warned if w.category is BackendWarning] == [
        "this model allows no forward mode, so products use double backward, which costs more",
        "this model allows no double backward, so products use Jacobian rows, which costs more",
    ]
    _close(JV, naive.jacobian(module, model.weights, x) @ V)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1)
    _close(model.jvp(model.weights, x, V), JV, 1e-13)


def test_other_errors_are_not_taken_for_a_missing_derivative():
    def broken():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        take_first_way({JacobianWay.FORWARD: broken, JacobianWay.ROWS: lambda: torch.zeros(1)}, None)


def test_the_encoder_layer_of_inference_has_derivatives():
    torch.manual_seed(0)
    module = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True).double().eval()
    model, x = FlatModel(module, "squared"), _random(3, 5, 4)
    V = _random(model.size, 2)
    _close(model.jvp(model.weights, x, V), model.output_jacobian(model.weights, x).flatten(0, 1) @ V)
    assert torch.backends.mha.get_fastpath_enabled()


def _targets(name, n, p):
    return {
        "squared": _random(n, p),
        "cross_entropy": torch.arange(n) % p,
        "logistic": torch.arange(n) % 2,
        "user": _random(n, p),
    }[name]


def _user_loss(u, y):
    return ((u - y) ** 4).sum() + u.prod()


@pytest.mark.parametrize("name", ["squared", "cross_entropy", "logistic", "user"])
def test_second_derivatives(name):
    p = 1 if name == "logistic" else 3
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, p)).double(), draw("mlp")
    loss, y = _user_loss if name == "user" else name, _targets(name, 5, p)
    model = FlatModel(module, loss, chunk_size=2)
    w, score = model.weights, resolve_loss(loss)
    V = _random(model.size, 3)
    H = torch.autograd.functional.hessian(lambda v: naive.mean_loss(module, score, v, x, y), w)
    _close(model.hvp(w, x, y, V), H @ V)
    _close(model.hvp(w, x, y, V[:, 0]), H @ V[:, 0])
    u = model.batch_outputs(w, x)
    B = torch.stack([torch.autograd.functional.hessian(lambda v, a=a: score(v, y[a]), u[a]) for a in range(5)])
    blocks_ = model.output_hessian(w, x, y)
    _close(blocks_, B)
    assert torch.equal(blocks_, blocks_.mT)
    _close(model.output_gradient(w, x, y), loss_gradients(loss, u, y))


def test_cross_entropy_of_places_probabilities_and_ignored_classes():
    u, y = _random(4, 3, 2), torch.tensor([[0, 1], [2, 2], [1, 0], [0, 0]])
    H = loss_hessians("cross_entropy", u, y).view(4, 3, 2, 3, 2)
    for place in range(2):
        _close(H[:, :, place, :, place], loss_hessians("cross_entropy", u[..., place], y[:, place]))
        assert_close(H[:, :, place, :, 1 - place], torch.zeros(4, 3, 3, dtype=u.dtype))
    soft = F.one_hot(y[:, 0], 3).double()
    _close(loss_hessians("cross_entropy", u[..., 0], soft), loss_hessians("cross_entropy", u[..., 0], y[:, 0]))
    assert not loss_hessians("cross_entropy", u[:1, :, 0], torch.tensor([-100])).any()


def test_logistic_loss_keeps_its_digits():
    u = torch.tensor([-40.0, -1.0, 0.0, 30.0], dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 1])
    expected = torch.stack([F.softplus(v if t == 0 else -v, threshold=1e9) for v, t in zip(u, y, strict=True)])
    assert_close(torch.stack([logistic_loss(v, t) for v, t in zip(u, y, strict=True)]), expected, rtol=1e-14, atol=0)
    gradient = torch.where(y == 0, torch.sigmoid(u), -torch.sigmoid(-u))[:, None]
    assert_close(loss_gradients("logistic", u, y), gradient, rtol=1e-14, atol=0)
    curvature = (torch.sigmoid(u) * torch.sigmoid(-u))[:, None, None]
    assert_close(loss_hessians("logistic", u, y), curvature, rtol=1e-13, atol=0)
    assert_close(loss_hessians("logistic", u[:, None], y[:, None]), curvature, rtol=1e-13, atol=0)
    with pytest.raises(DataError, match="one output and one target"):
        logistic_loss(u, y)


def test_cross_entropy_keeps_its_digits_where_fitted():
    u, y = torch.tensor([[60.0, 0.0, 1.0]], dtype=torch.float64), torch.tensor([0])
    small = torch.exp(u[0, 1:] - 60)  # the other probabilities, 1e-26
    gradient = torch.cat([-small.sum(0, keepdim=True), small])
    assert_close(loss_gradients("cross_entropy", u, y)[0], gradient, rtol=1e-13, atol=0)
    assert_close(loss_hessians("cross_entropy", u, y)[0, 0], -gradient, rtol=1e-13, atol=0)
    assert not loss_gradients("cross_entropy", u, torch.tensor([-100])).any()


def test_a_pure_function_is_a_model(unchecked):
    module, x = build("mlp"), draw("mlp")
    reference = FlatModel(module, "squared")

    def function(w, inputs):
        h = torch.tanh(inputs @ w[:24].view(6, 4).T + w[24:30])
        h = F.gelu(h @ w[30:60].view(5, 6).T + w[60:65])
        return h @ w[65:80].view(3, 5).T + w[80:]

    model = FlatModel.from_function(function, reference.weights, "squared")
    w, V, C, y = model.weights, _random(83, 2), _random(15, 2), _random(5, 3)
    _close(model.jvp(w, x, V), reference.jvp(w, x, V))
    _close(model.vjp(w, x, C), reference.vjp(w, x, C))
    _close(model.hvp(w, x, y, V), reference.hvp(w, x, y, V))
    _close(model.per_example_gradients(w, x, y), reference.per_example_gradients(w, x, y))
    pair = FlatModel.from_function(lambda w, ab: (ab[0] * w).sum(1) * ab[1], torch.ones(4).double(), "squared")
    assert_close(pair.jvp(pair.weights, (x, x[:, 0]), pair.weights), x.sum(1) * x[:, 0])
    with pytest.raises(DataError, match="one flat vector of floating-point numbers"):
        FlatModel.from_function(function, torch.zeros(3, dtype=torch.int64), "squared")


def _every_product(model, w, x):
    n = x.shape[0]
    yield lambda: model.jvp(w, x, torch.ones_like(w))
    yield lambda: model.vjp(w, x, torch.ones(n * 3, dtype=w.dtype))
    yield lambda: model.hvp(w, x, torch.zeros(n, 3, dtype=w.dtype), torch.ones_like(w))
    yield lambda: model.output_hessian(w, x, torch.zeros(n, 3, dtype=w.dtype))
    yield lambda: model.batch_outputs(w, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_refused_for_exact_work_only(dtype):
    model, x = FlatModel(build("mlp").to(dtype), "squared"), draw("mlp").to(dtype)
    for product in _every_product(model, model.weights, x):
        with pytest.raises(DataError, match=rf"'0.weight' is {dtype}.*\.double\(\)"):
            product()
    assert model.per_example_gradients(model.weights, x, torch.zeros(5, 3, dtype=dtype)).dtype == dtype


def test_hidden_rounding_is_refused():
    module, x = build("mlp").float(), draw("mlp").float()
    model = FlatModel(module, "squared")
    for product in _every_product(model, model.weights.double(), x):
        with pytest.raises(DataError, match=r"module.s weights, torch\.float32, got torch\.float64"):
            product()
    with torch.autocast("cpu"), pytest.raises(DataError, match="autocast"):
        model.jvp(model.weights, x, model.weights)
    model = FlatModel.from_function(lambda w, x: (x * w).bfloat16(), torch.ones(4), "squared")
    with pytest.raises(DataError, match=r"outputs of torch.float32, got torch.bfloat16"):
        model.jvp(model.weights, x, model.weights)


class _Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.layer(x)
        return u - u.mean(dim=0)


class _Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.layer(x), 0.5, self.training)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (_Centred(), "changed with the other examples"),
        (_Random(), "draws at random"),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double(), "training mode and mixes the batch"),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.1)).double(), "draws at random"),
    ],
)
def test_modules_that_mix_or_draw_are_refused(module, reason):
    model, x = FlatModel(module, "squared"), draw("mlp")
    for product in _every_product(model, model.weights, x):
        with pytest.raises(DataError, match=reason):
            product()


def test_shapes_are_checked(unchecked):
    model, x = FlatModel(build("mlp"), "squared"), draw("mlp")
    w = model.weights
    with pytest.raises(DataError, match=r"V must be \[83\] or \[83, k\] of torch.float64, got shape \[82\]"):
        model.jvp(w, x, w[1:])
    with pytest.raises(DataError, match=r"C must be \[15\] or \[15, k\] of torch.float64, got .* torch.float32"):
        model.vjp(w, x, torch.zeros(15))
    with pytest.raises(DataError, match=r"one target for each of the 5 examples, got shape \[4, 3\]"):
        model.hvp(w, x, torch.zeros(4, 3).double(), w)
    with pytest.raises(DataError, match="at least 1"):
        model.jvp(w, x[:0], w)
