"""SIGKILL at random: the finished kernel is identical, only lost tiles are computed again, nothing torn is read."""

import pytest
from killed_workers import run_trials

# Python 3.12 warns of any fork beside threads; these forks only compute, and end.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def check(found, trials):
    assert found["identical"] == trials
    assert found["killed"] == 3 * trials
    assert found["torn_reads"] == 0
    assert found["reads"] > 0
    assert found["computed_twice_without_a_kill"] == 0
    assert found["computed_again"] <= found["killed_inside_a_tile"] <= found["killed"]
    assert found["computed"] == found["tiles"] + found["computed_again"]


@pytest.mark.timeout(300)
def test_two_trials():
    check(run_trials(2, seed=1, examples=40), 2)


@pytest.mark.timeout(300)
def test_tiles_of_rounded_rows():
    """The bound of the finished kernel is compared with it."""
    check(run_trials(1, seed=2, examples=40, precision="bfloat16x3"), 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_trials():
    found = run_trials(20, seed=0)
    check(found, 20)
    assert found["computed_again"] >= 10  # the kills did hit workers at work
