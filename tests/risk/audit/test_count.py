"""The number of wrong labels: covered where it is valid, and said to be unknown where it cannot be known."""

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from spoiled_data import ADAMW, SGD, ambiguous, flipped, loaded, pretrained, run_on

from poprisk.report import headline
from poprisk.risk._audit.count import agreement, count_wrong
from poprisk.risk._audit.run_audit import audit
from poprisk.risk._verdict import Counted, judge_count


def audited(x, given, optimizer, epochs, **options):
    return audit(run_on(x, given, optimizer, epochs, **options), tier="any", progress=False)


def covered(estimate, truth):
    return abs(estimate.value - truth) <= 2 * estimate.standard_error


def honest(estimate, truth):
    """Valid and covered, or not valid with what can be said."""
    if estimate.valid:
        return covered(estimate, truth)
    return bool(estimate.reason) and (math.isnan(estimate.value) or estimate.standard_error > 0)


def test_a_network_fine_tuned_for_ten_epochs():
    """Trained before on half of the classes: the others are learned late, and their labels are not wrong."""
    (x, true), (other, known) = loaded("digits", 600)
    given = flipped(true, 0.1)
    half = known % 2 == 0
    found = audited(x, given, ADAMW, 10, state=pretrained(other[half], known[half], 10)).wrong_labels
    assert found.valid
    assert covered(found, int((given != true).sum()))


def test_two_classes_with_many_wrong_labels():
    (x, true), _ = loaded("breast_cancer", 569)
    given = flipped(true, 0.4)
    found = audited(x, given, SGD, 40).wrong_labels
    assert found.valid
    assert covered(found, int((given != true).sum()))


@pytest.mark.parametrize("name", ["wine", "breast_cancer"])
def test_ambiguous_examples_are_not_called_right(name):
    """Labels changed where classes meet: the model learns many of them, also without having seen the example."""
    (x, true), _ = loaded(name, 178)
    given = ambiguous(x, true, 18)
    found = audited(x, given, SGD, 20).wrong_labels
    assert covered(found, 18)
    assert not found.valid or found.value > 5


def test_one_class_has_suspects():
    (x, true), _ = loaded("digits", 500)
    given = flipped(true, 0.3, "one class")
    wrong = given != true
    table = audited(x, given, SGD, 20)
    assert honest(table.wrong_labels, int(wrong.sum()))
    assert roc_auc_score(wrong, table["suspicion"]) > 0.95
    assert int((table.is_suspect & wrong).sum()) > 0.5 * int(wrong.sum())


def test_what_cannot_be_told_is_not_zero():
    """Both classes half wrong: right and wrong labels are exchangeable."""
    (x, true), _ = loaded("breast_cancer", 200)
    given = flipped(true, 0.5)
    table = audited(x, given, SGD, 20)
    found = table.wrong_labels
    assert not found.valid
    assert math.isnan(found.value)
    assert "cannot be told" in found.reason
    assert "by hand" in found.reason
    assert table.is_suspect.any()
    assert "how many are wrong is not known" in headline(table)
    assert "nan" not in headline(table)


def test_clean_labels():
    (x, true), _ = loaded("wine", 178)
    found = audited(x, true, SGD, 40).wrong_labels
    assert found.valid
    assert covered(found, 0)
    assert found.value < 5
    assert found.standard_error > 0


def test_the_rate_at_the_largest_margins():
    """Wrong labels at any margin are counted in full; mistakes near the boundary only at the upper end."""
    n = 400
    margin = torch.linspace(1, 0, n)
    p = torch.stack([(1 + margin) / 2, (1 - margin) / 2], 1)
    everywhere = (torch.arange(n) % 10 == 0).long()
    found = count_wrong(p, everywhere)
    assert found.high == 40
    assert found.low == pytest.approx(40, abs=3)
    assert found.deviation == pytest.approx(math.sqrt(n * 0.1 * 0.9), rel=0.05)
    near = (torch.arange(n) > 320).long() * (torch.arange(n) % 2)
    found = count_wrong(p, near)
    assert (found.low, found.high) == (0.0, 40)


def test_ties_are_counted_both_ways():
    p = torch.tensor([[0.6, 0.4, 0.0]]).repeat(50, 1)
    found = count_wrong(p, torch.tensor([0] * 27 + [1] * 23))
    assert (found.tied, found.tied_share) == (4.0, 1.0)
    assert count_wrong(p, torch.tensor([0] * 40 + [1] * 10)).tied_share == 0.0


def test_verdicts():
    clear = Counted(90.0, 100, 9.0, 0.0, 0.0)
    found = judge_count(clear, 0.95, 1000, "a regression")
    assert found.valid
    assert found.value - 2 * found.standard_error < 90 - 2 * 9
    assert found.value + 2 * found.standard_error > 100 + 2 * 9
    poor = judge_count(clear, 0.6, 400, "a regression")
    assert (poor.valid, "60% of the examples (limit 80%)" in poor.reason) == (False, True)
    assert poor.value - 2 * poor.standard_error <= 0
    wide = judge_count(Counted(0.0, 300, 9.0, 0.0, 0.0), 0.95, 1000, "the networks of 5 folds")
    assert (wide.valid, "ambiguous" in wide.reason, "retrain" in wide.reason) == (False, True, False)
    tied = judge_count(Counted(90.0, 100, 9.0, 0.0, 0.6), 0.95, 1000, "a regression")
    assert (tied.valid, math.isnan(tied.value)) == (False, True)


def test_agreement_is_that_of_the_best_moment():
    p = torch.eye(4)
    moments = [torch.tensor([0, 0, 0, 0]), torch.tensor([0, 1, 2, 0]), torch.tensor([3, 2, 1, 0])]
    assert agreement(p, moments) == 0.75
