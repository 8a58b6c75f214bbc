"""Intervals over few seeds against known coverage."""

import numpy as np
import pytest

from poprisk._core.statistics import (
    mean_over_seeds,
    paired_difference,
)
from poprisk.errors import DataError


def normal_pairs(count, runs, seed=0):
    return np.random.default_rng(seed).normal(size=(runs, count)).tolist()


def covered(interval, differences):
    d = interval(differences, [0.0] * len(differences))
    return d.low <= 0 <= d.high


def test_student_interval_covers_what_it_says():
    runs = normal_pairs(5, 1000)
    assert np.mean([covered(paired_difference, run) for run in runs]) == pytest.approx(0.95, abs=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mean_over_seeds([]), "at least one value"),
        (lambda: paired_difference([1.0], []), "got 1 and 0 values"),
    ],
)
def test_errors_say_what_came(call, message):
    with pytest.raises(DataError, match=message):
        call()
