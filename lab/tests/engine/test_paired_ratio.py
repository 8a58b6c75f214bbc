"""Ratios paired by seed: geometric means, their intervals, what a coarse grid leaves open, and their verdicts."""

import math

import pytest

from poprisk_lab.pages.paired_ratio import Ratio, looked_before, paired_ratio, steps_ratio

LOOKS = list(range(100, 1001, 100))


def test_a_ratio_is_the_geometric_mean_with_students_interval() -> None:
    """Logarithms 0, 1 and 2: mean 1, standard error 1/√3, and Student's factor for two degrees of freedom."""
    found = paired_ratio([math.exp(x) for x in (3.0, 2.0, 4.0)], [math.exp(x) for x in (3.0, 1.0, 2.0)])
    assert found is not None
    reach = 4.302652729911275 / math.sqrt(3)
    assert (found.value, found.pairs) == (pytest.approx(math.e), 3)
    assert (found.low, found.high) == (pytest.approx(math.exp(1 - reach)), pytest.approx(math.exp(1 + reach)))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 0.0])
def test_one_value_that_is_no_number_leaves_no_ratio(wrong: float) -> None:
    assert paired_ratio([1.0, 2.0, wrong], [1.0, 1.0, 1.0]) is None
    assert paired_ratio([1.0, 1.0, 1.0], [1.0, 2.0, wrong]) is None


def test_equal_steps_are_known_to_an_evaluation_only() -> None:
    """600 against 200, seen every 100: anything from 500/200 to 600/100."""
    found = steps_ratio([600] * 3, [200] * 3, LOOKS)
    assert found is not None
    assert (found.value, found.low, found.high) == (pytest.approx(3), pytest.approx(2.5), pytest.approx(6))
    assert (found.verdict(2.5 - 1e-9), found.verdict(3.0), found.verdict(6.1)) == ("Held", "Undecided", "Not held")


def test_students_interval_stands_where_it_is_wider() -> None:
    slow, fast = [400, 100, 900], [300, 300, 300]
    found, plain = steps_ratio(slow, fast, LOOKS), paired_ratio(slow, fast)
    assert found is not None
    assert plain is not None
    assert (found.low, found.high) == (0.0, pytest.approx(plain.high)), "100 may have been the very first step"


def test_what_never_arrived_counts_as_the_whole_run_and_bounds_from_below() -> None:
    found = steps_ratio([None, None, None], [100, 100, 200], LOOKS)
    assert found is not None
    assert found.at_least
    assert found.value == pytest.approx((10 * 10 * 5) ** (1 / 3))
    assert found.words.startswith("at least 7.9× [")
    assert found.words.endswith(", ∞]")
    assert Ratio(1.5, 1.4, 1.6, 3, at_least=True).verdict(2.0) == "Undecided", "it may be any number above"
    assert steps_ratio([100, 100], [None, 100], LOOKS) is None


def test_two_seeds_decide_nothing() -> None:
    assert Ratio(9.0, 8.0, 10.0, 2).verdict(5.0) == "Undecided"
    assert Ratio(9.0, None, None, 1).verdict(5.0) == "Undecided"
    assert Ratio(9.0, 8.0, 10.0, 3).verdict(5.0) == "Held"


def test_the_inverse_swaps_the_ends() -> None:
    turned = Ratio(0.5, 0.25, 0.8, 3).inverse
    assert (turned.value, turned.low, turned.high) == (2.0, 1.25, 4.0)
    assert Ratio(0.5, 0.0, math.inf, 3).inverse.words == "2.0× [0.0, ∞]"


def test_the_look_before_the_first_is_the_start() -> None:
    assert [looked_before(step, LOOKS) for step in (100, 200, 1000)] == [0, 100, 900]
