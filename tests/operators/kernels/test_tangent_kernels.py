"""Kernels of every method against naive Jacobians, with and without a preconditioner."""

import pytest
import torch
from kernel_models import MODELS, Overwritten, Slope, Straight, make, naive_jacobian
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._kernels.features import Recipe, compute_features, contract
from poprisk.operators._kernels.layers import _consumers, _reached_through, find_structure
from poprisk.operators._kernels.method import Method, choose_method, method_costs
from poprisk.operators._kernels.products import kernel_operator
from poprisk.operators._kernels.tangent import cross_kernel, output_trace, train_kernel

EXACT = dict(rtol=1e-10, atol=1e-10)
METHODS = [Method.AUTO, Method.JACOBIAN_CONTRACTION, Method.LAYER_FACTORS, Method.VECTOR_PRODUCTS]


def diagonal(model: FlatModel, kind: str) -> torch.Tensor | float | None:
    if kind == "diagonal":
        M = torch.rand(model.size, dtype=torch.float64)
        M[::3] = 0  # a closed gate
        return M
    if kind == "layerwise":  # one number per parameter, which leaves outer products intact
        pieces = [torch.full((p.numel(),), 1.0 + i) for i, p in enumerate(model.parameters.values())]
        return torch.cat(pieces).double()
    return {"none": None, "number": 0.3}[kind]


CASES = [(name, kind) for name in MODELS for kind in ("none", "diagonal")]


@pytest.mark.parametrize(("name", "kind"), [*CASES, ("multilayer", "number"), ("words", "layerwise")])
def test_every_method_equals_the_naive_kernel(name, kind):
    model, w, x = make(name, n=6)
    x, q = x[:4], x[4:]
    J, J_Q, M = naive_jacobian(model, x), naive_jacobian(model, q), diagonal(model, kind)
    weighted = J if M is None else J * M
    for method in METHODS:
        K = train_kernel(model, w, x, preconditioner=M, method=method)
        assert_close(K, weighted @ J.T, **EXACT)
        assert torch.equal(K, K.T)
        K_QS = cross_kernel(model, w, q, x, preconditioner=M, method=method)
        assert_close(K_QS, J_Q @ weighted.T, **EXACT)


@pytest.mark.parametrize("name", MODELS)
def test_layers_as_factors_and_as_rows_agree(name):
    # Which of the two is cheaper depends on sizes: here every layer goes both ways.
    model, w, x = make(name)
    structure = find_structure(model, w, x)
    J = naive_jacobian(model, x)
    for factored in (True, False):
        layers = (structure.layers, ()) if factored else ((), structure.layers)
        features = compute_features(model, w, Recipe(structure, *layers, {}), x, chunk=4)
        assert_close(contract(features, features), J @ J.T, **EXACT)


def test_layers_are_factored_only_where_that_is_proved():
    found = {name: [layer.name for layer in find_structure(*make(name)).layers] for name in MODELS}
    assert found["multilayer"] == ["0", "2"]  # the last is a subclass with its own forward
    assert found["convolutions"] == ["0", "2", "6", "8"]  # not the grouped one
    assert found["transformer"] == ["place", "query", "key", "value", "hidden.0", "hidden.2"]  # not the embedding
    assert found["tied"] == []  # a shared matrix, and a layer called twice
    assert found["words"] == ["embedding", "head"]


def test_hooks_and_parametrized_layers_are_differentiated_plainly():
    model, w, x = make("multilayer")
    model.module[0].register_forward_hook(lambda module, args, out: 3 * out)
    assert [layer.name for layer in find_structure(model, w, x).layers] == ["2"]
    J = naive_jacobian(model, x)
    assert_close(train_kernel(model, w, x), J @ J.T, **EXACT)
    module = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    parametrize.register_parametrization(module[0], "weight", nn.Tanh())
    model, x = FlatModel(module, "squared"), torch.randn(4, 3, dtype=torch.float64)
    assert [layer.name for layer in find_structure(model, model.weights, x).layers] == ["2"]
    J = naive_jacobian(model, x)
    assert_close(train_kernel(model, model.weights, x), J @ J.T, **EXACT)


def test_an_input_overwritten_after_the_call_is_not_taken_for_the_signal():
    model = FlatModel(Overwritten().double(), "squared")
    structure = find_structure(model, model.weights, torch.randn(3, 4, dtype=torch.float64))
    assert [layer.name for layer in structure.layers] == ["frozen_first"]


def test_derivatives_inside_the_forward_are_seen():
    x = torch.randn(4, 1, dtype=torch.float64)
    model = FlatModel(Slope().double(), "squared")
    assert find_structure(model, model.weights, x).layers == ()
    J = naive_jacobian(model, x)
    assert_close(train_kernel(model, model.weights, x), J @ J.T, **EXACT)


def test_uses_through_the_graph_of_a_layer_are_seen():
    # The double backward pass reaches the weight through the very transpose that the forward made: one edge to the
    # weight, and two uses.
    module = Straight().double()
    seen = []
    module.map.register_forward_hook(lambda layer, args, out: seen.append(out.grad_fn))
    leaf = module.map.weight
    out = module(torch.randn(1, 2, dtype=torch.float64))
    consumers = _consumers(out)
    assert len(consumers[id(leaf)]) == 1
    assert not _reached_through(seen[0], leaf, consumers)
    plain = torch.tanh(module.map(torch.randn(1, 2, dtype=torch.float64)))
    assert _reached_through(seen[1], leaf, _consumers(plain))
    assert not _reached_through(seen[1], torch.zeros(1), _consumers(plain))


