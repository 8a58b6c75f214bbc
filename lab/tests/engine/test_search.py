"""Trials: nested, shared between arms, even over every range, and not along a diagonal."""

import math

import numpy as np
import pytest

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.search import COLUMNS, Range, trials

UNIT = {name: Range(0.0, 1.0, log=False) for name in COLUMNS}
ADAM = {"lr": Range(3e-6, 1e-2), "weight_decay": Range(1e-3, 2.0), "beta2_gap": Range(1e-3, 5e-2)}
GATED = {**ADAM, "lr": Range(3e-5, 1e-1), "strength": Range(0.1, 10.0), "rho_gap": Range(3e-3, 3e-2)}


def test_deterministic_and_nested():
    assert trials(GATED, 24) == trials(GATED, 24)
    for count in (1, 3, 8, 16):
        assert trials(GATED, 24)[:count] == trials(GATED, count)
    assert trials(GATED, 24, seed=1) != trials(GATED, 24)


def test_the_published_points_do_not_move():
    assert trials(ADAM, 2) == [
        {"lr": 0.000955, "weight_decay": 0.00108, "beta2_gap": 0.0427},
        {"lr": 1.5e-05, "weight_decay": 0.0771, "beta2_gap": 0.00144},
    ]


def test_shared_knobs_are_at_the_same_quantile():
    adam, gated = trials(ADAM, 16), trials(GATED, 16)
    for a, b in zip(adam, gated, strict=True):
        assert list(b) == list(GATED)
        assert (a["weight_decay"], a["beta2_gap"]) == (b["weight_decay"], b["beta2_gap"])
        assert b["lr"] / a["lr"] == pytest.approx(10, rel=1e-2)  # each rounded to three digits
    without_lr = {name: span for name, span in ADAM.items() if name != "lr"}
    assert [t["weight_decay"] for t in trials(without_lr, 16)] == [t["weight_decay"] for t in adam]


@pytest.mark.parametrize("count", [8, 16, 32])
def test_every_range_is_covered_evenly(count):
    points = trials(ADAM, count)
    for name, span in ADAM.items():
        width = math.log(span.high / span.low)
        quantiles = sorted(math.log(point[name] / span.low) / width for point in points)
        middles = [(i + 0.5) / count for i in range(count)]
        assert np.abs(np.subtract(quantiles, middles)).max() < 0.5 / count + 1e-3  # rounding to three digits


@pytest.mark.parametrize("count", [6, 8, 12, 16, 24, 32])
def test_knobs_of_one_arm_are_not_on_a_diagonal(count):
    points = trials(UNIT, count)
    adam = ["lr", "weight_decay", "beta2_gap"]
    for names, bound in ((adam, 1.0), ([*adam, "strength", "rho_gap", "alpha"], 1.65), ([*adam, "lamb"], 1.65)):
        values = np.array([[point[name] for name in names] for point in points])
        correlation = np.corrcoef(values.T) - np.eye(len(names))
        assert np.abs(correlation).max() < bound / math.sqrt(count)  # independent draws would have 1 / √count


def test_three_digits_within_the_range():
    for point in trials({"lr": Range(1.23456e-3, 1.24e-3)}, 32):
        assert 1.23456e-3 <= point["lr"] <= 1.24e-3
        assert point["lr"] in (1.23456e-3, 1.24e-3)
    for point in trials(GATED, 32):
        assert all(value == float(f"{value:.2e}") for value in point.values())


def test_nothing_to_search_is_one_trial():
    assert trials({}, 24) == [{}]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: trials({"momentum": Range(0.1, 1.0)}, 4),
            "cannot search momentum; choose from lr, weight_decay",
        ),
        (lambda: trials(ADAM, 0), "at least one trial, got 0"),
        (lambda: Range(1.0, 1.0), "low < high, got 1.0 and 1.0"),
        (lambda: Range(0.1, math.inf), "finite bounds low < high"),
        (lambda: Range(0.0, 1.0), "low > 0, got 0.0"),
    ],
)
def test_errors_say_what_to_do(call, message):
    with pytest.raises(HyperparameterError, match=message):
        call()
