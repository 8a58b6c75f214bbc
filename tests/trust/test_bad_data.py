"""Data that cannot be meant are refused before anything is trained, with their number and the first of them."""

from functools import partial

import pytest
import torch
from cli_calls import call
from torch import nn

from poprisk import Problem
from poprisk.errors import DataError, PopRiskWarning

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def network(outputs=2):
    return nn.Linear(3, outputs)


def having(x, value, *rows):
    x = x.clone()
    x[list(rows)] = value
    return x


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite(value):
    said = r"inputs must be finite, but 2 of 12 examples have NaN or infinite values, the first is example 4"
    with pytest.raises(DataError, match=f"training {said}"):
        Problem(network, "cross_entropy", having(X, value, 4, 7), Y)
    with pytest.raises(DataError, match=f"test {said}"):
        Problem(network, "cross_entropy", X, Y, test=(having(X, value, 4, 7), Y))
    with pytest.raises(DataError, match=r"training targets must be finite.*example 0: .*allow_nonfinite=True"):
        Problem(network, "squared", X, having(X[:, :2], value, 0))
    with pytest.raises(DataError, match=r"inputs\[1\] must be finite"):
        Problem(network, "squared", (X, having(X, value, 1)), X)
    with pytest.warns(PopRiskWarning, match="because of allow_nonfinite=True"):
        assert len(Problem(network, "cross_entropy", having(X, value, 4), Y, allow_nonfinite=True)) == 12


@pytest.mark.parametrize(
    ("loss", "targets", "message"),
    [
        ("cross_entropy", having(Y, -1, 3, 5), "2 of 12 examples have others, the first is example 3"),
        ("cross_entropy", torch.full((12,), -100), "all -100, the label that cross_entropy ignores"),
        (
            "cross_entropy",
            having(X[:, :2].abs(), -0.5, 2),
            "1 of 12 examples have others, the first is",
        ),
        ("logistic", having(Y.float(), 5.0, 1), "0, 1 or a probability .* 1 of 12 examples have others, the first is"),
        ("logistic", 2.0 * Y - 1, "map the two classes to 0 and 1"),
    ],
)
def test_targets_that_do_not_fit_the_loss(loss, targets, message):
    with pytest.raises(DataError, match=message):
        Problem(partial(network, 1 if loss == "logistic" else 2), loss, X, targets)


def test_good_data_stay_good():
    some_ignored = Problem(network, "cross_entropy", X, having(Y, -100, 3))
    probabilities = Problem(network, "cross_entropy", X, torch.softmax(X[:, :2], 1))
    logistic = Problem(partial(network, 1), "logistic", X, Y.float())
    whole_numbers = Problem(network, "cross_entropy", torch.randint(5, (12, 3)), Y)
    assert [len(each) for each in (some_ignored, probabilities, logistic, whole_numbers)] == [12] * 4
    assert int(some_ignored.targets[3]) == -100


def test_the_command_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad_task.py").write_text(
        "import test_bad_data as t\nfrom poprisk import Problem\n"
        "def nan(): return Problem(t.network, 'cross_entropy', t.having(t.X, float('nan'), 2), t.Y)\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, err = call(capsys, "train", "bad_task.py:nan", "--steps", 2)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "the first is example 2" in err
