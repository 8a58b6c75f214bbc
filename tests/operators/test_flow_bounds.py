"""Gradient flow by the library's own means: its operators, their error, the path they are sums of, and the bounds."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from networks import build, draw
from recorded_runs import relative
from torch.testing import assert_close

from oracles.linear_model import flow_outputs, linear_operators
from poprisk._core.autodiff.flat import FlatModel
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling, anchored_coupling_of_jacobians, path_error
from poprisk.operators._dense import Discretization
from poprisk.operators._gradient_flow import flow_path, gradient_flow_operators
from poprisk.theory.path_bounds import (
    anchored_bound,
    coarse_bound,
    cumulative_bound,
    remainder_bound,
    visibility_bound,
    window_bounds,
)

LOSSES = ("squared", "cross_entropy")
ON_THE_RUN = {"visibility", "remainder", "predictor", "trajectory"}


def network(loss):
    """A small network, five examples and three test inputs."""
    everything = draw("mlp", 8)
    labels = torch.tensor([0, 2, 1, 1, 0])
    targets = 2 * torch.nn.functional.one_hot(labels, 3).double() if loss == "squared" else labels
    return FlatModel(build("mlp"), loss), everything[:5], targets, everything[5:]


def metric(model):
    """A preconditioner that treats weights unequally."""
    return 0.5 + torch.rand(model.size, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def flow(loss, intervals, *, preconditioned=False, test=True):
    """The operators of that network's flow, made once."""
    return cached_flow(loss, intervals, preconditioned, test)


@cache
def cached_flow(loss, intervals, preconditioned, test):
    model, x, y, q = network(loss)
    M = metric(model) if preconditioned else None
    return gradient_flow_operators(
        model, x, y, time=4.0, intervals=intervals, test_inputs=q if test else None, preconditioner=M
    )


def coupling_of(ops):
    return Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))


def anchor(loss, *, preconditioned=False):
    model, x, _, q = network(loss)
    root = metric(model).sqrt() if preconditioned else torch.ones(model.size, dtype=torch.float64)
    J_Q, J_S = (model.output_jacobian(model.weights, z).flatten(0, 1) * root for z in (q, x))
    return anchored_coupling_of_jacobians(J_Q, J_S)


def failing(bounds):
    return [str(bound) for bound in bounds if not bound.holds]


@pytest.mark.parametrize(("intervals", "preconditioned"), [(20, False), (80, False), (20, True)])
@pytest.mark.parametrize("loss", LOSSES)
def test_every_bound_holds_in_the_form_of_flow(loss, intervals, preconditioned):
    ops = flow(loss, intervals, preconditioned=preconditioned)
    coupling, A = coupling_of(ops), anchor(loss, preconditioned=preconditioned)
    bounds = window_bounds(coupling, ops.realized, predictors=[A, torch.zeros_like(A), coupling.matrix], form="flow")
    assert failing(bounds) == []
    assert {bound.name for bound in bounds if bound.form == "flow"} == ON_THE_RUN
    for bound in bounds:
        assert (bound.discretization > 0) == (bound.form == "flow")
    named = {bound.name: bound for bound in bounds[:-4]}
    assert "(discretization) holds" in str(named["remainder"])
    # The allowance is small beside what is bounded, and what is bounded is no trifle.
    assert named["visibility"].left > 0.1
    assert named["visibility"].discretization < 0.02 * named["visibility"].right
    assert named["predictor"].discretization < 0.02 * named["visibility"].left


@pytest.mark.parametrize("loss", LOSSES)
def test_the_error_of_the_intervals_is_what_the_remainder_shows_and_falls_with_their_square(loss):
    """R_perp = 0 under squared loss: all that is left on the left side is the midpoint rule's error."""
    coarse, fine = flow(loss, 20), flow(loss, 80)
    for name in ("train", "test", "root_dissipation"):
        order = np.log2(getattr(coarse.discretization, name) / getattr(fine.discretization, name)) / 2
        assert abs(order - 2) < 0.3, (name, order)
    assert fine.discretization.test == pytest.approx((fine.predicted_test - fine.test_displacement).norm().item())
    if loss == "squared":
        unstated = replace(fine.realized, discretization=Discretization())
        assert not remainder_bound(coupling_of(fine), unstated, "flow").holds


@pytest.mark.parametrize("loss", LOSSES)
def test_a_displacement_that_the_flow_did_not_cause_still_fails(loss):
    ops = flow(loss, 80)
    wrong = replace(ops.realized, test_displacement=ops.test_displacement + 1.0)
    assert not remainder_bound(coupling_of(ops), wrong, "flow").holds
    # Runs that take steps state no discretization.
    assert replace(ops, discretization=Discretization()).realized.discretization.test == 0.0


def test_without_a_test_set_there_is_nothing_to_bound_and_nothing_fails():
    ops = flow("squared", 20, test=False)
    bounds = window_bounds(coupling_of(ops), ops.realized, form="flow")
    assert failing(bounds) == []
    assert {bound.left for bound in bounds} == {0.0}
    unfit = replace(ops.realized, train_source=torch.ones_like(ops.output_gradient))
    with pytest.raises(DataError, match="knows no source"):
        visibility_bound(coupling_of(ops).channels, unfit, "flow")


