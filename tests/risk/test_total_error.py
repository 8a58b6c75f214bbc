"""No estimate is valid whose standard error is larger than the risk and than half of the loss before training."""

from dataclasses import replace

import pytest

from poprisk.optim import KeptRisk
from poprisk.risk._fold_checks import FoldChecks
from poprisk.risk._verdict import (
    Checked,
    Found,
    RiskEstimate,
    judge_controlled,
    judge_first_order,
    judge_held_back,
    judge_kept,
    judge_retraining,
)

CHECKED = Checked(16, 0.0, 0.01, 0.0, 60)


def kept(found: Found) -> RiskEstimate:
    risk = KeptRisk(found.value, found.error, True, "held back", step=5)
    return judge_kept(risk, 10, found.training_loss, "the kept weights", found.first_loss)


JUDGES = {
    "exclusion": lambda found: judge_controlled(found, CHECKED),
    "k_fold": lambda found: judge_retraining(found, FoldChecks()),
    "held_back": judge_held_back,
    "kept": kept,
}


@pytest.mark.parametrize("method", list(JUDGES))
def test_an_error_larger_than_the_risk_says_nothing(method):
    found = Found(0.88, 1.14, method, "a model", 0.5, 0, 60, 60)
    risk = JUDGES[method](found)
    assert not risk.valid
    assert "the standard error, 1.1, is larger than the risk, 0.88. Use more examples" in risk.reason
    assert JUDGES[method](replace(found, error=0.87)).valid
    against = JUDGES[method](replace(found, first_loss=1.5))
    assert not against.valid
    assert "and than half of the loss before training, 1.5" in against.reason
    assert JUDGES[method](replace(found, first_loss=2.4)).valid  # far below what it was is something to say


def test_the_first_order_has_a_narrower_limit():
    found = Found(0.88, 1.14, "first_order", "this model", 0.5, 0, 60, 60, first_loss=9.0)
    exclusion = RiskEstimate(0.88, 1.14, True, "")
    assert not judge_first_order(found, exclusion).valid
