"""The transfer remainder of recorded runs against the fill distance, under cross-entropy, in small."""

import math

import pytest

from poprisk.errors import HyperparameterError
from poprisk_lab.paper.sobolev_slope.study import SlopeConfig, circle_problem, measure_point, sobolev_slope
from poprisk_lab.theory.sobolev import fill_distance_slope

TINY = {"sizes": (4, 6, 8), "grid": 32, "width": 6, "steps": 10}


@pytest.fixture(scope="module")
def repeated():
    return sobolev_slope(SlopeConfig(**TINY))


def test_the_right_side_shrinks_at_the_stated_order(repeated):
    points = repeated.points
    assert [point.fill for point in points] == pytest.approx([math.pi / n for n in TINY["sizes"]])
    for point in points:
        assert point.transfer.smooth == pytest.approx(32**0.5 * point.fill**1.5 * point.path_norm)
    normalized = [point.transfer.smooth / point.path_norm for point in points]
    assert fill_distance_slope([point.fill for point in points], normalized).value == pytest.approx(1.5)
    assert repeated.expected == 1.5
    assert repeated.right.value == pytest.approx(1.5, abs=0.3)  # the path's norm hardly varies


def test_a_real_remainder_shrinks_at_least_as_fast(repeated):
    """Twice as many directions of W as D can have: the remainder is no rounding, and the constant stays small."""
    for point in repeated.points:
        assert not point.is_rounding
        assert point.signal_dimension == 2 * point.train_rank == 2 * point.distinct_outputs
        assert point.transfer.left > 1e6 * point.noise
        assert point.transfer.needed_constant < 0.01
    assert repeated.left.valid
    assert repeated.left.value > repeated.expected
    constants = [point.transfer.needed_constant for point in repeated.points]
    assert constants == sorted(constants, reverse=True)


def test_bounds_of_one_real_run(repeated):
    """The operator lemma, which has no unknown constant, holds and is not empty; the trajectory form follows."""
    for point in repeated.points:
        assert point.operator.holds
        assert point.operator.tightness > 0.3
        assert 0 < point.trajectory.left <= point.trajectory.needed_constant * point.trajectory.smooth * (1 + 1e-9)
        assert point.trajectory.needed_constant <= point.transfer.needed_constant * (1 + 1e-9)


def test_with_distinct_inputs_the_remainder_is_rounding_under_cross_entropy_too():
    distinct = sobolev_slope(SlopeConfig(**TINY, repeated=False))
    for point in distinct.points:
        assert point.is_rounding
        assert point.signal_dimension == point.train_rank == point.distinct_outputs
        assert point.relative_remainder < 1e-12
    assert not distinct.left.valid
    assert "rounding at all but 0 of 3" in distinct.left.reason
    last = distinct.points[-1]
    assert last.cut.left > 1e6 * last.transfer.left  # what was cut off, not what the fill distance leaves
    assert last.cut.smooth > last.transfer.smooth


def test_order_and_sizes():
    smoother = measure_point(SlopeConfig(**TINY, order=3.0), 4)
    assert smoother.transfer.smooth == pytest.approx(32**0.5 * smoother.fill**2.5 * smoother.path_norm)
    twice = circle_problem(5, 3, repeated=True, seed=0)
    assert twice.inputs[:5].equal(twice.inputs[5:])
    assert twice.targets[:5].equal(twice.targets[5:])
    with pytest.raises(HyperparameterError, match=r"two or more sizes.*got \(4, 4\)"):
        SlopeConfig(sizes=(4, 4))
    with pytest.raises(HyperparameterError, match="grid must be at least the largest size, 32, got 16"):
        SlopeConfig(grid=16)
