"""The warning that the gate lets almost nothing through: when it is due, once, and never otherwise."""

import re
import warnings

import pytest
import torch
from optimizer_table import BACKENDS
from torch import nn

from poprisk.errors import BackendWarning, ClosedGateWarning
from poprisk.optim import PopRiskAdamW

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


def parameters():
    return [nn.Parameter(torch.zeros(100, 10)), nn.Parameter(torch.zeros(()))]


@EVERY_BACKEND
def test_pure_noise_is_reported_once_after_200_steps(backend):
    params = parameters()
    optimizer = PopRiskAdamW(params, alpha=1.0, **backend)
    steps, messages = warned_at(optimizer, params, [0.0] * 450)
    assert steps == [200]
    measured = re.search(r"\(now (\d+\.\d\d)%\)", messages[0])
    assert 0 <= float(measured[1]) < 1
    for word in ("lr", "alpha", "strength", "200 steps", "under 1%"):
        assert word in messages[0]


def test_the_reported_value_is_the_measured_one():
    """A few coordinates in a thousand with signal: the message says how many, as the meter does."""
    p = nn.Parameter(torch.zeros(2000))
    optimizer = PopRiskAdamW([p], gate="hard", fused=True)
    mean = torch.where(torch.arange(2000) < 14, 5.0, 0.0)
    _, messages = warned_at(optimizer, [p], [mean] * 200)
    shown = float(re.search(r"\(now (\d+\.\d\d)%\)", messages[0])[1])
    assert shown == pytest.approx(100 * optimizer.diagnostics()[0].mean_gate.item(), abs=0.006)
    assert 0.6 < shown < 0.9


@pytest.mark.parametrize("options", [{}, {"gate": "snr"}, {"granularity": "row"}, {"normalize_gate": True}], ids=str)
@EVERY_BACKEND
def test_a_healthy_gate_is_not_reported(backend, options):
    params = parameters()
    steps, _ = warned_at(PopRiskAdamW(params, **options, **backend), params, [3.0] * 230)
    assert steps == []


@EVERY_BACKEND
def test_no_gate_is_not_reported(backend):
    params = parameters()
    steps, _ = warned_at(PopRiskAdamW(params, gate=None, **backend), params, [0.0] * 230)
    assert steps == []


def test_a_gate_that_was_closed_for_a_while_is_not_reported():
    """A hundred steps of noise, then signal: the count starts again."""
    params = parameters()
    steps, _ = warned_at(PopRiskAdamW(params, fused=True), params, ([0.0] * 100 + [8.0] * 60) * 3)
    assert steps == []


def test_a_gate_that_closes_late_is_reported():
    """Looks become rare while all is well, and frequent again once the gate is found closed."""
    params = parameters()
    steps, _ = warned_at(PopRiskAdamW(params, fused=True), params, [8.0] * 400 + [0.0] * 700)
    assert len(steps) == 1
    assert 600 <= steps[0] <= 400 + 400 + 200 + 25


def test_pooled_gates_are_watched_too():
    params = parameters()[:1]
    optimizer = PopRiskAdamW(params, granularity="row", foreach=False)
    steps, _ = warned_at(optimizer, params, [0.0] * 220)
    assert steps == [200]


def test_a_second_optimizer_gives_its_own_warning():
    for _ in range(2):
        params = parameters()
        steps, _ = warned_at(PopRiskAdamW(params, fused=True), params, [0.0] * 205)
        assert steps == [200]
