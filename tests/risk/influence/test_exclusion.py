"""Predictions without an example: closed forms of ridge regression, real trainings, and when not to believe them."""

from functools import partial

import pytest
import torch
from recorded import Case
from torch import nn
from torch.testing import assert_close

from oracles.influence import central_difference
from poprisk.errors import HyperparameterError
from poprisk.risk._exclusion import exclusion, exclusion_risk
from poprisk.risk._influence.exclusion_sweep import ExcludedOutputs, ExclusionSweep
from poprisk.risk._influence.label_sensitivity import label_sensitivities
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.runs._problem import Problem
from poprisk.runs._training import train


def linear_run(loss="squared", *, steps, decay=0.0, batch_size=None, n=12, copies=1):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n // copies, 3, generator=generator, dtype=torch.float64).repeat(copies, 1)
    y = x @ torch.tensor([[1.0], [-0.5], [0.0]], dtype=torch.float64)
    y = y + 0.5 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    y = y if loss == "squared" else (y > 0).double()
    make = {"in_features": 3, "out_features": 1, "bias": False}
    rule = partial(torch.optim.SGD, lr=0.5 if loss == "squared" else 2.0, momentum=0.5, weight_decay=decay)
    problem = Problem(nn.Linear, loss, x, y, arguments=make)
    return train(problem, rule, steps, batch_size=batch_size, dtype=torch.float64, progress=False), x, y


def left_out(run, *, mass_preserving=False):
    """Outputs at i of the run trained without i, by our own stacked retraining (which has its own tests)."""
    from poprisk.risk._retraining.members import Members
    from poprisk.risk._retraining.retrain import retrain

    n = run.num_examples
    alpha = torch.full((n, n), n / (n - 1) if mass_preserving else 1.0, dtype=torch.float64).fill_diagonal_(0)
    weights = retrain(run, Members(alpha), progress=False).weights
    model = run.problem.model(torch.float64)
    rows = [model.outputs(w, run.problem.inputs[i : i + 1])[0] for i, w in enumerate(weights)]
    return torch.stack(rows), weights


def test_ridge_regression_at_its_minimum_is_exact():
    run, x, y = linear_run(steps=100, decay=0.1)
    hat = x @ torch.linalg.inv(x.T @ x + 12 * 0.1 * torch.eye(3, dtype=torch.float64)) @ x.T
    h = label_sensitivities(run).flatten()
    assert_close(h, hat.diagonal(), rtol=1e-8, atol=1e-10)
    found = exclusion(run, method="corrected")
    residual = (found.excluded_outputs - y).flatten()
    assert_close(residual, ((hat @ y - y).flatten() / (1 - h)), rtol=1e-7, atol=1e-9)
    assert_close(found.excluded_outputs, left_out(run)[0], rtol=1e-6, atol=1e-8)


def test_copies_are_removed_together_by_label_sensitivities():
    """Ridge regression on rows that come twice, with different targets: both copies go, in closed form."""
    run, x, y = linear_run(steps=100, decay=0.1, copies=2)
    found, n = exclusion(run, method="corrected", controls=0), len(x)
    expected = []
    for i in range(n):
        left = (x != x[i]).any(1)
        w = torch.linalg.solve(x[left].T @ x[left] + n * 0.1 * torch.eye(3, dtype=x.dtype), x[left].T @ y[left])
        expected.append(x[i] @ w)
    assert_close(found.excluded_outputs, torch.stack(expected), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mass_preserving", [False, True])
def test_linear_models_are_exact_whenever_they_stop(mass_preserving):
    run, _, _ = linear_run(steps=7, batch_size=4)
    outputs, weights = left_out(run, mass_preserving=mass_preserving)
    found = exclusion(run, mass_preserving=mass_preserving)
    assert_close(found.excluded_outputs, outputs, rtol=1e-10, atol=1e-12)
    sweep = ExclusionSweep(Unrolled(run), torch.arange(12), mass_preserving=mass_preserving)
    assert_close(sweep.at(7) + run.weights(7), weights, rtol=1e-10, atol=1e-12)
    corrected = exclusion(run, method="corrected").excluded_outputs
    assert float((corrected - outputs).norm() / (found.outputs - outputs).norm()) > 1e-3


def test_logistic_regression_is_nearly_exact_at_its_minimum():
    run, _, _ = linear_run("logistic", steps=150, decay=0.05)
    truth = left_out(run)[0]
    for method in ("corrected", "linearized"):
        found = exclusion(run, method=method, mass_preserving=False)
        assert float((found.excluded_outputs - truth).norm() / (found.outputs - truth).norm()) < 0.1, method


def test_blocks_of_several_outputs_are_differences_of_trainings():
    case = Case("mlp", "adam")
    H = label_sensitivities(case.run, torch.tensor([2]))[0]
    shift = torch.zeros(6, 3, dtype=torch.float64)
    for c in range(3):
        e = shift.clone()
        e[2, c] = 1.0
        measured = central_difference(lambda t, e=e: case.again(shift=t * e)(case.inputs[2:3])[0])
        assert_close(H[:, c], measured.detach(), rtol=1e-6, atol=1e-8)


def tanh_run(steps, momentum):
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(16, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(2 * x[:, :1]) + 0.3 * torch.randn(16, 1, generator=generator, dtype=torch.float64)

    def make():
        return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))

    rule = partial(torch.optim.SGD, lr=0.1, momentum=momentum)
    return train(Problem(make, "squared", x, y), rule, steps, dtype=torch.float64, progress=False), y


