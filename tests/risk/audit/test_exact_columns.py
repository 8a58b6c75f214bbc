"""The exact tier against real trainings without the example."""

import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from audit_problems import CLASSES, clusters
from torch import nn
from torch.optim import SGD

from poprisk.errors import DataError, RunError
from poprisk.operators import Window
from poprisk.risk._audit.exact import _CHEAP, example_scores, seconds
from poprisk.risk._audit.run_audit import audit
from poprisk.risk._audit.table import DESCRIPTIONS
from poprisk.risk._influence.matrix import influence_matrix
from poprisk.risk._resampling import leave_one_out
from poprisk.runs._problem import Problem
from poprisk.runs._training import train


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


def test_scores_are_norms_of_the_examples_columns(run):
    window = Window.of_run(run, test_inputs=run.problem.test[0].double())
    G = window.dense_operators().test_transfer.view(5 * CLASSES, 24, CLASSES)
    norms = torch.stack([torch.linalg.matrix_norm(G[:, i], 2) for i in range(24)])
    torch.testing.assert_close(example_scores(window), norms)
    problem = Problem(nn.Linear, "squared", *torch.ones(2, 3, 1), arguments={"in_features": 1, "out_features": 1})
    without_test = train(problem, partial(SGD, lr=0.05), 2, progress=False)
    with pytest.raises(DataError, match="test_inputs"):
        example_scores(Window.of_run(without_test))


def test_auto_makes_them_where_they_are_cheap_and_says_so_where_not(run, monkeypatch):
    assert "self_influence" in audit(run, progress=False).columns
    monkeypatch.setattr("poprisk.risk._audit.exact._CHEAP", 0.0)
    found = audit(run, progress=False)
    assert "self_influence" not in found.columns
    assert 'use tier="exact"' in " ".join(found.notes)


def test_the_transfer_to_the_test_set_is_left_out_of_a_large_network(run, monkeypatch):
    monkeypatch.setattr("poprisk.risk._audit.exact._MOST_JACOBIAN", 24 * CLASSES * run.num_weights - 1)
    found = audit(run, tier="exact", progress=False)
    assert "displacement" not in found.columns
    assert "no column displacement" in " ".join(found.notes)


def test_many_steps_of_a_tiny_network_are_not_cheap():
    def price(steps):
        tiny: Any = SimpleNamespace(batch=lambda k: range(2), num_examples=3, num_steps=steps, num_weights=2)
        return seconds(tiny)

    assert price(100) < _CHEAP < price(100_000)


def test_it_says_how_far_it_is(run, capfd, monkeypatch):
    audit(run, tier="exact", progress=True)
    shown = capfd.readouterr().err
    assert shown.splitlines()[-1].startswith("audit: step ")  # the exact columns are not worth a word here
    monkeypatch.setattr("poprisk._core.progress._LONG", 0.0)
    monkeypatch.setattr("poprisk._core.progress._MEASURED", 0.0)
    audit(run, tier="exact", progress=True)
    shown = capfd.readouterr().err
    for part in ("influence", "exclusion"):  # one pass back, one forward
        assert re.search(rf"^{part}: about \d+ s and ", shown, re.MULTILINE)
        assert f"{part}: {12 * run.num_examples} of {12 * run.num_examples}" in shown
    assert "Ctrl-C keeps the other columns once the exact ones have begun" in shown
    audit(run, tier="exact", progress=False)
    assert not capfd.readouterr().err


class _Twice(torch.autograd.Function):
    """Written for plain backward passes: no transform takes it."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, *slopes):
        return 2 * slopes[0]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, CLASSES)

    def forward(self, x):
        return _Twice.apply(self.inner(x))


def test_a_network_that_allows_no_exact_columns_has_the_others():
    make, why = Custom, "autograd.Function"
    inputs, given, _ = clusters(n=24, wrong=3)
    strange = train(Problem(make, "cross_entropy", inputs, given), partial(SGD, lr=0.05), 12, progress=False)
    found = audit(strange, progress=False)
    assert "self_influence" not in found.columns
    assert "suspicion" in found.columns
    assert any(note.startswith("no exact columns") and why in note for note in found.notes)
    with pytest.raises(RunError, match=f"exact tier is not possible.*{why}"):
        audit(strange, tier="exact", progress=False)


def make_in_place():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, CLASSES))


def test_activations_in_place_have_exact_columns():
    inputs, given, _ = clusters(n=24, wrong=3)
    run = train(Problem(make_in_place, "cross_entropy", inputs, given), partial(SGD, lr=0.05), 12, progress=False)
    assert bool(audit(run, tier="exact", progress=False)["self_influence"].isfinite().all())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")
@pytest.mark.parametrize("loss", ["cross_entropy", "squared"])
def test_columns_of_a_run_on_a_gpu_are_on_the_cpu(loss):
    inputs, given, _ = clusters(n=24, wrong=3)
    targets = given if loss == "cross_entropy" else torch.randn(24, CLASSES, generator=torch.Generator().manual_seed(2))
    test = (inputs[:3], targets[:3])
    problem = Problem(partial(nn.Linear, 6, CLASSES), loss, inputs, targets, test=test)
    runs = [train(problem.to(d), partial(SGD, lr=0.05), 12, batch_size=12, progress=False) for d in ("cuda", "cpu")]
    there, here = (audit(run, tier="exact", progress=False) for run in runs)
    for name, column in there.columns.items():
        assert column.device.type == "cpu"
        torch.testing.assert_close(column, here[name], rtol=1e-2, atol=1e-3)
