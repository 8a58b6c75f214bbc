"""SIGKILL at random: the kernel is identical, only what was in flight is computed again, nothing torn is read."""

import pytest
from killed_workers import run_trials


def check(found, trials):
    assert found["identical"] == trials
    assert found["killed"] == 3 * trials
    assert found["torn_reads"] == 0
    assert found["reads"] > 0
    assert found["computed_again_beyond_what_was_in_flight"] == 0


@pytest.mark.timeout(300)
def test_a_trial_with_rounded_rows():
    check(run_trials(1, seed=1, examples=40, precision="bfloat16x3"), 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_trials():
    found = run_trials(20, seed=0)
    check(found, 20)
    assert min(found["killed_worker"], found["killed_scheduler"], found["killed_client"]) > 5
    assert found["computed_again"] >= 5  # the kills did hit workers at work
