"""The scaled kernel and its rates against closed forms, and the drift of a kernel against dense norms."""

import pytest
import torch
from kernel_models import make
from torch import nn
from torch.testing import assert_close

from poprisk._core.autodiff.flat import FlatModel
from poprisk.errors import DataError
from poprisk.operators._kernels.drift import kernel_drift, operator_norm
from poprisk.operators._kernels.products import kernel_operator
from poprisk.operators._kernels.tangent import train_kernel
from poprisk.operators._kernels.timescales import curvature_root, scaled_kernel, scaled_kernel_operator, timescales


def classifier(n: int = 6) -> tuple[FlatModel, torch.Tensor, torch.Tensor, torch.Tensor]:
    model, w, x = make("multilayer", n=n)
    return FlatModel(model.module, "cross_entropy"), w, x, torch.arange(n) % 3


def test_squared_loss_gives_the_kernel_over_n():
    model, w, x = make("convolutions")
    K = train_kernel(model, w, x)
    H = model.output_hessian(w, x, torch.zeros(6, 3, dtype=torch.float64))
    assert_close(scaled_kernel(K, H), K / 6)


def test_rates_are_the_eigenvalues_of_curvature_times_kernel():
    model, w, x, y = classifier()
    K, H = train_kernel(model, w, x), model.output_hessian(w, x, y)
    B = torch.block_diag(*H) / 6
    root = torch.block_diag(*curvature_root(H))
    assert_close(root @ root, B)
    assert_close(root, root.T)
    scaled = scaled_kernel(K, H)
    assert_close(scaled, root @ K @ root)
    scale = timescales(scaled)
    rates = torch.linalg.eigvals(B @ K).real.sort(descending=True).values
    assert len(scale.rates) == 12  # cross-entropy has no curvature along (1, 1, 1): one zero for each of 6 examples
    assert scale.complete
    assert_close(scale.rates, rates[:12], rtol=1e-8, atol=0)
    assert_close(scale.times * scale.rates, torch.ones(12, dtype=torch.float64))
    assert_close(scale.condition, (rates[0] / rates[11]).item(), rtol=1e-8, atol=0)
    assert_close(scaled @ scale.vectors, scale.vectors * scale.rates)


def test_the_gradient_decays_at_the_rates():
    # One explicit Euler step of ∂g = -B K g along B^{1/2} v_i, in the limit of small steps of a linear model.
    x = torch.randn(5, 3, dtype=torch.float64)
    model = FlatModel(nn.Linear(3, 1, bias=False).double(), "squared")
    y, w = torch.randn(5, 1, dtype=torch.float64), model.weights
    scale = timescales(scaled_kernel(train_kernel(model, w, x), model.output_hessian(w, x, y)))
    assert len(scale.rates) == 3  # rank of x
    residual = model.output_gradient(w, x, y).flatten()
    step = 1e-3
    moved = w - step * model.vjp(w, x, residual / 5)
    change = model.output_gradient(moved, x, y).flatten() - residual
    assert_close(scale.vectors.T @ change, -step * scale.rates * (scale.vectors.T @ residual))


def test_matrix_free_rates_equal_dense_ones():
    model, w, x, y = classifier()
    H = model.output_hessian(w, x, y)
    dense = timescales(scaled_kernel(train_kernel(model, w, x), H))
    operator = scaled_kernel_operator(kernel_operator(model, w, x), H)
    assert operator.symmetric
    leading = timescales(operator, k=4)
    assert_close(leading.rates, dense.rates[:4], rtol=1e-8, atol=0)
    assert not leading.complete
    assert leading.condition < dense.condition
    assert not timescales(scaled_kernel(train_kernel(model, w, x), H), k=4).complete
    assert timescales(operator, k=18).complete


def test_a_cutoff_counts_small_rates_as_zero():
    scaled = torch.diag(torch.tensor([1.0, 1e-2, 1e-5], dtype=torch.float64))
    assert_close(timescales(scaled).condition, 1e5)
    cut = timescales(scaled, cutoff=1e-3)
    assert_close(cut.condition, 1e2)
    assert cut.complete


def test_curvatures_without_a_root_are_refused():
    A = torch.randn(3, 2, 2, dtype=torch.float64)
    root = curvature_root(A @ A.mT)  # of a convex loss there is one
    assert_close(root @ root, A @ A.mT / 3)
    with pytest.raises(DataError, match="convex"):
        curvature_root(-torch.eye(2).repeat(3, 1, 1))
    with pytest.raises(DataError, match=r"\[n, p, p\]"):
        curvature_root(torch.zeros(0, 2, 2))
    with pytest.raises(DataError, match="symmetric"):
        curvature_root(torch.tensor([[[1.0, 1.0], [0.0, 1.0]]]))
    with pytest.raises(DataError, match="same examples"):
        scaled_kernel(torch.eye(5), torch.ones(2, 2, 2))
    with pytest.raises(DataError, match="pass k"):
        timescales(kernel_operator(*make("multilayer")))
    with pytest.raises(DataError, match="cutoff"):
        timescales(torch.eye(2), cutoff=1.0)
    model, w, x = make("multilayer")
    with pytest.raises(DataError, match="symmetric train kernel"):
        scaled_kernel_operator(kernel_operator(model, w, x, x), torch.ones(6, 1, 1).repeat(1, 3, 3))


def test_drift_of_a_scalar_model_in_closed_form():
    # u = a b x: K = (a² + b²) x xᵀ
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones((), dtype=torch.float64)) for _ in range(2))

        def forward(self, x):
            return self.a * self.b * x

    model, x = FlatModel(Product(), "squared"), torch.randn(4, 1, dtype=torch.float64)
    times = [torch.tensor(each, dtype=torch.float64) for each in ([1.0, 1.0], [2.0, 1.0], [0.0, 1.0])]
    for dense in (True, False):
        result = kernel_drift(model, times, x, dense=dense, tolerance=1e-9)
        assert_close(result.drift, torch.tensor([0.0, 1.5, 0.5], dtype=torch.float64))
        assert_close(result.norms, torch.tensor([2.0, 5.0, 1.0], dtype=torch.float64) * x.square().sum())
        assert result.converged


def test_matrix_free_drift_equals_dense_drift():
    model, w, x = make("transformer")
    M = torch.rand(model.size, dtype=torch.float64)
    times = [w, w + 0.3 * torch.randn_like(w), 2 * w]
    dense = kernel_drift(model, iter(times), x, preconditioner=M)
    free = kernel_drift(model, times, x, preconditioner=M, dense=False, tolerance=1e-8)
    K = [train_kernel(model, each, x, preconditioner=M) for each in times]
    norm = lambda A: torch.linalg.matrix_norm(A, ord=2)  # noqa: E731
    expected = torch.stack([norm(each - K[0]) / norm(K[0]) for each in K])
    assert_close(dense.drift, expected)
    assert_close(free.drift, expected, rtol=1e-8, atol=1e-12)
    assert (free.residuals < 1e-6).all()


def test_drift_needs_something_to_compare_with():
    model, w, x = make("multilayer")
    with pytest.raises(DataError, match="at least one time"):
        kernel_drift(model, [], x)
    with pytest.raises(DataError, match="must not be zero"):
        kernel_drift(model, [w], x, preconditioner=0.0)
    assert operator_norm(torch.diag(torch.tensor([1.0, -4.0]))).value == 4.0
