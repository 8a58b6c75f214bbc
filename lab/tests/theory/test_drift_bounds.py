"""Drift and the curvature remainder against their bounds, on runs of every rule."""

import pytest
import torch
from drift_runs import RULES, TEST, split_of, trained
from networks import build, draw
from torch.testing import assert_close

from poprisk._core.autodiff.flat import FlatModel
from poprisk.errors import HyperparameterError
from poprisk.operators._drift_diffusion import drift_diffusion
from poprisk.operators._gradient_descent import gradient_descent
from poprisk_lab.theory import drift_bounds
from poprisk_lab.theory.drift_bounds import curvature_bound, drift_bound


@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("rule", RULES)
def test_drift_is_within_its_bound(rule, loss):
    for start, sampling in ((0, "independent"), (2, "epochs")):
        assert drift_bound(split_of(rule, loss, start=start, sampling=sampling)).holds


def test_the_bound_on_drift_is_not_vacuous():
    model, x, y = FlatModel(build("mlp"), "squared"), draw("mlp", 8), torch.ones(8, 3, dtype=torch.float64)
    split = drift_diffusion(gradient_descent(model, x, y, lr=0.1, steps=3), model, x, y, TEST)
    bound = drift_bound(split)
    assert 0.5 < bound.tightness < 1
    assert bound.left == pytest.approx(split.drift_steps.sum(0).norm().item())
    assert bound.right == pytest.approx(3 * max(step.norm().item() for step in split.drift_steps))


@pytest.mark.parametrize("rule", ["sgd", "momentum", "adam", "poprisk"])
def test_the_remainder_is_within_its_bound(rule):
    run, _, model = trained(rule)
    along = curvature_bound(run, model, TEST)
    norm = curvature_bound(run, model, TEST, lipschitz="operator", nodes=6)
    remainder = split_of(rule).curvature_remainder.norm().item()
    for bounds in (along, norm):
        assert bounds.per_step.holds
        assert bounds.uniform.holds
        assert bounds.per_step.right <= bounds.uniform.right * (1 + 1e-12)
        assert bounds.per_step.left == pytest.approx(remainder, rel=1e-9)
    assert (along.smoothness <= norm.smoothness * (1 + 1e-9)).all()
    assert along.per_step.tightness > 0.1, "along the step the bound is not vacuous"
    assert_close(along.squared_steps[0], (run.weights(1) - run.weights(0)).square().sum())


def test_too_small_a_constant_breaks_the_bound():
    """One step along a parabola attains the bound: nothing smaller than the measured constant would do."""
    model = FlatModel.from_function(lambda w, x: x * w**2, torch.ones(1, dtype=torch.float64), "squared")
    x = torch.ones(2, 1, dtype=torch.float64)
    for lipschitz in ("directional", "operator"):
        run = gradient_descent(model, x, 0 * x, lr=0.1, steps=3)
        bounds = curvature_bound(run, model, x, lipschitz=lipschitz)
        assert_close(bounds.smoothness, torch.full((3,), 2 * 2**0.5, dtype=torch.float64))
        assert bounds.per_step.holds
        assert bounds.per_step.tightness == pytest.approx(1.0, abs=1e-9)


def test_large_jacobians_are_measured_by_their_products(monkeypatch):
    run, _, model = trained("adam")
    dense = curvature_bound(run, model, TEST, stop=2, lipschitz="operator", nodes=2)
    monkeypatch.setattr(drift_bounds, "_DENSE_ENTRIES", 0)
    free = curvature_bound(run, model, TEST, stop=2, lipschitz="operator", nodes=2)
    assert_close(free.smoothness, dense.smoothness, rtol=1e-3, atol=0)
    assert (free.smoothness >= dense.smoothness * (1 - 1e-9)).all()


def test_kinks_are_covered_by_the_stated_rounding():
    model, x = FlatModel(build("relu"), "squared"), draw("mlp", 8)
    run = gradient_descent(model, x, torch.ones(8, 3, dtype=torch.float64), lr=0.5, steps=3)
    assert curvature_bound(run, model, TEST, nodes=2).per_step.holds


def test_an_unknown_constant_is_refused():
    run, _, model = trained("sgd")
    # Under the run-time type checks it is they that refuse an unknown name.
    with pytest.raises((HyperparameterError, TypeError), match="global"):
        curvature_bound(run, model, TEST, lipschitz="global")