@pytest.mark.parametrize("preconditioned", [False, True], ids=["plain", "preconditioned"])
@pytest.mark.parametrize("loss", LOSSES)
def test_the_path_is_what_the_operators_are_sums_of(loss, preconditioned):
    """And gives D_A = D_A^vis + N_A, with every bound through it."""
    model, x, y, q = network(loss)
    M = metric(model) if preconditioned else None
    path = flow_path(model, x, y, time=4.0, intervals=20, test_inputs=q, preconditioner=M)
    ops = flow(loss, 20, preconditioned=preconditioned)
    coupling, A_s = coupling_of(ops), anchor(loss, preconditioned=preconditioned)
    P, h = path.propagators, path.weights
    assert_close(h.sum().item(), 4.0)
    assert relative(torch.einsum("t,tij,tjk->ik", h, path.train_kernels, P), ops.train_transfer) < 1e-12
    assert relative(torch.einsum("t,tij,tjk->ik", h, path.cross_kernels, P), ops.test_transfer) < 1e-12
    W = torch.einsum("t,tji,tjk,tkl->il", h, P, path.train_kernels, P)
    assert relative(W, ops.dissipation_gramian) < 1e-12
    for A in (A_s, torch.zeros_like(A_s)):
        error = path.cumulative_error(A)
        assert error.mismatch < 1e-9
        assert error.smallest_slack > -1e-9
        assert error.off_path_slack is error.slack
        scale = torch.trace(path_error(coupling.channels, torch.zeros_like(A))).item()
        assert_close(error.visible, path_error(coupling.channels, A), rtol=1e-5, atol=1e-6 * scale)
        assert torch.trace(error.slack) > 1e-6 * torch.trace(error.total), "the split says nothing here"
        lifted = cumulative_bound(coupling.channels, A, error, ops.realized, "flow")
        assert failing([lifted, coarse_bound(error), anchored_bound(coupling, error)]) == []
        assert (
            lifted.discretization
            < 0.05
            * cumulative_bound(
                coupling.channels, torch.zeros_like(A), path.cumulative_error(torch.zeros_like(A)), ops.realized, "flow"
            ).right
        )


def test_a_preconditioned_flow_of_the_linear_model_has_its_closed_forms():
    """W^M, D^M and G^M to second order, P^M exactly; the displacements are those of the real flow of the weights."""
    rng = np.random.default_rng(0)
    X, X_test, y = rng.normal(size=(6, 4)), rng.normal(size=(3, 4)), rng.normal(size=6)
    M = np.array([0.25, 1.0, 2.0, 0.5])
    model = FlatModel(torch.nn.Linear(4, 1, bias=False).double(), "squared")
    w = model.weights.numpy()
    root = np.sqrt(M)
    exact = linear_operators(X * root, X_test * root, T=3.0)
    x, q = torch.from_numpy(X), torch.from_numpy(X_test)
    errors = []
    for intervals in (16, 32):
        ops = gradient_flow_operators(
            model,
            x,
            torch.from_numpy(y)[:, None],
            time=3.0,
            intervals=intervals,
            test_inputs=q,
            preconditioner=torch.from_numpy(M),
        )
        np.testing.assert_allclose(ops.propagator.numpy(), exact.P, rtol=1e-10, atol=1e-12)
        pairs = ((ops.dissipation_gramian, exact.W), (ops.train_transfer, exact.D), (ops.test_transfer, exact.G))
        errors.append([np.linalg.norm(a.numpy() - b) / np.linalg.norm(b) for a, b in pairs])
    order = np.log2(np.array(errors[0]) / np.array(errors[1]))
    assert (np.abs(order - 2) < 0.15).all(), order
    for found, X_eval in ((ops.train_displacement, X), (ops.test_displacement, X_test)):
        moved = flow_outputs(X * root, X_eval * root, y, w / root, 3.0) - X_eval @ w
        np.testing.assert_allclose(found.numpy(), moved, rtol=1e-5)
    assert relative(ops.predicted_test, ops.test_displacement) < 1e-2
    np.testing.assert_allclose(coupling_of(ops).matrix.numpy(), exact.A, rtol=1e-8, atol=1e-9)


def test_a_number_as_preconditioner_is_another_unit_of_time():
    model, x, y, q = network("cross_entropy")
    options = {"intervals": 10, "test_inputs": q}
    plain = gradient_flow_operators(model, x, y, time=1.0, **options)
    half = gradient_flow_operators(model, x, y, time=2.0, preconditioner=0.5, **options)
    for name in ("propagator", "dissipation_gramian", "train_transfer", "test_transfer", "train_displacement"):
        assert relative(getattr(half, name), getattr(plain, name)) < 1e-12, name


def test_what_is_no_preconditioner_is_refused():
    model, x, y, _ = network("squared")
    for bad, error, message in (
        (torch.ones(3), DataError, "a number or a vector"),
        (-1.0, HyperparameterError, "not negative, got a minimum of -1"),
        (float("nan"), HyperparameterError, "finite"),
    ):
        for function in (gradient_flow_operators, flow_path):
            with pytest.raises(error, match=message):
                function(model, x, y, time=1.0, intervals=2, preconditioner=bad)
