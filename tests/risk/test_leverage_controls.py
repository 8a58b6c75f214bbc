"""Real deletions correct leverage where it is not certain by itself: memorizing networks, gates, augmented inputs."""

import math
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW

from poprisk import Gate, PopRiskAdamW, Problem, RiskMeter, leave_one_out, population_risk, train
from poprisk.risk._leverage import controlled
from poprisk.risk._leverage.leverage import leverage
from poprisk.risk._verdict import GATED_LEVERAGE_ERROR, LEVERAGE_ERROR, MOST_LEVERAGE_CONTROLS, Found, judge_leverage

N, CLASSES = 40, 3


def drawn(n, seed=5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    y = (x[:, :CLASSES] + 0.8 * torch.randn(n, CLASSES, generator=generator)).argmax(1)
    return x, y


def normalized(width=16):
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, CLASSES))


def jittered(x, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator)


@cache
def memorized(n=N, augmented=False, steps=20):
    problem = Problem(normalized, "cross_entropy", *drawn(n), seed=1, augment=jittered if augmented else None)
    return train(problem, partial(AdamW, lr=0.08), steps, batch_size=n // 2, progress=False)


def truth(run):
    x, y = drawn(4000, seed=6)
    module = run.module().eval()
    with torch.no_grad():
        for p, piece in zip(module.parameters(), run.layout.split(run.weights(run.num_steps)), strict=True):
            p.copy_(piece)
        module.train()
        for norm in (m for m in module.modules() if isinstance(m, nn.BatchNorm1d)):
            norm.momentum = 1.0
        module(run.problem.inputs)
        return F.cross_entropy(module.eval()(x), y).item()


@pytest.mark.parametrize("augmented", [False, True])
def test_deletions_make_a_memorizing_network_with_batch_statistics_valid(augmented):
    run = memorized(60, augmented=augmented)  # with 40, one kind of processor gives an error just over the risk
    alone, risk = population_risk(run, "leverage", controls=0), population_risk(run, "leverage")
    assert not alone.valid
    assert risk.valid, risk.reason
    assert "real deletions change the risk" in risk.reason
    assert alone.cost + 16 <= risk.cost <= alone.cost + MOST_LEVERAGE_CONTROLS
    assert risk.standard_error < risk.value
    assert abs(float(risk.value) - truth(run)) < 2.5 * float(risk.standard_error)


def test_all_examples_as_controls_are_leave_one_out():
    run = memorized(16, steps=15)
    risk, real = population_risk(run, "leverage", controls=16), leave_one_out(run, renormalize=True)
    assert float(risk.value) == pytest.approx(float(real.risk.value), rel=1e-5)


def test_augmented_inputs_are_followed_by_deletions_alone():
    risk = population_risk(memorized(augmented=True), "leverage", controls=0)
    assert "leverage does not follow augmented inputs" in risk.reason
    assert "controls=16" in risk.reason


def test_the_meter_reads_the_same_risk_and_trains_each_deletion_once(monkeypatch):
    run, trained = memorized(), []
    one_by_one = controlled.Deletions._train

    def counted(self, run, start, stop, resume=None):
        trained.append((start, stop))
        one_by_one(self, run, start, stop, resume)

    monkeypatch.setattr(controlled.Deletions, "_train", counted)
    readings = RiskMeter().read(run, [10, run.num_steps]).readings
    assert all(reading.risk.method == "leverage" for reading in readings)
    assert len(trained) == len(set(trained))
    last, again = readings[-1].risk, population_risk(run, weights="last")
    assert (last.to_dict(), last.reason) == (again.to_dict(), again.reason)


def test_where_folds_are_allowed_leverage_trains_nothing():
    run = memorized()
    assert population_risk(run, "leverage", 10).to_dict() == population_risk(run, "leverage", controls=0).to_dict()
    assert population_risk(run, retrain_budget=10).method == "k_fold"


def test_long_trainings_are_not_repeated_unasked(monkeypatch):
    run = memorized(80)  # with 40, which ones are deleted decides whether the error is above the risk
    monkeypatch.setattr(controlled, "CONTROL_WORK", 15.9 * controlled.training_work(run))
    assert controlled.controls_work(run) == 0
    assert population_risk(run, "leverage").to_dict() == population_risk(run, "leverage", controls=0).to_dict()
    asked = population_risk(run, "leverage", controls=8)
    assert "8 real deletions" in asked.reason


def test_a_gate_that_opens_and_closes_is_checked_by_deletions():
    """The gates of the recorded run were closed where a missing example would have opened them."""
    problem = Problem(nn.Linear, "cross_entropy", *drawn(N), arguments={"in_features": 6, "out_features": CLASSES})
    gated = partial(PopRiskAdamW, lr=0.1, gate=Gate("hard", normalize=False))
    run = train(problem, gated, 100, batch_size=20, progress=False)
    found, real = leverage(run, [100])[0], leave_one_out(run).risk
    assert found.gated
    assert found.risk.standard_error >= GATED_LEVERAGE_ERROR * found.risk.gap > LEVERAGE_ERROR * found.risk.gap
    risk = population_risk(run, "leverage")
    assert "real deletions" in risk.reason
    assert abs(float(risk.value) - float(real.value)) < float(risk.standard_error)
    assert not leverage(train(problem, partial(SGD, lr=0.1), 5, progress=False), [5])[0].gated


def test_the_whole_correction_is_the_error_of_a_gated_one():
    found = Found(1.0, 0.03, "leverage", "a model", 0.9, 0, 50, 200)
    assert judge_leverage(found, 1.0, 1.0, 200, gated=True).standard_error == pytest.approx(math.hypot(0.03, 0.1))


def test_work_counts_what_a_convolution_computes():
    image = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    make = lambda: nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Flatten(), nn.Linear(1024, 1))  # noqa: E731
    run = train(Problem(make, "squared", image, torch.zeros(12, 1)), partial(SGD, lr=1e-3), 3, progress=False)
    assert controlled.training_work(run) == 3 * max(3 * 12 * (9 * 16 * 64 + 1024), controlled._PER_STEP)
