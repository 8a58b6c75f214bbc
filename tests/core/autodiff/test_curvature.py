"""The Hessian of the loss averaged over a segment of outputs."""

import pytest
import torch
from torch.testing import assert_close

from poprisk._core.autodiff.curvature import SegmentCurvature
from poprisk._core.autodiff.loss_derivatives import loss_gradients, loss_hessians
from poprisk.errors import DataError, HyperparameterError


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _quartic(u, y):
    return ((u - y) ** 4).sum() + torch.cos(u).prod()


def _case(name, n=6, p=3, move=0.7):
    p = 1 if name == "logistic" else p
    targets = {"cross_entropy": torch.arange(n) % p, "logistic": torch.arange(n) % 2}.get(name, _random(n, p, seed=1))
    loss = _quartic if name == "user" else name
    start = 2 * _random(n, p, seed=2)
    return loss, start, start + move * _random(n, p, seed=3), targets


def _change(loss, start, end, y):
    return (loss_gradients(loss, end, y) - loss_gradients(loss, start, y)).reshape(-1) / len(start)


@pytest.mark.parametrize("move", [1e-3, 0.7, 5.0])
@pytest.mark.parametrize("name", ["cross_entropy", "logistic", "user"])
def test_it_maps_the_outputs_change_to_the_gradients(name, move):
    loss, start, end, y = _case(name, move=move)
    B = SegmentCurvature(loss, start, end, y)
    step, change = (end - start).reshape(-1), B.gradient_change.reshape(-1)
    assert float((B @ step - change).norm()) <= 1e-14 * float(change.norm())
    assert_close(change, _change(loss, start, end, y), rtol=0, atol=1e-15 * float(loss_gradients(loss, end, y).norm()))
    assert torch.equal(B.blocks, B.blocks.mT)
    assert B.nodes <= 32
    assert B.correction <= 1e-11
    open_ = SegmentCurvature(loss, start, end, y, secant=False)
    missed = float((open_ @ step - change).norm() / change.norm())
    assert missed == pytest.approx(B.correction, rel=0.1, abs=1e-15)
    assert_close(open_.blocks, B.blocks, rtol=0, atol=1e-10 * float(B.blocks.abs().max()))


@pytest.mark.parametrize("name", ["cross_entropy", "logistic", "user"])
def test_it_is_the_mean_hessian(name):
    loss, start, end, y = _case(name)

    def midpoint(points):
        at = [start + (i + 0.5) / points * (end - start) for i in range(points)]
        return sum(loss_hessians(loss, u, y) for u in at) / (6 * points)

    expected = (4 * midpoint(60) - midpoint(30)) / 3  # Richardson: what is left is of fourth order
    assert_close(
        SegmentCurvature(loss, start, end, y).blocks, expected, rtol=0, atol=1e-6 * float(expected.abs().max())
    )


def test_squared_loss_is_one_nth_to_the_bit():
    _, start, end, y = _case("squared")
    for secant in (True, False):
        B = SegmentCurvature("squared", start, end, y, secant=secant)
        assert torch.equal(B.to_dense(), torch.eye(18, dtype=torch.float64) / 6)
        assert B.nodes == 1
        assert B.correction <= 1e-15
        assert B.smallest_eigenvalue == 1 / 6
    many = SegmentCurvature("squared", start, end, y, nodes=7)
    assert torch.equal(many.to_dense(), torch.eye(18, dtype=torch.float64) / 6)


def test_products_and_matrix_are_one_operator():
    loss, start, end, y = _case("cross_entropy")
    B, Y = SegmentCurvature(loss, start, end, y, nodes=2), _random(18, 4, seed=5)
    dense = B.to_dense()
    assert torch.equal(dense, dense.T)
    assert dense.shape == B.shape == (18, 18)
    assert not dense[:3, 3:].any()
    assert_close(B @ Y, dense @ Y)
    assert_close(B @ Y[:, 0], dense @ Y[:, 0])
    assert_close(B.T @ Y, dense.T @ Y)
    assert B.smallest_eigenvalue == pytest.approx(float(torch.linalg.eigvalsh(dense)[0]), abs=1e-15)


