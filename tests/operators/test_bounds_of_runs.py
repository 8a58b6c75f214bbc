"""The bounds through predictors, on networks that were trained: lifted, anchored, nonlinear; and on a part of W."""

import pytest
import torch
from recorded_runs import LOSSES, NETWORKS, operators_of, window_of

from poprisk.errors import DataError
from poprisk.operators._channels import dissipation_channels
from poprisk.operators._coupling import Coupling
from poprisk.operators._top_space import top_channels
from poprisk.theory.path_bounds import (
    anchored_bound,
    coarse_bound,
    cumulative_bound,
    predictor_bound,
    remainder_bound,
    visibility_bound,
    window_bounds,
)
from poprisk.theory.visibility_bounds import mobility_bound

RULES = ("momentum", "adam", "poprisk")


def coupling_of(ops, **options):
    return Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer, **options))


def failing(bounds):
    return [str(bound) for bound in bounds if not bound.holds]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", NETWORKS)
def test_bounds_through_predictors_hold(kind, rule, loss):
    window, ops = window_of(kind, rule, loss, start=4), operators_of(kind, rule, loss, start=4)
    coupling, realized = coupling_of(ops), ops.realized
    channels, A_s = coupling.channels, window.anchored_coupling()
    lifted = {}
    for name, A in (("anchored", A_s), ("zero", torch.zeros_like(A_s))):
        error = window.cumulative_error(A)
        lifted[name] = cumulative_bound(channels, A, error, realized)
        assert failing([lifted[name], coarse_bound(error), anchored_bound(coupling, error)]) == [], name
        assert coarse_bound(error).tightness > 0, name
    # The lifted bound of no predictor at all is far above rounding: the inequality is one between real numbers.
    assert lifted["zero"].left > 1e-4
    assert lifted["zero"].allowed < 1e-3 * lifted["zero"].right


@pytest.mark.parametrize("share", [0.03, 0.3])
@pytest.mark.parametrize("rule", RULES)
def test_a_cut_off_makes_no_bound_fail(rule, share):
    """It chooses signal channel and predictor; the run took all directions."""
    ops = operators_of("mlp", rule, "cross_entropy", start=4)
    whole, part = coupling_of(ops), coupling_of(ops, cutoff=share)
    assert 0 < part.channels.rank < whole.channels.rank
    predictors = [window_of("mlp", rule, "cross_entropy", start=4).anchored_coupling(), part.matrix]
    assert failing(window_bounds(part, ops.realized, predictors=predictors)) == []
    assert part.channels.complete.visibility_norm == pytest.approx(whole.channels.visibility_norm)
    assert whole.channels.complete is whole.channels
    # With the sides of the directions kept alone, what was left out would show.
    assert part.channels.visibility_norm < whole.channels.visibility_norm * (1 + 1e-9)


def test_on_a_leading_part_of_w_bounds_on_all_directions_are_refused():
    window = window_of("mlp", "momentum", "cross_entropy", start=4)
    ops = operators_of("mlp", "momentum", "cross_entropy", start=4)
    top = top_channels(window, 4, tolerance=1e-9)
    h, A = ops.output_gradient, torch.zeros_like(ops.test_transfer)
    for refused in (
        lambda: remainder_bound(top.coupling, ops.realized),
        lambda: visibility_bound(top.channels, ops.realized),
        lambda: predictor_bound(top.channels, A, ops.realized),
        lambda: mobility_bound(top.channels, h),
        lambda: window_bounds(top.coupling, ops.realized),
    ):
        with pytest.raises(DataError, match=r"TopChannels\.prediction_bound"):
            refused()
    missed = ops.test_displacement - ops.sources.test
    missed = missed - top.coupling.matrix @ (ops.train_displacement - ops.sources.train)
    assert 0 < missed.norm().item() <= top.prediction_bound(h)


def test_realized_says_what_the_operators_measured():
    ops = operators_of("mlp", "adam", "squared", start=4)
    realized = ops.realized
    assert realized.gradient is ops.output_gradient
    assert realized.train_displacement is ops.train_displacement
    assert realized.test_displacement is ops.test_displacement
    assert realized.train_source is ops.sources.train
    assert realized.test_source is ops.sources.test
    assert realized.loss_drop == ops.loss_drop != 0
    assert realized.discretization == type(realized.discretization)()
