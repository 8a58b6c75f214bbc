"""Probabilities of examples that the model has not seen, against refits without them."""

from functools import partial

import pytest
import torch
from spoiled_data import SGD, flipped, loaded, run_on
from torch import nn

from poprisk.errors import HyperparameterError
from poprisk.risk._audit.histories import rank_share
from poprisk.risk._audit.run_audit import audit
from poprisk.risk._audit.unseen import _features, _ridge, calibrated, left_out
from poprisk.risk._moments import first_features
from poprisk.runs._problem import Problem
from poprisk.runs._training import train


def refitted(phi, targets, ridge):
    """Ridge regression with an intercept, fitted again without each example."""
    rows = []
    for i in range(len(phi)):
        keep = torch.arange(len(phi)) != i
        a, b = phi[keep], targets[keep]
        centre, mean = a.mean(0), b.mean(0)
        gram = (a - centre).T @ (a - centre) + ridge * torch.eye(phi.shape[1], dtype=phi.dtype)
        rows.append(mean + (phi[i] - centre) @ torch.linalg.solve(gram, (a - centre).T @ (b - mean)))
    return torch.stack(rows)


@pytest.mark.parametrize("features", [3, 40])
def test_the_closed_form_is_a_refit(features, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    phi = torch.randn(25, features, generator=generator, dtype=torch.float64)
    targets = torch.nn.functional.one_hot(torch.arange(25) % 3, 3).double()
    monkeypatch.setattr("poprisk.risk._audit.unseen._RIDGES", (0.1,))
    centred = phi - phi.mean(0)
    ridge = 0.1 * float(centred.square().sum()) / 25
    torch.testing.assert_close(_ridge(phi, targets), refitted(phi, targets, ridge))


def test_the_features_are_the_kernel():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    phi = _features(x)
    squared = torch.cdist(x, x).square()
    kernel = torch.exp(-squared / squared[squared > 0].median()).double()
    torch.testing.assert_close(phi @ phi.T, kernel, rtol=0, atol=1e-4)


def test_copies_are_left_out_together():
    """A wrong label that was copied with its example does not vouch for itself."""
    (x, true), _ = loaded("wine", 178)
    given = true.clone()
    given[0] = (true[0] + 1) % 3
    x, given = torch.cat([x, x]), torch.cat([given, given])
    hot = torch.nn.functional.one_hot(given, 3).double()
    together = left_out(x, hot, torch.arange(178).repeat(2))
    alone = left_out(x, hot, torch.arange(356))
    assert int(together[0].argmax()) == int(true[0]) == int(together[178].argmax())
    assert int(alone[0].argmax()) == int(given[0])


def test_temperature_lowers_the_loss_and_keeps_the_order():
    scores = torch.tensor([[3.0, 0.0], [0.0, 3.0], [3.0, 0.0], [3.0, 0.0]])
    found = calibrated(scores, torch.tensor([0, 1, 0, 1]), "test")
    torch.testing.assert_close(found.probabilities[0, 0], torch.tensor(0.75), atol=0.05, rtol=0)
    assert torch.equal(found.probabilities.argmax(1), scores.argmax(1))


def test_first_features_are_those_before_the_first_step():
    (x, true), _ = loaded("wine", 100)
    run = run_on(x, true, SGD, 5)
    module = run.problem.module()
    with torch.no_grad():
        torch.testing.assert_close(first_features(run, batch_size=30), module[:-1](x))


class Tokens(nn.Module):
    """No float inputs, and no linear layer at the end."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(12, 3)

    def forward(self, tokens):
        return self.table(tokens)


def test_a_run_without_points_says_so():
    tokens = torch.randint(12, (40, 5), generator=torch.Generator().manual_seed(0))
    problem = Problem(Tokens, "cross_entropy", tokens, torch.arange(40) % 3)
    table = audit(train(problem, partial(torch.optim.SGD, lr=0.1), 20, progress=False), tier="any", progress=False)
    assert not table.wrong_labels.valid
    assert "retrain_budget=5" in table.wrong_labels.reason
    torch.testing.assert_close(table.probabilities.sum(1), torch.ones(40))


def test_folds_are_used_where_they_predict_better():
    """A product of signs is nothing to a smooth kernel, and learnable by the network."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator)
    true = (x[:, :2].prod(1) > 0).long()
    given = flipped(true, 0.1)
    run = run_on(torch.cat([x, torch.randn(400, 30, generator=generator) / 3], 1), given, SGD, 20)
    alone, budgeted = (audit(run, tier="any", retrain_budget=b, progress=False) for b in (0, 3))
    wrong = int((given != true).sum())
    for table in (alone, budgeted):
        found = table.wrong_labels
        assert not found.valid or abs(found.value - wrong) <= 2 * found.standard_error
    with pytest.raises(HyperparameterError, match="retrain_budget"):
        audit(run, retrain_budget=2, progress=False)


def test_ranks_are_scipys():
    from scipy.stats import rankdata

    scores = torch.tensor([3.0, -1.0, 3.0, 2.0, torch.inf])
    torch.testing.assert_close(rank_share(scores), torch.as_tensor(rankdata(scores.numpy()) / 5))
    assert rank_share(torch.tensor([0.0, torch.nan]))[1] == 1.0
