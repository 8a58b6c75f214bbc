"""The floor under all predictors, on recorded runs and in gradient flow."""

import pytest
import torch
from recorded_runs import LOSSES, NETWORKS, operators_of, window_of
from test_flow_bounds import anchor, flow

from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling
from poprisk_lab.theory.predictors import nonlinear_bound, predictor_error

RULES = ("momentum", "adam", "poprisk")


def coupling_of(ops):
    return Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", NETWORKS)
def test_no_predictor_of_a_run_beats_the_remainder(kind, rule, loss):
    window, coupling = window_of(kind, rule, loss, start=4), coupling_of(operators_of(kind, rule, loss, start=4))
    channels, A_s, A_o = coupling.channels, window.anchored_coupling(), coupling.matrix
    for predictor in (lambda x: A_o @ x, lambda x: A_s @ x, lambda x: torch.tanh(A_o @ x), lambda x: A_o @ x + 0.1):
        error = predictor_error(coupling, predictor, random_probes=4, scales=(0.3, 3.0))
        assert nonlinear_bound(error).holds, nonlinear_bound(error)
        assert error.rounding < 1e-2 * channels.visibility_norm**0.5, "an allowance that large would prove anything"


@pytest.mark.parametrize("rule", ["momentum", "adam"])
def test_where_nothing_is_missed_both_sides_are_rounding(rule):
    """R_perp = 0 under squared loss: the best predictor's error and the floor are both some rounding errors of C_Q."""
    coupling = coupling_of(operators_of("mlp", rule, "squared", start=0))
    error = predictor_error(coupling, lambda x: coupling.matrix @ x)
    assert coupling.channels.unresolved == 0
    assert 0 < error.floor < 1e-12
    assert nonlinear_bound(error).holds
    assert error.rounding < 1e-10 * coupling.channels.visibility_norm**0.5


@pytest.mark.parametrize("preconditioned", [False, True], ids=["plain", "preconditioned"])
@pytest.mark.parametrize("loss", LOSSES)
def test_nor_does_one_in_gradient_flow(loss, preconditioned):
    coupling = coupling_of(flow(loss, 20, preconditioned=preconditioned))
    A_s = anchor(loss, preconditioned=preconditioned)
    nonlinear = predictor_error(coupling, lambda moved: torch.tanh(A_s @ moved), random_probes=4)
    assert nonlinear_bound(nonlinear).holds
