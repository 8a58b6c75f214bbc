"""The warning that the gate lets almost nothing through: when it is due, once, and never otherwise."""

import re
import warnings

import pytest
import torch
from optimizer_table import BACKENDS
from torch import nn

from poprisk.errors import BackendWarning, ClosedGateWarning
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._learning_rate import FACTOR
from poprisk.optim._monitor import closed_below
from poprisk.optim.rules._coefficients import Hyper

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY_BACKEND = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def warned_at(optimizer, params, means):
    """The steps at which a warning was given, one mean of the gradient's unit noise per step."""
    steps, messages = [], []
    for step, mean in enumerate(means, start=1):
        for p in params:
            p.grad = mean + torch.randn_like(p)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        caught = [w for w in caught if w.category is not BackendWarning]
        assert all(w.category is ClosedGateWarning for w in caught)
        steps += [step] * len(caught)
        messages += [str(w.message) for w in caught]
    return steps, messages


def shown(message):
    """The mean gate that a message gives, in percent."""
    return float(re.search(r"\(now ([\d.e-]+)%\)", message)[1])


def parameters():
    return [nn.Parameter(torch.zeros(100, 10)), nn.Parameter(torch.zeros(()))]


@EVERY_BACKEND
def test_pure_noise_is_reported_once_after_200_steps(backend):
    params = parameters()
    optimizer = PopRiskAdamW.paper(params, **backend)
    steps, messages = warned_at(optimizer, params, [0.0] * 450)
    assert steps == [200]
    assert 0 <= shown(messages[0]) < 1
    for word in ("lr", f"{FACTOR} times", "alpha", "strength", "200 steps", "under 1% "):
        assert word in messages[0]


def test_what_counts_as_closed_follows_the_strength():
    """A soft gate of strength 100 passes a hundredth of one of strength 1, and is judged by that."""
    params = parameters()
    steps, messages = warned_at(
        PopRiskAdamW.paper(params, gate=Gate.paper(strength=100.0), fused=True), params, [0.0] * 210
    )
    assert steps == [200]
    assert "under 0.02% " in messages[0]
    assert shown(messages[0]) < 0.02


@pytest.mark.parametrize("mean", [0.0, 0.3, 3.0])
def test_the_default_gate_moves_at_half_of_adamw_s_step_or_more(mean):
    params = parameters()
    optimizer = PopRiskAdamW(params, fused=True)
    steps, _ = warned_at(optimizer, params, [mean] * 230)
    assert steps == []
    assert 0.5 <= optimizer.overall_diagnostics().mean_gate <= 1.0


@pytest.mark.parametrize("mean", [0.0, 0.3, 3.0])
def test_the_literal_gate_is_not_reported_at_its_work(mean):
    """Its mean is far under 1% even on pure noise, which it passes in part: that is how strong it is."""
    params = parameters()
    optimizer = PopRiskAdamW(params, gate=Gate(normalize=False), fused=True)
    steps, _ = warned_at(optimizer, params, [mean] * 230)
    assert steps == []
    assert optimizer.overall_diagnostics().mean_gate < (0.1 if mean else 0.01)


def test_groups_of_different_strength_are_judged_together():
    """The mean of their gates is held against the mean of what each would count as closed."""
    params = parameters()[:1] + parameters()[:1]
    groups = [{"params": [p], "gate": Gate.paper(strength=s)} for p, s in zip(params, (1.0, 100.0), strict=True)]
    limits = [closed_below(Hyper(gate="soft", strength=s)) for s in (1.0, 100.0)]
    steps, messages = warned_at(PopRiskAdamW.paper(groups, fused=True), params, [0.0] * 205)
    assert steps == [200]
    assert f"under {100 * sum(limits) / 2:.2g}% " in messages[0]


def test_the_reported_value_is_the_measured_one():
    """A few coordinates in a thousand with signal: the message says how many, as the meter does."""
    p = nn.Parameter(torch.zeros(2000))
    optimizer = PopRiskAdamW([p], gate=Gate("hard", normalize=False), fused=True)
    mean = torch.where(torch.arange(2000) < 14, 5.0, 0.0)
    _, messages = warned_at(optimizer, [p], [mean] * 200)
    assert shown(messages[0]) == pytest.approx(100 * optimizer.diagnostics()[0].mean_gate.item(), abs=0.006)
    assert 0.6 < shown(messages[0]) < 0.9


def test_a_gate_in_adamw_s_units_is_not_reported_and_does_not_hide_one_that_is_closed():
    """Where nearly all of it is closed, the weights still move by half of AdamW's step."""
    params = parameters()[:1] + parameters()[:1]
    optimizer = PopRiskAdamW(params[:1], gate="hard", fused=True)
    assert warned_at(optimizer, params[:1], [0.0] * 230)[0] == []
    meters = optimizer.overall_diagnostics()
    assert meters.active_fraction < 0.01
    assert 0.5 <= meters.mean_gate < 0.51
    groups = [{"params": params[:1], "gate": Gate("snr", strength=1.0)}, {"params": params[1:], "gate": Gate.paper()}]
    steps, messages = warned_at(PopRiskAdamW(groups, fused=True), params, [0.0] * 205)
    assert steps == [200]
    assert "under 1% " in messages[0]


@pytest.mark.parametrize("options", [{}, {"kind": "snr"}, {"granularity": "row"}, {"normalize": True}], ids=str)
@EVERY_BACKEND
def test_a_healthy_gate_is_not_reported(backend, options):
    params = parameters()
    steps, _ = warned_at(PopRiskAdamW.paper(params, gate=Gate.paper(**options), **backend), params, [3.0] * 230)
    assert steps == []


@EVERY_BACKEND
def test_no_gate_is_not_reported(backend):
    params = parameters()
    steps, _ = warned_at(PopRiskAdamW(params, gate=None, **backend), params, [0.0] * 230)
    assert steps == []


def test_a_gate_that_was_closed_for_a_while_is_not_reported():
    """A hundred steps of noise, then signal: the count starts again."""
    params = parameters()
    steps, _ = warned_at(PopRiskAdamW.paper(params, fused=True), params, ([0.0] * 100 + [8.0] * 60) * 3)
    assert steps == []


def test_a_gate_that_closes_late_is_reported():
    """Looks become rare while all is well, and frequent again once the gate is found closed."""
    params = parameters()
    steps, _ = warned_at(PopRiskAdamW.paper(params, fused=True), params, [8.0] * 400 + [0.0] * 700)
    assert len(steps) == 1
    assert 600 <= steps[0] <= 400 + 400 + 200 + 25


def test_pooled_gates_are_watched_too():
    params = parameters()[:1]
    optimizer = PopRiskAdamW.paper(params, gate=Gate.paper(granularity="row"), foreach=False)
    steps, _ = warned_at(optimizer, params, [0.0] * 220)
    assert steps == [200]


def test_a_second_optimizer_gives_its_own_warning():
    for _ in range(2):
        params = parameters()
        steps, _ = warned_at(PopRiskAdamW.paper(params, fused=True), params, [0.0] * 205)
        assert steps == [200]
