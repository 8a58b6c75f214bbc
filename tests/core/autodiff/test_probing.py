"""The look at a batch function: rounding is told from examples that see each other."""

import pytest
import torch

from poprisk._core.autodiff.probing import probe
from poprisk.errors import DataError

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def rounded(rows: list[int]) -> torch.Tensor:
    """Differences of large numbers that are all 0, rounded in another way for every size of the batch."""
    error = 3e-5 * torch.randn(1, 3, generator=torch.Generator().manual_seed(len(rows)))
    return torch.full((len(rows), 3), 300.0) + error - 300.0


@pytest.mark.parametrize("outputs", [rounded, lambda rows: X[rows].tanh(), lambda rows: rounded(rows) + X[rows]])
def test_rounding_is_no_obstacle(outputs):
    assert probe(outputs, 5).outputs == 3


@pytest.mark.parametrize(
    "outputs",
    [
        lambda rows: X[rows] - X[rows].mean(0),
        lambda rows: 1e-4 * (X[rows] - X[rows].mean(0)),
        lambda rows: X[rows].softmax(0),
        lambda rows: X[rows] / len(rows),
        lambda rows: (300 + 0.1 * (X[rows] - X[rows].mean(0))) - 300,
    ],
)
def test_examples_that_see_each_other_are_found(outputs):
    with pytest.raises(DataError, match="by itself"):
        probe(outputs, 5)
