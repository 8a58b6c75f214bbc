"""The Jacobian averaged over a step: what it must map the step to, and what it is without the secant's help."""

import pytest
import torch
from networks import build, draw
from torch.testing import assert_close

from oracles import derivatives as naive
from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.autodiff.quadrature import choose_nodes, gauss_legendre
from poprisk._core.autodiff.segment import SegmentJacobian
from poprisk.errors import DataError, HyperparameterError

SMOOTH = ["mlp", "smooth cnn", "transformer"]


def _step(kind, size=0.3, n=5):
    """A model, its weights before and after a step of that norm, of the weights' own order, and inputs."""
    model = FlatModel(build(kind), "squared")
    w = model.weights
    direction = torch.randn(model.size, generator=torch.Generator().manual_seed(2), dtype=w.dtype)
    return model, w, w + size * direction / direction.norm(), draw(kind, n)


def _relative(actual, expected):
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("size", [1e-3, 0.3])
@pytest.mark.parametrize("kind", SMOOTH)
def test_smooth_networks_need_hardly_any_correction(kind, size):
    model, start, end, x = _step(kind, size)
    J = SegmentJacobian(model, start, end, x)
    assert J.correction <= max(1e-12, 4 * J.noise)
    assert J.nodes <= 10
    step = end - start
    assert_close(J.displacement, naive.outputs(model.module, end, x) - naive.outputs(model.module, start, x))
    assert _relative(J @ step, J.displacement) <= 1e-14
    open_ = SegmentJacobian(model, start, end, x, secant=False)
    assert open_.nodes == J.nodes
    assert _relative(open_ @ step, J.displacement) <= max(1e-12, 4 * J.noise)


@pytest.mark.parametrize("kind", SMOOTH)
def test_it_is_the_mean_jacobian(kind):
    model, start, end, x = _step(kind, n=3)
    J = SegmentJacobian(model, start, end, x)
    coarse, fine = (naive.mean_jacobian(model.module, start, end, x, points) for points in (8, 16))
    expected = (4 * fine - coarse) / 3  # Richardson: what is left is of fourth order
    assert _relative(J.to_dense(), expected) <= 1e-6


@pytest.mark.parametrize("secant", [True, False])
@pytest.mark.parametrize("kind", ["mlp", "relu", "cnn", "transformer"])
def test_push_pull_and_matrix_are_one_operator(kind, secant):
    model, start, end, x = _step(kind)
    J = SegmentJacobian(model, start, end, x, nodes=3, secant=secant)
    assert (J.nodes, J.closed) == (3, secant)
    N, d = J.shape
    generator = torch.Generator().manual_seed(5)
    X = torch.randn(d, 4, generator=generator, dtype=torch.float64)
    C = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    dense = J.to_dense()
    assert dense.shape == (N, d) == (len(J.displacement), model.size)
    assert _relative(J @ X, dense @ X) <= 1e-12
    assert _relative(J.T @ C, dense.T @ C) <= 1e-12
    assert _relative(J @ X[:, 0], dense @ X[:, 0]) <= 1e-12
    assert _relative(J.T @ C[:, 0], dense.T @ C[:, 0]) <= 1e-12
    assert _relative(C.T @ (J @ X), (J.T @ C).T @ X) <= 1e-12
    assert _relative(J.to_dense(block_size=2), dense) <= 1e-14


def test_the_secant_is_the_smallest_matrix_that_closes():
    model, start, end, x = _step("mlp", 2.0)
    closed, average = (SegmentJacobian(model, start, end, x, nodes=1, secant=s) for s in (True, False))
    step = end - start
    difference = closed.to_dense() - average.to_dense()
    residual = closed.displacement - average @ step
    assert closed.correction == average.correction == pytest.approx(float(residual.norm() / closed.displacement.norm()))
    assert closed.correction > 1e-3  # one node is not enough here: the secant has something to do
    assert_close(difference, torch.outer(residual, step) / step.dot(step), rtol=1e-10, atol=1e-13)
    assert _relative(closed @ step, closed.displacement) <= 1e-14


def test_kinks_end_at_the_cap_and_say_so():
    model, start, end, x = _step("relu", 3.0, n=8)
    J = SegmentJacobian(model, start, end, x)
    assert J.nodes == 32
    assert 1e-9 < J.correction < 1e-1
    few = SegmentJacobian(model, start, end, x, max_nodes=4)
    assert few.nodes == 4
    assert few.correction > J.correction
    assert _relative(few @ (end - start), few.displacement) <= 1e-14


