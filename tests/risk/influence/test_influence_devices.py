"""Influence and risk of a run whose examples are on a GPU: what they are on the CPU."""

import pytest
from recorded import on_device
from torch.testing import assert_close

from poprisk.risk._exclusion import exclusion
from poprisk.risk._first_order import generalization_gap
from poprisk.risk._influence.matrix import influence_matrix
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._meter import RiskMeter
from poprisk.risk._risk import population_risk

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("rule", ["momentum", "adam"])
@pytest.mark.parametrize("device", DEVICES)
def test_influence_and_risk(device, rule):
    here, there = on_device(device, rule), on_device("cpu", rule)
    J = influence_matrix(here)
    assert J.device.type == device
    close = {"rtol": 1e-6, "atol": 1e-9}
    assert_close(J.cpu(), influence_matrix(there), **close)
    assert_close(exclusion(here).losses.cpu(), exclusion(there).losses, **close)
    corrected = [exclusion(run, method="corrected").displacement.cpu() for run in (here, there)]
    assert_close(*corrected, **close)
    assert population_risk(here, "exclusion").value == pytest.approx(population_risk(there, "exclusion").value)
    assert population_risk(here, "k_fold", 5).value == pytest.approx(population_risk(there, "k_fold", 5).value)
    assert population_risk(here, "first_order").value == pytest.approx(population_risk(there, "first_order").value)
    gap = generalization_gap(here, products=9)
    assert gap.value == pytest.approx(generalization_gap(there, products=9).value, rel=1e-5)
    assert RiskMeter("k_fold", retrain_budget=3).read(here, [4, 12]).best_step in (4, 12)
    assert Unrolled(here).spot_check(2).worst < 1e-5
