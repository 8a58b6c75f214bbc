"""The loss gap as a Bregman divergence of the output gradient."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.theory.loss_gap import bregman_gap, loss_gap


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gradient(loss, u: torch.Tensor) -> torch.Tensor:
    u = u.clone().requires_grad_()
    return torch.autograd.grad(loss(u), u)[0]


@pytest.mark.parametrize(
    ("name", "p", "targets", "mean_loss"),
    [
        ("squared", 3, normal(1, 7, 3), lambda u, y: 0.5 * (u - y).square().sum() / len(u)),
        ("cross_entropy", 4, torch.arange(7) % 4, F.cross_entropy),
        ("cross_entropy", 4, normal(2, 7, 4).softmax(1), F.cross_entropy),
        ("logistic", 1, torch.arange(7) % 2, lambda u, y: F.binary_cross_entropy_with_logits(u, y.double()[:, None])),
        ("logistic", 1, normal(3, 7).sigmoid(), lambda u, y: F.binary_cross_entropy_with_logits(u, y[:, None])),
    ],
)
def test_the_loss_gap_is_the_divergence_of_the_gradient(name, p, targets, mean_loss):
    """eq:bregman_loss_gap, for losses that are convex in the outputs; the infimum by a long way down."""
    u = 3 * normal(0, 7, p)
    gap = bregman_gap(_gradient(lambda v: mean_loss(v, targets), u), targets, name)
    assert_close(gap, loss_gap(u, targets, name), rtol=1e-10, atol=1e-12)
    lowest = u
    for _ in range(600):
        lowest = lowest - 7 * _gradient(lambda v: mean_loss(v, targets), lowest)
    assert_close(gap, mean_loss(u, targets) - mean_loss(lowest, targets), rtol=3e-3, atol=3e-3)


def test_a_well_fitted_example_keeps_its_digits():
    """A loss of 4e-18, which 1 - p would lose."""
    g = torch.tensor([[-np.exp(-40.0), np.exp(-40.0)]], dtype=torch.float64)
    assert bregman_gap(g, torch.tensor([0]), "cross_entropy").item() == pytest.approx(np.exp(-40.0), rel=1e-6, abs=0.0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(DataError, match="check the 1/n"):
        bregman_gap(torch.tensor([[0.9, 0.9]]), torch.tensor([0]), "cross_entropy")
    with pytest.raises(DataError, match="one output per example"):
        bregman_gap(torch.ones(2, 2), torch.ones(2), "logistic")
    with pytest.raises(DataError, match="one row per example, 2, got 3"):
        bregman_gap(torch.ones(2, 2), torch.ones(3), "squared")
    with pytest.raises(DataError, match="class indices"):
        bregman_gap(torch.zeros(2, 3), torch.ones(2, 2), "cross_entropy")
    for function in (bregman_gap, loss_gap):
        with pytest.raises((HyperparameterError, TypeError), match="loss"):
            function(torch.ones(2, 2), torch.ones(2), "hinge")
