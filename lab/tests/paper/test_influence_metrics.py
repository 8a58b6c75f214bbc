"""Metrics of scores against scipy, scikit-learn and brute force."""

import math

import pytest
import torch
from scipy import stats
from sklearn.metrics import roc_auc_score

from poprisk.errors import DataError
from poprisk_lab.paper.mnist_influence.metrics import (
    brittleness,
    linear_datamodeling_score,
    loo_correlation,
    mislabel_auc,
    share_found,
)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_lds_is_the_mean_of_scipys_spearman():
    scores, subsets = (4 * numbers(4, 30)).round() / 4, (numbers(25, 30, seed=1) > 0).double()  # sums are exact
    outputs = subsets @ scores.T + numbers(25, 4, seed=2)
    outputs[:5] = outputs[5:10].round()
    outputs[10:13] = 0.5  # ties
    each = [stats.spearmanr((subsets @ scores[q]).numpy(), outputs[:, q].numpy()).statistic for q in range(4)]
    found = linear_datamodeling_score(scores, subsets, outputs)
    assert found.value == pytest.approx(sum(each) / 4, abs=1e-12)
    assert found.cost == 25
    mask = linear_datamodeling_score(scores, subsets.bool(), outputs)
    assert (mask.value, mask.standard_error) == (found.value, found.standard_error)


def test_lds_error_covers_the_spread_over_fresh_trainings():
    """The spread of the score over 25 independent sets of trainings, against the error claimed by each."""
    scores = numbers(20, 50)
    values, errors = [], []
    for seed in range(25):
        subsets = (numbers(60, 50, seed=100 + seed) > 0).double()
        outputs = subsets @ scores.T + 8 * numbers(60, 20, seed=200 + seed)
        found = linear_datamodeling_score(scores, subsets, outputs, resamples=40)
        values.append(found.value)
        errors.append(found.standard_error)
    spread = torch.tensor(values).std().item()
    assert spread / 1.3 < sum(errors) / 25 < 2 * spread  # queries are resampled too, so it is rather too large


def test_lds_leaves_out_queries_that_do_not_vary():
    scores, subsets = numbers(2, 10), (numbers(12, 10, seed=1) > 0).double()
    outputs = subsets @ scores.T
    outputs[:, 1] = 3.0
    found = linear_datamodeling_score(scores, subsets, outputs)
    assert found.value == pytest.approx(1.0)
    assert "1 of 2 queries" in found.reason
    nothing = linear_datamodeling_score(scores, subsets, torch.zeros_like(outputs))
    assert not nothing.valid
    assert math.isnan(nothing.value)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 5), (4, 6), (4, 2)), "must fit"),
        (((2, 5), (4, 5), (2, 4)), "must fit"),
        (((2, 5), (2, 5), (2, 2)), "at least 3"),
    ],
)
def test_lds_refuses_what_does_not_fit(shapes, message):
    with pytest.raises(DataError, match=message):
        linear_datamodeling_score(*(numbers(*shape) for shape in shapes))


def test_loo_correlation_is_scipys_regression():
    predicted = numbers(3, 40)
    actual = 0.7 * predicted - 0.2 + 0.5 * numbers(3, 40, seed=1)
    line = stats.linregress(predicted.reshape(-1).numpy(), actual.reshape(-1).numpy())
    pooled = loo_correlation(predicted, actual)
    assert pooled.pearson == pytest.approx(line.rvalue, abs=1e-12)
    assert pooled.slope == pytest.approx(line.slope, abs=1e-12)
    assert pooled.intercept == pytest.approx(line.intercept, abs=1e-12)
    assert pooled.rmse == pytest.approx((predicted - actual).square().mean().sqrt().item(), abs=1e-12)
    assert pooled.count == 120
    each = loo_correlation(predicted, actual, per_query=True)
    for q in range(3):
        line = stats.linregress(predicted[q].numpy(), actual[q].numpy())
        assert each.pearson[q].item() == pytest.approx(line.rvalue, abs=1e-12)
        assert each.slope[q].item() == pytest.approx(line.slope, abs=1e-12)


def test_loo_correlation_refuses_bad_numbers():
    with pytest.raises(DataError, match="actual must be finite numbers, got 1"):
        loo_correlation(numbers(1, 4), torch.tensor([[0.0, 1.0, math.nan, 2.0]]))
    with pytest.raises(DataError, match="both be"):
        loo_correlation(numbers(1, 4), numbers(1, 5))
    with pytest.raises(DataError, match="at least 3 pairs"):
        loo_correlation(numbers(4, 2), numbers(4, 2), per_query=True)


def test_auc_is_scikit_learns_and_its_error_the_spread():
    wrong = numbers(200, seed=3) > 1
    scores = (numbers(200) + 1.2 * wrong).round(decimals=1)  # with ties
    assert mislabel_auc(scores, wrong).value == pytest.approx(roc_auc_score(wrong, scores), abs=1e-12)
    found = [mislabel_auc(numbers(200, seed=seed) + 1.2 * wrong, wrong) for seed in range(300)]
    spread = torch.tensor([each.value for each in found]).std().item()
    assert sum(each.standard_error for each in found) / 300 == pytest.approx(spread, rel=0.15)


def test_share_found_by_counting_and_with_ties():
    scores, wrong = numbers(100), numbers(100, seed=1) > 1
    top = scores.argsort(descending=True)[:15]
    assert share_found(scores, wrong, 0.15).value == pytest.approx(int(wrong[top].sum()) / int(wrong.sum()))
    assert share_found(scores, wrong, 1.0).value == 1.0
    level = share_found(torch.zeros(100), wrong, 0.3)  # no information finds its share
    assert level.value == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("scores", "wrong", "message"),
    [
        (torch.zeros(3), torch.tensor([True, False]), "one entry for each"),
        (torch.zeros(3), torch.tensor([1, 0, 0]), "int64"),
        (torch.tensor([0.0, math.nan, 1.0]), torch.tensor([True, False, True]), "1 NaN of 3"),
        (torch.zeros(3), torch.tensor([False, False, False]), "wrong"),
    ],
)
def test_bad_labels_are_refused(scores, wrong, message):
    for metric in (mislabel_auc, share_found):
        with pytest.raises(DataError, match=message):
            metric(scores, wrong)


def test_brittleness_removes_the_highest_scores_and_stops_at_the_first_change():
    scores, removals = numbers(50), []

    def retrain(removed):
        removals.append(removed.tolist())
        return 1 if len(removed) >= 30 else 0

    found = brittleness(scores, retrain, 0, sizes=(40, 10, 20, 30))
    assert (found.size, found.trainings, found.predictions) == (30, 3, {10: 0, 20: 0, 30: 1})
    assert removals[0] == scores.argsort(descending=True)[:10].tolist()
    assert brittleness(scores, lambda removed: 0, 0, sizes=(50,)).size is None
    for sizes in ((0, 1), (51,), ()):
        with pytest.raises(DataError, match="1 … 50"):
            brittleness(scores, retrain, 0, sizes=sizes)
