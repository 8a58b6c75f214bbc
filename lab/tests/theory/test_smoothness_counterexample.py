"""thm:smoothness_required: two networks, the same on the training set all along, different where none looked."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from poprisk._core.autodiff.flat import FlatModel

TRAIN = torch.tensor([[-1.0], [-0.4], [0.3], [0.9]], dtype=torch.float64)
HELD_OUT = torch.tensor([[0.6]], dtype=torch.float64)
WIDTH = 0.2


class Network(nn.Module):
    """A tanh network of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def forward(self, z):
        return self.layers(z)


class BumpedNetwork(Network):
    """The same plus ψ(z) φ(w): a C^∞ bump around the held-out point times a smooth function of all weights."""

    def forward(self, z):
        squares = ((z - HELD_OUT) / WIDTH).square()
        inside = squares < 1
        # ψ = exp(1 - 1/(1 - x²)) inside and 0 outside, with all its derivatives; 1 at the held-out point.
        bump = torch.where(inside, torch.exp(1 - 1 / (1 - torch.where(inside, squares, 0.0))), 0.0)
        return super().forward(z) + bump * self.phi()

    def phi(self):
        return 5 * sum(p.square().sum() for p in self.parameters())


def descend(module: nn.Module, steps: int = 25, lr: float = 0.3):
    """Full-batch gradient descent on squared loss; weights, outputs, Jacobians and losses on the training set."""
    model = FlatModel(module, "squared")
    targets = 1 + 2 * torch.tanh(2 * TRAIN)
    w, seen = model.weights, []
    for _ in range(steps + 1):
        outputs, jacobian = model.outputs(w, TRAIN), model.output_jacobian(w, TRAIN)
        seen.append((w, outputs, jacobian, 0.5 * (outputs - targets).square()))
        w = w - lr * torch.einsum("ip,ipd->d", outputs - targets, jacobian) / len(TRAIN)
    return model, seen


@pytest.fixture(scope="module")
def runs():
    torch.manual_seed(0)
    plain, bumped = Network(), BumpedNetwork()
    bumped.load_state_dict(plain.state_dict())
    return descend(plain), descend(bumped)


def test_the_two_runs_cannot_be_told_apart_on_the_training_set(runs):
    (model, plain), (_, bumped) = runs
    w, _, jacobian, _ = plain[-1]
    h = 1e-5 * torch.randn(len(w), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close(jacobian @ h, (model.outputs(w + h, TRAIN) - model.outputs(w - h, TRAIN)) / 2, rtol=1e-6, atol=1e-12)
    assert plain[-1][3].mean() < 0.3 * plain[0][3].mean()  # it really trains
    drift = (plain[-1][2] - plain[0][2]).norm() / plain[0][2].norm()
    assert drift > 0.1  # and the kernel moves
    for ours, theirs in zip(plain, bumped, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_they_differ_at_a_held_out_point_by_the_bump(runs):
    (model, plain), (other, _) = runs
    start, end = plain[0][0], plain[-1][0]
    moved = model.outputs(end, HELD_OUT) - model.outputs(start, HELD_OUT)
    moved_otherwise = other.outputs(end, HELD_OUT) - other.outputs(start, HELD_OUT)
    phi = 5 * (end.square().sum() - start.square().sum())
    assert phi.abs() > 0.5
    assert_close(moved_otherwise - moved, phi.reshape(1, 1))


def test_only_the_smoothness_tells_them_apart(runs):
    """What the Sobolev bound looks at: the bumped network's Jacobian is far rougher as a function of the input."""
    (model, plain), (other, _) = runs
    from poprisk_lab.theory.torus import Torus, jacobian_sobolev_norm

    circle = Torus(dimension=1, size=128)
    # Inputs on a circle, z = 1.3 sin θ: both networks are smooth functions of the angle.
    z = 1.3 * torch.sin(circle.grid).reshape(-1, 1)
    norms = [jacobian_sobolev_norm(circle, m.output_jacobian(plain[-1][0], z), order=2.0) for m in (model, other)]
    assert norms[1] > 20 * norms[0]
    for m, norm in zip(
        (model, other), norms, strict=True
    ):  # (1 + k²) on each Fourier coefficient, of all weights at once
        waves = np.fft.fft(m.output_jacobian(plain[-1][0], z).flatten(1).numpy(), axis=0) / 128
        weighed = (1 + np.fft.fftfreq(128, 1 / 128)[:, None] ** 2) * waves
        assert norm == pytest.approx(math.sqrt(2 * math.pi) * np.linalg.norm(weighed, 2))
