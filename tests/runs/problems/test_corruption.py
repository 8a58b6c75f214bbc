"""Replaced labels: how many, which, and that they are wrong."""

import pytest
import torch

from poprisk.errors import DataError
from poprisk.runs._digits import replace_labels


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4, 0.333, 1.0])
def test_share_is_exact_and_every_replaced_label_is_wrong(share):
    labels = torch.arange(1000) % 10
    spoiled = replace_labels(labels, share, 10, seeded())
    assert int(spoiled.wrong.sum()) == round(1000 * share)
    assert spoiled.share == pytest.approx(share, abs=5e-4)
    torch.testing.assert_close(spoiled.wrong, spoiled.labels != labels)
    assert set(spoiled.labels.tolist()) <= set(range(10))


def test_replacements_are_uniform_over_the_other_classes():
    labels = torch.full((30_000,), 3)
    counts = replace_labels(labels, 1.0, 4, seeded()).labels.bincount(minlength=4)
    assert counts[3] == 0
    # three cells of 10 000: standard deviation 82, so 5 of them
    torch.testing.assert_close(counts[:3].double(), torch.full((3,), 1e4, dtype=torch.float64), atol=410, rtol=0)


def test_same_generator_same_labels_and_input_untouched():
    labels = torch.arange(50) % 5
    before = labels.clone()
    first, again, other = (replace_labels(labels, 0.4, 5, seeded(s)).labels for s in (1, 1, 2))
    torch.testing.assert_close(first, again)
    assert not torch.equal(first, other)
    torch.testing.assert_close(labels, before)


def test_no_labels_at_all():
    assert replace_labels(torch.empty(0, dtype=torch.long), 0.5, 3, seeded()).labels.numel() == 0


@pytest.mark.parametrize(
    ("labels", "share", "classes", "message"),
    [
        ([0, 1], 1.5, 2, "share must lie between 0 and 1, got 1.5"),
        ([0, 1], float("nan"), 2, "got nan"),
        ([0, 0], 0.5, 1, "at least 2, got 1"),
        ([0, 5], 0.5, 5, "got 0 … 5"),
        ([-1, 1], 0.5, 5, "got -1 … 1"),
    ],
)
def test_wrong_arguments(labels, share, classes, message):
    with pytest.raises(DataError, match=message):
        replace_labels(torch.tensor(labels), share, classes, seeded())