def test_a_step_of_zero_leaves_the_jacobian():
    model, start, _, x = _step("mlp")
    J = SegmentJacobian(model, start, start, x)
    assert (J.correction, J.closed, J.nodes) == (0.0, False, 1)
    assert not J.displacement.any()
    assert _relative(J.to_dense(), naive.jacobian(model.module, start, x)) <= 1e-13


def test_a_step_lost_in_rounding_is_not_closed():
    model, start, end, x = _step("mlp", 1e-11)
    J = SegmentJacobian(model, start, end, x)
    assert J.noise > 1e-6
    assert not J.closed
    assert J.nodes == 1
    assert _relative(J.to_dense(), naive.jacobian(model.module, start, x)) <= 1e-10


def test_single_precision():
    model, start, end, x = _step("mlp")
    exact = SegmentJacobian(model, start, end, x).to_dense()
    single = FlatModel(model.module.float(), "squared")
    J = SegmentJacobian(single, start.float(), end.float(), x.float())
    assert J.nodes <= 8
    assert J.correction <= max(1e-5, 4 * J.noise)
    assert J.dtype == torch.float32
    assert _relative(J.to_dense().double(), exact) <= 1e-5
    assert _relative(J @ (end.float() - start.float()), J.displacement) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mlp", "smooth cnn", "transformer"])
def test_cuda_gives_the_same_operator(kind):
    model, start, end, x = _step(kind)
    expected = SegmentJacobian(model, start, end, x)
    there = FlatModel(build(kind).cuda(), "squared")
    J = SegmentJacobian(there, start.cuda(), end.cuda(), x.cuda())
    X, C = torch.eye(J.shape[1], 4).double(), torch.eye(J.shape[0], 4).double()
    assert _relative((J @ X.cuda()).cpu(), expected @ X) <= 1e-11
    assert _relative((J.T @ C.cuda()).cpu(), expected.T @ C) <= 1e-11
    assert _relative(J.to_dense().cpu(), expected.to_dense()) <= 1e-11


def test_several_inputs():
    start, end = torch.tensor([1.0, 2.0]).double(), torch.tensor([2.0, 0.0]).double()
    model = FlatModel.from_function(lambda w, ab: ab[0] * w[0] ** 2 + ab[1] * w[1], start, "squared")
    a, b = torch.tensor([1.0, 3.0]).double(), torch.tensor([2.0, 5.0]).double()
    J = SegmentJacobian(model, start, end, (a, b))
    assert_close(J.to_dense(), torch.stack([3 * a, b], dim=1))  # the mean of 2 w over [1, 2]


def test_low_precision_and_bad_numbers_are_refused():
    model, start, end, x = _step("mlp")
    for settings in ({"nodes": 0}, {"max_nodes": 0}, {"tolerance": 0.0}):
        with pytest.raises(HyperparameterError, match=next(iter(settings))):
            SegmentJacobian(model, start, end, x, **settings)
    with pytest.raises(DataError, match="one shape and dtype"):
        SegmentJacobian(model, start, end.float(), x)
    half = FlatModel(model.module.bfloat16(), "squared")
    with pytest.raises(DataError, match=r"bfloat16.*lost to rounding"):
        SegmentJacobian(half, start.bfloat16(), end.bfloat16(), x.bfloat16())


@pytest.mark.parametrize("nodes", [1, 2, 5, 32])
def test_quadrature_is_exact_to_its_degree(nodes):
    for degree in (0, 1, nodes, 2 * nodes - 1):
        total = sum(weight * theta**degree for theta, weight in gauss_legendre(nodes))
        assert total == pytest.approx(1 / (degree + 1), rel=1e-13)


def test_nodes_are_chosen_from_the_rate_of_convergence():
    tried = []

    def geometric(m):
        tried.append(m)
        return 10.0 ** (-2 * m)

    assert choose_nodes(geometric, 1e-11, 32) == 6
    assert tried == [1, 2, 4, 6]
    assert choose_nodes(lambda m: 1 / m, 1e-6, 20) == 20
    assert choose_nodes(lambda m: max(1e-9, 10.0 ** (-3 * m)), 1e-12, 32) == 4  # a floor of rounding
    assert choose_nodes(lambda m: {1: 0.1, 2: 0.3}.get(m, 1e-14), 1e-12, 32) == 4  # worse at first
    assert choose_nodes(lambda m: float("nan"), 1e-12, 32) == 1
