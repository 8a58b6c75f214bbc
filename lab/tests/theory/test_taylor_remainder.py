"""The remainder of the first order: against trainings by hand, and what it says of the risk."""

import pytest
import torch
from recorded import Case, on_device
from torch.testing import assert_close

from poprisk.errors import DataError
from poprisk.risk import Unrolled, first_order_risk, generalization_gap, influence_matrix
from poprisk_lab.theory.population_rates import population_rates
from poprisk_lab.theory.taylor_remainder import taylor_remainder


def test_the_remainder_is_that_of_real_trainings():
    case = Case("mlp", "adam")
    chosen = torch.tensor([1, 3])
    found = taylor_remainder(case.run, chosen)
    before = case.own_losses(case.again())
    for place, i in enumerate(chosen.tolist()):
        alpha = torch.full((6,), 6 / 5, dtype=torch.float64)
        alpha[i] = 0
        assert_close(found.full[place], (case.own_losses(case.again(alpha=alpha)) - before)[i], rtol=1e-8, atol=1e-10)
        half = case.own_losses(case.again(alpha=(1 + alpha) / 2)) - before
        assert_close(found.half[place], half[i], rtol=1e-8, atol=1e-10)
    J = influence_matrix(case.run)
    first_order = (J.diagonal() - J.mean(1)) * 6 / 5
    assert_close(found.first_order, first_order[chosen], rtol=1e-9, atol=1e-12)
    assert generalization_gap(case.run).value == pytest.approx(first_order.mean().item(), rel=1e-9)  # L_pop's
    assert_close(found.remainder, found.full - found.first_order)
    assert found.trainings == 4


def test_trainings_confirm_the_first_order_early_and_not_at_interpolation():
    early = Unrolled(Case("mlp", "momentum", n=12, steps=2, batch_size=12).run)
    late = Unrolled(Case("mlp", "momentum", n=12, steps=100, batch_size=12).run)
    good, bad = (taylor_remainder(u, 6).risk(u) for u in (early, late))
    assert good.valid
    assert not bad.valid
    assert "limit 20%" in bad.reason
    losses = early.model.per_example_losses(early.last_weights, early.inputs, early.targets)
    assert good.value == pytest.approx(float(losses.mean()) + generalization_gap(early).value, rel=1e-9)
    corrected = taylor_remainder(late, 6).corrected_gap(generalization_gap(late).value)
    assert corrected.valid
    assert corrected.value > 2 * generalization_gap(late).value


@pytest.mark.parametrize("examples", [None, 8])
@pytest.mark.parametrize("loss", ["squared", "cross_entropy"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "snr"])
def test_the_risk_is_the_librarys_with_a_larger_error(optimizer, loss, examples):
    run = Case("mlp", optimizer, n=12, loss=loss).run
    found, remainder = first_order_risk(run, examples=examples, seed=3), taylor_remainder(run, 6)
    checked = remainder.risk(run, examples=examples, seed=3)
    assert checked.value == found.value
    assert checked.standard_error > found.standard_error
    with pytest.warns(DeprecationWarning, match=r"remainder\.risk\(run\)"):
        assert first_order_risk(run, remainder, examples=examples, seed=3).to_dict() == checked.to_dict()


def test_few_examples_confirm_nothing():
    run = Case("mlp", "momentum").run
    found = taylor_remainder(run, 2).risk(run)
    assert not found.valid
    assert "too few (limit 5)" in found.reason


def test_bad_examples_are_refused():
    case = Case("mlp", "momentum")
    with pytest.raises(DataError, match="indices from 0 to 5"):
        taylor_remainder(case.run, torch.tensor([6]))
    with pytest.raises(DataError, match="between 1 and the 6"):
        taylor_remainder(case.run, 7)


@pytest.mark.parametrize("rule", ["momentum", "adam"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_a_device(device, rule):
    here, there = on_device(device, rule), on_device("cpu", rule)
    close = {"rtol": 1e-6, "atol": 1e-9}
    assert_close(taylor_remainder(here, 2).full.cpu(), taylor_remainder(there, 2).full, **close)
    assert_close(population_rates(here).cpu(), population_rates(there), **close)
