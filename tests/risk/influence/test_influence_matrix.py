"""The influence matrix by rows, by products and by probes; the first-order gap and its verdict."""

from functools import partial

import pytest
import torch
from recorded import Case
from torch import nn
from torch.testing import assert_close

from oracles.influence import central_difference
from poprisk._core.linalg.adjoint import adjoint_mismatch
from poprisk.errors import DataError, HyperparameterError
from poprisk.risk._first_order import first_order_risk, generalization_gap
from poprisk.risk._influence.matrix import influence_matrix, influence_on, influence_operator, self_influence
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.runs._problem import Problem
from poprisk.runs._training import train


def margin(u, y):
    """Another loss to evaluate by: minus the logit of the label."""
    return -u.gather(0, y.reshape(1)).sum()


def test_another_loss_and_other_points_are_differences_of_trainings():
    case = Case("mlp", "adam")
    fresh, labels = torch.randn(2, 4, dtype=torch.float64), torch.tensor([0, 2])
    found = influence_on(case.run, fresh, labels, loss=margin)
    eye = torch.eye(6, dtype=torch.float64)
    for j in (0, 4):
        measured = central_difference(lambda e, j=j: -case.again(alpha=1 - e * eye[j])(fresh)[[0, 1], labels])
        assert_close(found[:, j], measured.detach(), rtol=1e-6, atol=1e-7 * float(found.norm()))
    assert found.shape == (2, 6)


def test_least_squares_at_its_minimum_has_the_classical_influence():
    """J_ij = r_i x_i (XᵀX)⁻¹ x_j r_j: what Cook's influence functions say of a converged linear model."""
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)
    make = {"in_features": 2, "out_features": 1, "bias": False}
    problem = Problem(nn.Linear, "squared", x, y, arguments=make)
    rule = partial(torch.optim.SGD, lr=0.6, momentum=0.6)
    run = train(problem, rule, 150, dtype=torch.float64, progress=False)
    w = torch.linalg.lstsq(x, y).solution
    r = (x @ w - y).squeeze(1)
    assert_close(run.weights(150), w.squeeze(1), rtol=1e-8, atol=1e-8)
    assert_close(influence_matrix(run), r[:, None] * (x @ torch.linalg.inv(x.T @ x) @ x.T) * r, rtol=1e-6, atol=1e-8)


def test_products_and_probes_agree_with_the_matrix():
    unrolled = Unrolled(Case("mlp", "adam", n=12, batch_size=4).run)
    J = influence_matrix(unrolled)
    operator = influence_operator(unrolled)
    assert_close(operator.to_dense(), J, rtol=1e-9, atol=1e-12)
    assert adjoint_mismatch(operator, generator=torch.Generator().manual_seed(0)) < 1e-10
    assert_close(self_influence(unrolled).value, J.diagonal(), rtol=1e-12, atol=0)
    for method in ("xdiag", "hutchinson"):
        rough = self_influence(unrolled, products=10, method=method)
        slack = 5 * rough.standard_error + 1e-12
        assert bool(((rough.value - J.diagonal()).abs() < slack).all())


def test_both_gaps_are_their_traces():
    unrolled = Unrolled(Case("mlp", "adam", n=12, batch_size=4).run)
    J = influence_matrix(unrolled)
    C = torch.eye(12, dtype=torch.float64) - 1 / 12
    centred, plain = generalization_gap(unrolled), generalization_gap(unrolled, centred=False)
    assert centred.value == pytest.approx(float((J @ C).trace()) / 11, rel=1e-12)
    assert plain.value == pytest.approx(float(J.trace()) / 12, rel=1e-12)
    assert centred.cost == 12
    for method in ("xtrace", "hutchpp", "hutchinson"):
        rough = generalization_gap(unrolled, products=10, method=method)
        assert abs(rough.value - centred.value) < 5 * rough.standard_error + 1e-12
    with pytest.raises(HyperparameterError, match="xtrace"):
        generalization_gap(unrolled, products=10, method="guess")


def test_first_order_is_not_valid_with_a_large_error():
    early = Unrolled(Case("mlp", "momentum", n=12, steps=2, batch_size=12).run)
    found = first_order_risk(early)
    assert not found.valid
    assert "limit 7%" in found.reason
    losses = early.model.per_example_losses(early.last_weights, early.inputs, early.targets)
    assert found.value == pytest.approx(float(losses.mean()) + generalization_gap(early).value, rel=1e-9)


def test_infinite_losses_are_refused():
    case = Case("mlp", "momentum")
    with pytest.raises(DataError, match="not finite"):
        influence_operator(case.run, loss=lambda u, y: (u * float("inf")).sum())
    with pytest.raises(DataError, match="query 0 is not finite"):
        influence_on(case.run, torch.full((1, 4), float("nan"), dtype=torch.float64), torch.tensor([0]))
