"""The exact tier against real trainings without the example."""

from functools import partial

import pytest
import torch
from audit_problems import CLASSES, clusters
from torch import nn
from torch.optim import SGD

from poprisk.audit import DESCRIPTIONS, audit
from poprisk.influence import influence_matrix, leave_one_out
from poprisk.problems import Problem
from poprisk.runs import train


@pytest.fixture(scope="module")
def run():
    inputs, given, _ = clusters(n=24, wrong=3)
    arguments = {"in_features": 6, "out_features": CLASSES}
    test = clusters(n=5, seed=1)[:2]
    problem = Problem(nn.Linear, "cross_entropy", inputs.double(), given, arguments=arguments, test=test)
    return train(problem, partial(SGD, lr=0.05), 12, batch_size=12, dtype=torch.float64, progress=False)


def test_columns_match_the_influence_matrix_and_retraining(run):
    found = audit(run, tier="exact", progress=False)
    torch.testing.assert_close(found["self_influence"], influence_matrix(run).diagonal())
    real = leave_one_out(run, progress=False)
    torch.testing.assert_close(found["loo_loss"], real.losses[real.example.argsort()], rtol=0.02, atol=0.01)
    assert bool((found["displacement"] > 0).all())
    assert set(found.columns) <= set(DESCRIPTIONS)
    assert (found["loo_margin"] < found["margin"] + 1e-9).double().mean() > 0.9


def test_auto_makes_them_where_they_are_cheap_and_says_so_where_not(run, monkeypatch):
    assert "self_influence" in audit(run, progress=False).columns
    monkeypatch.setattr("poprisk.audit.exact._CHEAP", 1.0)
    found = audit(run, progress=False)
    assert "self_influence" not in found.columns
    assert 'tier="exact" makes them' in " ".join(found.notes)