def test_the_secant_closes_one_node_symmetrically_and_says_how_much():
    loss, start, end, y = _case("cross_entropy", move=3.0)
    B, change = SegmentCurvature(loss, start, end, y, nodes=1), _change(loss, start, end, y)
    step = (end - start).reshape(-1)
    midpoint = loss_hessians(loss, (start + end) / 2, y) / 6
    residual = change - torch.block_diag(*midpoint) @ step
    assert B.correction == pytest.approx(float(residual.norm() / change.norm()), rel=1e-10)
    assert B.correction > 1e-2
    assert float((B @ step - change).norm()) <= 1e-14 * float(change.norm())
    # Powell–Broyden: the update vanishes on pairs of directions orthogonal to the step.
    s = (end - start)[0] / (end - start)[0].norm()
    off = torch.eye(3, dtype=torch.float64) - torch.outer(s, s)
    assert_close(off @ (B.blocks[0] - midpoint[0]) @ off, torch.zeros(3, 3, dtype=torch.float64), rtol=0, atol=1e-16)


def test_a_negative_eigenvalue_is_reported():
    u = torch.zeros(2, 1, dtype=torch.float64)
    B = SegmentCurvature(lambda u, y: torch.cos(u).sum(), u, u + 0.1, u)
    assert B.smallest_eigenvalue == pytest.approx(-torch.sin(torch.tensor(0.1)).item() / 0.1 / 2)


def test_examples_that_do_not_move_keep_their_hessian():
    loss, start, end, y = _case("cross_entropy")
    end[0] = start[0]
    end[1] = start[1] + 1e-12
    B = SegmentCurvature(loss, start, end, y)
    assert_close(B.blocks[:2], loss_hessians(loss, start[:2], y[:2]) / 6, rtol=1e-10, atol=1e-14)
    assert torch.isfinite(B.blocks).all()
    still = SegmentCurvature(loss, start, start, y)
    assert still.correction == 0
    assert still.nodes == 1
    assert_close(still.blocks, loss_hessians(loss, start, y) / 6)


def test_outputs_keep_the_shape_the_loss_takes():
    start, end = _random(4, 3, 2, seed=2), _random(4, 3, 2, seed=3)
    y = torch.tensor([[0, 1], [2, 2], [1, 0], [0, 0]])
    B = SegmentCurvature("cross_entropy", start, end, y)
    assert B.shape == (24, 24)
    change = (loss_gradients("cross_entropy", end, y) - loss_gradients("cross_entropy", start, y)).reshape(-1) / 4
    assert float((B @ ((end - start).reshape(-1)) - change).norm()) <= 1e-14 * float(change.norm())


def test_single_precision():
    loss, start, end, y = _case("cross_entropy")
    B = SegmentCurvature(loss, start.float(), end.float(), y)
    assert B.dtype == torch.float32
    assert B.nodes <= 8
    assert_close(B.blocks.double(), SegmentCurvature(loss, start, end, y).blocks, rtol=1e-4, atol=1e-6)


def test_refusals():
    loss, start, end, y = _case("cross_entropy")
    with pytest.raises(DataError, match=r"float32 or float64, got torch\.bfloat16"):
        SegmentCurvature(loss, start.bfloat16(), end.bfloat16(), y)
    with pytest.raises(DataError, match="one shape"):
        SegmentCurvature(loss, start, end.float(), y)
    with pytest.raises(DataError, match="one target for each of the 6 examples"):
        SegmentCurvature(loss, start, end, y[:5])
    with pytest.raises(HyperparameterError, match="nodes"):
        SegmentCurvature(loss, start, end, y, nodes=0)
    with pytest.raises(DataError, match="scalar"):
        SegmentCurvature(lambda u, y: u, start, end, y)