def test_correction_is_right_early_and_blows_up_at_interpolation():
    """The paper's formula: near 1/(1 - h) its predictions are doubtful, and real deletions correct the risk."""
    (early, y), (late, _) = tanh_run(8, 0.0), tanh_run(150, 0.9)
    for run in (early, late):
        truth = 0.5 * (left_out(run, mass_preserving=True)[0] - y).square().mean()
        risks = {m: exclusion_risk(run, method=m, controls=0) for m in ("corrected", "linearized")}
        assert not any(risk.valid for risk in risks.values())  # nothing has checked them
        ratio = {m: risk.value / float(truth) for m, risk in risks.items()}
        if run is early:
            assert 0.8 < ratio["corrected"] < 1.25
            assert 0.9 < ratio["linearized"] < 1.1
        else:
            found = exclusion(run, method="corrected", controls=0)
            assert float(found.doubt.max()) > 0.9
            assert found.doubtful.double().mean() > 0.05
            assert ratio["corrected"] > 2
        for method in ("corrected", "linearized"):  # all 16 examples are controls
            assert exclusion_risk(run, method=method).value == pytest.approx(float(truth), rel=1e-6)


def test_adam_and_the_gate_are_followed_without_an_example():
    """To second order in the removal: halving the example's share quarters nothing else, so compare with trainings."""
    case = Case("mlp", "adam", n=12, batch_size=4)
    truth = left_out(case.run, mass_preserving=True)[0]
    found = exclusion(case.run)
    assert float((found.excluded_outputs - truth).norm() / (found.outputs - truth).norm()) < 0.5
    assert found.losses.shape == (12,)
    some = exclusion(case.run, torch.tensor([3, 5]))
    assert_close(some.displacement, found.displacement[[3, 5]], rtol=1e-9, atol=1e-12)


def test_a_sample_of_examples_and_bad_methods():
    run = Unrolled(Case("mlp", "momentum").run)
    assert exclusion_risk(run, 4, controls=0).cost == 4
    assert exclusion_risk(run, 4).cost == 8  # and as many trainings
    assert not exclusion_risk(run, 1).valid
    with pytest.raises(HyperparameterError, match="linearized"):
        exclusion(run, method="guess")


def test_rounding_errors_are_no_bend():
    """Displacements of an example that no batch used are rounding errors of its outputs."""
    outputs = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 0.0], [1.0, 2.0]])
    tangent = torch.tensor([[1e-9, 0.0], [0.5, 0.0], [1e-8, 0.0], [1e-9, 0.0]])
    displaced = torch.tensor([[1e-7, 1e-7], [0.6, 0.0], [0.0, 1e-7], [0.1, 0.0]])
    bend = ExcludedOutputs(torch.arange(4), outputs, tangent, displaced, (2,)).bend
    assert_close(bend[:3], torch.tensor([0.0, 0.2, 0.0]))
    assert bend[3] > 1e7
