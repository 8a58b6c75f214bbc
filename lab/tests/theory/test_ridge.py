"""The ridge path of a frozen problem and its best point."""

import math

import pytest
import torch
from spectral_cases import frozen_case

from poprisk.errors import DataError
from poprisk.theory.bias_variance import interpolation_variance, risk
from poprisk.theory.filters import (
    ridge_filter,
)
from poprisk.theory.frozen import frozen_problem
from poprisk_lab.theory.ridge import optimal_ridge, ridge_path

EXACT = {"rtol": 1e-10, "atol": 1e-10}


def test_ridge_path_and_its_best_point():
    problem, signal = frozen_case()[2:4]
    etas = torch.tensor([0.0, 0.05, 0.4, 3.0], dtype=torch.float64)
    path = ridge_path(problem, etas, signal, 0.5)
    for k, eta in enumerate(etas.tolist()):
        found = risk(problem, ridge_filter(problem, eta), signal, 0.5)
        assert (path.bias[k].item(), path.variance[k].item()) == pytest.approx((found.bias, found.variance), abs=1e-10)
    best = optimal_ridge(problem, signal, 0.5)
    grid = torch.logspace(-6, 6, 400, dtype=torch.float64)
    assert best.risk <= ridge_path(problem, grid, signal, 0.5).total.min().item() + 1e-12
    nearby = torch.tensor([0.99, 1.01], dtype=torch.float64) * best.eta
    assert (ridge_path(problem, nearby, signal, 0.5).total >= best.risk).all()
    # One mobility: the best share of the fit is b/(b + v) for bias b at rest and variance v of interpolation.
    plain = frozen_problem(3 * torch.eye(2).double(), torch.tensor([[1.0, 2.0]]).double())
    y = torch.tensor([1.0, 1.0], dtype=torch.float64)
    b, v = (plain.test_map @ plain.coordinates(y)).square().sum().item(), interpolation_variance(plain, 0.6)
    assert optimal_ridge(plain, y, 0.6).eta == pytest.approx(3 * v / (2 * b), rel=1e-5)
    assert optimal_ridge(plain, y, 0.0).risk == pytest.approx(0, abs=1e-10)
    assert math.isinf(optimal_ridge(plain, 0 * y, 1.0).eta)


def test_a_negative_penalty_is_refused():
    with pytest.raises(DataError, match="penalties"):
        ridge_path(frozen_case()[2], torch.tensor([-1.0]).double(), torch.ones(5).double(), 1.0)