def test_other_weights_than_the_modules_own():
    model, w, x = make("convolutions")
    K = train_kernel(model, 0.5 * w, x)
    assert all(not child._forward_hooks for child in model.module.modules())
    with torch.no_grad():
        for p in model.parameters.values():
            p.mul_(0.5)
    J = naive_jacobian(model, x)
    assert_close(K, J @ J.T, **EXACT)
    assert not torch.allclose(K, train_kernel(model, w, x))


def test_a_linear_model_has_the_kernel_of_its_inputs():
    # u = A x + c: K = (x xᵀ + 1) ⊗ I, whatever the weights
    x = torch.randn(5, 3, dtype=torch.float64)
    model = FlatModel(nn.Linear(3, 2).double(), "squared")
    expected = torch.kron(x @ x.T + 1, torch.eye(2, dtype=torch.float64))
    K = train_kernel(model, model.weights, x)
    assert_close(K, expected)
    assert_close(output_trace(K, outputs=2), 2 * (x @ x.T + 1))


def test_several_inputs_and_outputs_of_any_shape():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 4), nn.Linear(3, 4)

        def forward(self, x, y):
            return (self.first(x) * self.second(y)).view(-1, 2, 2)

    model = FlatModel(Pair().double(), "squared")
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    J = model.output_jacobian(model.weights, (x, y)).flatten(0, 1)
    for method in METHODS:
        assert_close(train_kernel(model, model.weights, (x, y), method=method), J @ J.T)


def test_methods_have_names_and_float32_rounds():
    model, w, x = make("multilayer")
    K = train_kernel(model, w, x)
    assert torch.equal(train_kernel(model, w, x, method="layer factors"), K)
    single = FlatModel(model.module.float(), "squared")
    assert_close(train_kernel(single, w.float(), x.float()).double(), K, rtol=1e-4, atol=1e-4 * K.abs().max().item())


def test_the_kernel_is_positive_semidefinite():
    for name in MODELS:
        values = torch.linalg.eigvalsh(train_kernel(*make(name)))
        assert values[0] > -1e-12 * values[-1]


@pytest.mark.parametrize("name", ["multilayer", "transformer"])
def test_the_operator_equals_the_matrix(name):
    model, w, x = make(name)
    x, q, M = x[:4], x[4:], diagonal(model, "diagonal")
    K, K_QS = kernel_operator(model, w, x, preconditioner=M), kernel_operator(model, w, q, x, preconditioner=M)
    assert K.symmetric
    assert not K_QS.symmetric
    assert_close(K.to_dense(), train_kernel(model, w, x, preconditioner=M), **EXACT)
    assert_close(K_QS.to_dense(), cross_kernel(model, w, q, x, preconditioner=M), **EXACT)
    assert adjoint_mismatch(K) < 1e-13
    assert adjoint_mismatch(K_QS) < 1e-13
    v = torch.randn(K.shape[0], dtype=torch.float64)
    assert_close(kernel_operator(model, w, x) @ v, train_kernel(model, w, x) @ v, **EXACT)


def test_costs_decide():
    model, w, x = make("multilayer")
    costs = method_costs(model, w, x)
    N, d = 18, model.size
    contraction, factors = costs[Method.JACOBIAN_CONTRACTION], costs[Method.LAYER_FACTORS]
    forward = 2 * (5 * 40 + 40 * 40 + 40 * 3)
    assert contraction.flops == N * 2 * forward + N**2 / 2 * 2 * d
    assert factors.flops < contraction.flops
    assert factors.bytes < contraction.bytes
    assert choose_method(costs, memory=10**9) is Method.LAYER_FACTORS
    # Many outputs and every weight shared: products need no term in d N².
    shared = FlatModel(_Recurrent(), "squared")
    costs = method_costs(shared, shared.weights, torch.randn(50, 30))
    assert choose_method(costs, memory=10**9) is Method.VECTOR_PRODUCTS


class _Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.Linear(30, 30)

    def forward(self, x):
        return self.step(torch.tanh(self.step(x)))


def test_what_is_refused():
    model, w, x = make("multilayer")
    with pytest.raises(DataError, match="flat vector"):
        train_kernel(model, w[:-1], x)
    with pytest.raises(DataError, match="finite"):
        train_kernel(model, w * float("nan"), x)
    with pytest.raises(DataError, match="number of examples"):
        train_kernel(model, w, x[:0])
    with pytest.raises(DataError, match="one shape and dtype"):
        cross_kernel(model, w, x, x[:, :3])
    with pytest.raises(DataError, match="preconditioner must be a number or a diagonal"):
        train_kernel(model, w, x, preconditioner=w[:3])
    with pytest.raises(DataError, match="not negative"):
        train_kernel(model, w, x, preconditioner=-1.0)
    with pytest.raises(DataError, match="dtype"):
        train_kernel(model, w.float(), x)
    with pytest.raises(HyperparameterError, match=r"one of .*'layer factors'"):
        train_kernel(model, w, x, method="fastest")
    with pytest.raises(HyperparameterError, match="positive number of bytes"):
        train_kernel(model, w, x, memory=0)
    with pytest.raises(DataError, match="multiples of p = 4"):
        output_trace(torch.zeros(6, 6), outputs=4)


@pytest.mark.parametrize(
    ("module", "dtype", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), torch.float32, "training mode"),
        (nn.Linear(2, 2).bfloat16(), torch.bfloat16, "bfloat16"),
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()), torch.float32, "one dtype"),
    ],
)
def test_modules_that_are_refused(module, dtype, message):
    model = FlatModel(module, "squared")
    with pytest.raises(DataError, match=message):
        train_kernel(model, model.weights, torch.zeros(3, 2, dtype=dtype))
