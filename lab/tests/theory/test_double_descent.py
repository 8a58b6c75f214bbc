"""The predictive-rank path, its peaks, and simulated double descent."""

import pytest
import torch
from spectral_cases import frozen_case
from torch.testing import assert_close

from poprisk.errors import HyperparameterError
from poprisk.theory.bias_variance import interpolation_variance, risk
from poprisk.theory.filters import rank_filter
from poprisk.theory.random_features import random_feature_task
from poprisk_lab.theory.double_descent import double_descent_study, width_sweep
from poprisk_lab.theory.predictive_rank import PredictiveRankPath, predictive_rank_path


def path_of(visibility, signal, noise):
    return PredictiveRankPath(*(torch.tensor(x, dtype=torch.float64) for x in (visibility, signal, noise)))


def test_the_path_is_the_risk_of_every_rank_filter():
    problem, signal = frozen_case()[2:4]
    noise = torch.linspace(0.1, 2.0, 5, dtype=torch.float64)
    path = predictive_rank_path(problem, signal, noise)
    found = [risk(problem, rank_filter(problem, r), signal, noise) for r in range(problem.rank + 1)]
    for name, column in (("total", path.risks), ("bias", path.bias), ("variance", path.variance)):
        assert_close(
            column, torch.tensor([getattr(x, name) for x in found], dtype=torch.float64), rtol=1e-10, atol=1e-10
        )
    assert_close(path.risks.diff(), path.increments, rtol=1e-10, atol=1e-10)
    # At full rank the fit interpolates.
    assert path.bias[-1] == 0
    assert path.risks[-1].item() == pytest.approx(interpolation_variance(problem, noise), rel=1e-10)


@pytest.mark.parametrize(
    ("signal", "noise", "peak", "highest"),
    [
        ([0.0, 5.0, 5.0], [1.0, 1.0, 1.0], 1, True),  # noise first, then signal
        ([5.0, 0.0, 5.0], [1.0, 1.0, 1.0], 2, False),  # a bump below the start
        ([5.0, 5.0, 0.0], [1.0, 1.0, 1.0], None, False),  # a U: falls, then rises
        ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0], None, False),  # only rises
        ([0.0, 1.0, 5.0], [1.0, 1.0, 1.0], 1, True),  # level in between
    ],
)
def test_peaks_are_claimed_where_a_rise_turns_into_a_fall(signal, noise, peak, highest):
    path = path_of([3.0, 2.0, 1.0], signal, noise)
    assert path.peak == peak
    assert path.is_highest is highest


def test_rounding_makes_no_peak():
    assert path_of([3.0, 1e-17, 1e-17], [5.0, 0.0, 5.0], [1.0, 1.0, 1.0]).local_peaks == []


def test_the_highest_of_several_peaks():
    path = path_of([1.0] * 6, [0.0, 3.0, 0.0, 0.0, 0.0, 3.0], [1.0] * 6)
    assert path.risks.tolist() == [6, 7, 5, 6, 7, 8, 6]
    assert path.local_peaks == [1, 5]
    assert path.peak == 5


def test_simulated_peaks_are_where_theory_has_them():
    """The claim of the room: 19 of 20; no peak is claimed where none is."""
    study = double_descent_study(20, draws=200)
    assert len(study.claimed) == 20
    assert study.hits >= 19
    assert study.without_peak
    for trial in study.without_peak:
        steps = trial.theory.diff()
        assert not ((steps[:-1] > 0) & (steps[1:] < 0)).any()
    assert max(trial.largest_deviation for trial in study.trials) < 5  # 20 × 21 means, in standard errors


def test_a_shifted_claim_would_be_missed():
    """The comparison can fail: one rank beside the peak is more than 2 standard errors lower nearly always."""
    study = double_descent_study(10, draws=200)
    missed = 0
    for trial in study.claimed:
        assert trial.predicted is not None
        gap, error = trial.simulated.distance_to_maximum(trial.predicted - 1)
        missed += gap > 2 * error
    assert missed >= 7


def test_width_sweep_peaks_where_features_equal_examples():
    task = random_feature_task(1, examples=12, tests=20)
    sweep = width_sweep(task, [3, 6, 12, 24, 100], draws=300)
    assert sweep.peak == 12
    deviations = (sweep.theory - sweep.simulated.mean).abs() / sweep.simulated.standard_error
    assert deviations.max() < 4
    assert width_sweep(task, [12, 50], draws=2).peak is None


def test_refusals():
    with pytest.raises(HyperparameterError, match="at least one"):
        random_feature_task(0, examples=0)
    with pytest.raises(HyperparameterError, match="problem"):
        double_descent_study(0)
    with pytest.raises(HyperparameterError, match="widths"):
        width_sweep(random_feature_task(0), [0])
