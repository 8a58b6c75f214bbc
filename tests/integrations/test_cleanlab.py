"""What cleanlab and Spotlight get of an audit, and, where cleanlab is installed, what it makes of it."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

from poprisk.errors import DataError, MissingExtraError
from poprisk.integrations.cleanlab import cleanlab_columns, cleanlab_inputs, to_datalab
from poprisk.integrations.spotlight import show_in_spotlight, spotlight_inputs
from poprisk.risk._audit.run_audit import audit
from poprisk.runs._problem import Problem
from poprisk.runs._training import train


@pytest.fixture(scope="module")
def table():
    true = torch.arange(3).repeat(30)
    given = true.clone()
    given[:6] = (true[:6] + 1) % 3
    inputs = nn.functional.one_hot(true, 3) + 0.3 * torch.randn(90, 3, generator=torch.Generator().manual_seed(0))
    problem = Problem(nn.Linear, "cross_entropy", inputs, given, arguments={"in_features": 3, "out_features": 3})
    return audit(train(problem, partial(SGD, lr=0.5), 60, batch_size=30, progress=False), tier="any", progress=False)


@pytest.fixture(scope="module")
def regression():
    x = torch.linspace(0, 1, 9).reshape(9, 1)
    problem = Problem(nn.Linear, "squared", x, x, arguments={"in_features": 1, "out_features": 1})
    return audit(train(problem, partial(SGD, lr=0.1), 5, progress=False), tier="any", progress=False)


def test_inputs_are_labels_and_probabilities(table):
    inputs = cleanlab_inputs(table)
    assert inputs["labels"].dtype == np.int64
    assert inputs["pred_probs"].shape == (90, 3)
    np.testing.assert_allclose(inputs["pred_probs"].sum(1), 1, atol=1e-12)
    np.testing.assert_allclose(inputs["pred_probs"], table.probabilities.numpy(), atol=1e-6)


def test_a_regression_has_no_classes_for_cleanlab(regression):
    with pytest.raises(DataError, match="audit of kind 'regression'"):
        cleanlab_inputs(regression)


def test_without_the_packages_the_extra_is_named(table, monkeypatch):
    for name in ("cleanlab", "cleanlab.filter", "cleanlab.rank", "renumics"):
        monkeypatch.setitem(sys.modules, name, None)
    for call, extra in ((cleanlab_columns, "cleanlab"), (to_datalab, "cleanlab"), (show_in_spotlight, "spotlight")):
        with pytest.raises(MissingExtraError, match=rf"poprisk\[{extra}\]"):
            call(table)


def test_cleanlab_agrees_on_the_worst(table):
    pytest.importorskip("cleanlab")
    columns = cleanlab_columns(table, filter_by="both")
    assert columns["cleanlab_is_issue"].shape == columns["cleanlab_quality"].shape == (90,)
    assert set(columns["cleanlab_quality"].argsort()[:6].tolist()) == set(range(6))
    unseen = table.probabilities[torch.arange(90), table["given_label"]]
    np.testing.assert_allclose(columns["cleanlab_quality"], unseen.numpy(), atol=1e-5)


def test_spotlight_gets_a_frame_and_the_kinds_of_its_columns(table):
    pytest.importorskip("pandas")
    features = torch.randn(90, 4).tolist()
    frame, kinds = spotlight_inputs(table, features=(features, "Embedding"))
    assert set(kinds) == set(frame.columns)
    assert (kinds["given_label"], kinds["forgetting_events"], kinds["features"]) == ("Category", "int", "Embedding")
    assert frame["given_label"].tolist() == [str(label) for label in table["given_label"].tolist()]
    assert frame["features"][3] == features[3]
    with pytest.raises(DataError, match="90 examples, got 2"):
        spotlight_inputs(table, image=([1, 2], "Image"))
