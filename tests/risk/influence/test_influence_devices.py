"""Influence and risk of a run whose examples are on a GPU: what they are on the CPU."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from poprisk.risk._exclusion import exclusion
from poprisk.risk._first_order import generalization_gap, taylor_remainder
from poprisk.risk._influence.live_rate import population_rates
from poprisk.risk._influence.matrix import influence_matrix
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._meter import RiskMeter
from poprisk.risk._risk import population_risk
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RULES = {"momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9), "adam": partial(torch.optim.Adam, lr=0.02)}


def network():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


def recorded(device, rule):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(14, 3, generator=generator, dtype=torch.float64)
    problem = Problem(network, "cross_entropy", x, torch.randint(3, (14,), generator=generator)).to(device)
    return train(problem, RULES[rule], 12, batch_size=7, dtype=torch.float64, progress=False)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("device", DEVICES)
def test_influence_and_risk(device, rule):
    here, there = recorded(device, rule), recorded("cpu", rule)
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
    assert_close(taylor_remainder(here, 2).full.cpu(), taylor_remainder(there, 2).full, **close)
    assert_close(population_rates(here).cpu(), population_rates(there), **close)
    assert RiskMeter("k_fold", retrain_budget=3).read(here, [4, 12]).best_step in (4, 12)
    assert Unrolled(here).spot_check(2).worst < 1e-5
