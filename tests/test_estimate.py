"""What an estimate accepts, how it reads, and what it becomes on disk."""

import json

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from poprisk._core.estimate import Estimate
from poprisk.errors import DataError

NAN = float("nan")


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (0.41234, 0.0312, "0.412 ± 0.031"),
        (0.4, 0.0996, "0.400 ± 0.100"),
        (-12.345, 1.0, "-12.3 ± 1.0"),
        (1234.5, 23.0, "1234 ± 23"),
        (1.23456e8, 4.2e5, "1.2346e+08 ± 4.2e+05"),
        (1.23456e-9, 4.2e-12, "1.2346e-09 ± 4.2e-12"),
        (0.0, 1e-9, "0 ± 1e-09"),
        (2.5, 0.0, "2.5 ± 0"),
    ],
)
def test_a_number_is_printed_to_the_digits_that_are_known(value, error, text):
    assert str(Estimate(value, error)) == f"{text} (valid)"


def test_the_verdict_is_part_of_the_text():
    assert str(Estimate(1.0, 0.5, False, "interpolates")) == "1.00 ± 0.50 (not valid: interpolates)"
    assert str(Estimate(1.0, 0.0, reason="exact")) == "1 ± 0 (valid: exact)"
    assert str(Estimate(NAN, NAN, False, "no")) == "nan ± nan (not valid: no)"


def test_tensors_are_summarized():
    diagonal = Estimate(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.1, 0.2, 0.3]))
    assert str(diagonal) == "tensor of shape [3] with mean 2, standard errors from 0.1 to 0.3 (valid)"
    assert str(Estimate(torch.empty(0), torch.empty(0))) == "tensor of shape [0] (valid)"


@pytest.mark.parametrize("number", [3, np.float32(3), np.int64(3), torch.tensor(3.0)])
def test_single_numbers_become_floats(number):
    estimate = Estimate(number, number, cost=2)
    assert type(estimate.value) is float
    assert type(estimate.standard_error) is float
    assert type(estimate.cost) is float
    assert estimate.value == 3.0


def test_tensors_leave_the_graph():
    w = torch.ones(2, requires_grad=True)
    assert not Estimate(2 * w, torch.zeros(2)).value.requires_grad


def test_to_dict_is_strict_json_and_comes_back():
    estimate = Estimate(torch.tensor([1.0, NAN]), torch.tensor([NAN, 0.5]), False, "half known", 4)
    plain = json.loads(json.dumps(estimate.to_dict(), allow_nan=False))
    assert plain == {
        "value": [1.0, None],
        "standard_error": [None, 0.5],
        "valid": False,
        "reason": "half known",
        "cost": 4.0,
    }
    whole = Estimate(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25]))
    assert_close(torch.tensor(whole.to_dict()["value"]), whole.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, -0.1), "must not be negative"),
        ((1.0, torch.ones(2)), r"one shape, got \[\] and \[2\]"),
        ((torch.ones(2), torch.tensor([1.0, -1.0])), "must not be negative"),
        ((NAN, 0.1), "valid=False"),
        ((1.0, NAN), "valid=False"),
        ((1.0, float("inf")), "valid=False"),
        ((torch.tensor([1.0, NAN]), torch.ones(2)), "valid=False"),
        ((1.0, 0.1, False), "needs a reason"),
        ((1.0, 0.1, True, "", -1), "cost must be"),
        ((1.0, 0.1, True, "", NAN), "cost must be"),
        (("one", 0.1), "must be a number or a tensor, got str"),
        ((None, 0.1), "must be a number or a tensor, got NoneType"),
        ((torch.ones(2, dtype=torch.int64), torch.ones(2)), "real numbers, got a tensor of torch.int64"),
        ((torch.ones(2, dtype=torch.complex64), torch.ones(2)), "real numbers"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(DataError, match=message):
        Estimate(*arguments)
