"""Bootstrap intervals over few seeds against enumeration and known coverage; times to a target with misses."""

import itertools
import math

import numpy as np
import pytest

from poprisk._core.statistics import paired_difference
from poprisk.errors import DataError
from poprisk_lab.engine.statistics import MedianSteps, bootstrap_difference, first_step_reaching, median_steps


def normal_pairs(count, runs, seed=0):
    return np.random.default_rng(seed).normal(size=(runs, count)).tolist()


def covered(interval, differences):
    d = interval(differences, [0.0] * len(differences))
    return d.low <= 0 <= d.high


def test_percentile_bootstrap_of_five_pairs_covers_less_than_it_says():
    runs = normal_pairs(5, 1000)
    assert np.mean([covered(bootstrap_difference, run) for run in runs]) == pytest.approx(0.84, abs=0.03)


def test_percentile_bootstrap_of_many_pairs_agrees_with_student():
    first, second = (np.random.default_rng(seed).normal(size=200).tolist() for seed in (1, 2))
    drawn, student = bootstrap_difference(first, second), paired_difference(first, second)
    assert drawn.value == student.value
    assert drawn.low == pytest.approx(student.low, abs=0.02)
    assert drawn.high == pytest.approx(student.high, abs=0.02)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_few_pairs_are_enumerated(count):
    first = normal_pairs(count, 1, seed=count)[0]
    means = sorted(math.fsum(resample) / count for resample in itertools.product(first, repeat=count))
    d = bootstrap_difference(first, [0.0] * count, confidence=0.9, resamples=1, seed=7)
    outside = math.floor(0.05 * (len(means) - 1))
    assert d.low == pytest.approx(means[outside])
    assert d.high == pytest.approx(means[-1 - outside])
    assert min(first) <= d.low <= d.value <= d.high <= max(first)


def test_pairs_matter_and_the_draw_is_fixed_by_its_seed():
    first = [0.1 * i for i in range(8)]
    paired = bootstrap_difference([x + 1 for x in first], first)
    assert paired.low == pytest.approx(1)
    assert paired.high == pytest.approx(1)
    assert paired.verdict == "above"
    other = np.random.default_rng(0).normal(size=8).tolist()
    again = [bootstrap_difference(first, other, seed=seed) for seed in (0, 0, 1)]
    assert again[0] == again[1] != again[2]
    mirrored = bootstrap_difference(other, first)
    assert (mirrored.low, mirrored.high) == pytest.approx((-again[0].high, -again[0].low))


def test_one_pair_has_no_interval():
    d = bootstrap_difference([2.0], [0.5])
    assert (d.value, d.low, d.high, d.verdict) == (1.5, None, None, "unclear")


def test_first_step_reaching_in_both_directions():
    steps = [10, 20, 30, 40]
    assert first_step_reaching([0.1, 0.8, 0.2, 0.9], steps, 0.8, True) == 20
    assert first_step_reaching([0.9, 0.5, 0.4, 0.1], steps, 0.4, False) == 30
    assert first_step_reaching([0.1, 0.2, None, math.nan], steps, 0.8, True) is None
    assert first_step_reaching([None, None, 0.3, None], steps, 0.4, False) == 30
    assert first_step_reaching([], [], 0.4, False) is None


@pytest.mark.parametrize(
    ("first_steps", "expected"),
    [
        ([100, 300, 200], MedianSteps(200.0, 3, 3)),
        ([100, None, 200], MedianSteps(200.0, 2, 3)),
        ([100, None, None], MedianSteps(None, 1, 3)),
        ([100, 200, 300, None], MedianSteps(250.0, 3, 4)),
        ([100, 200, None, None], MedianSteps(None, 2, 4)),  # half-way to never
        ([None], MedianSteps(None, 0, 1)),
    ],
)
def test_a_miss_is_infinitely_late(first_steps, expected):
    assert median_steps(first_steps) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_difference([1.0, 2.0], [1.0]), "got 2 and 1 values"),
        (lambda: bootstrap_difference([], []), "at least one value"),
        (lambda: bootstrap_difference([1.0, math.nan], [0.0, 0.0]), "finite values"),
        (lambda: bootstrap_difference([1.0], [0.0], confidence=1.0), "0 < confidence < 1"),
        (lambda: bootstrap_difference([1.0], [0.0], resamples=0), "at least one resample"),
        (lambda: first_step_reaching([0.1], [1, 2], 0.5, True), "got 1 values and 2 steps"),
        (lambda: median_steps([]), "at least one seed"),
    ],
)
def test_errors_say_what_came(call, message):
    with pytest.raises(DataError, match=message):
        call()
