"""The first-order direction common to all holdouts, by enumeration."""

import pytest
import torch

from oracles.resampling import averaged_holdout_direction
from poprisk.errors import DataError
from poprisk.risk._resampled import holdout_weights
from poprisk_lab.theory.first_variation import common_first_variation, delete_direction


@pytest.mark.parametrize("n", [3, 6, 7])
def test_the_common_first_variation(n):
    """Prop. common_first_variation: averaged over all holdouts that contain i, the direction does not depend on k."""
    for i in (0, n - 1):
        e_i = torch.eye(n, dtype=torch.float64)[i]
        nu = n / (n - 1) * (e_i - 1 / n)
        torch.testing.assert_close(delete_direction(n, i), nu)
        torch.testing.assert_close(1 - delete_direction(n, i), holdout_weights(n, [i]))
        for k in range(1, n):
            by_hand = averaged_holdout_direction(n, k, i)
            torch.testing.assert_close(common_first_variation(n, k, i), by_hand)
            torch.testing.assert_close(by_hand, nu)


def test_bad_input():
    for n, i in ((1, 0), (3, 3)):
        with pytest.raises(DataError, match="at least 2 examples"):
            delete_direction(n, i)
    for k in (0, 3):
        with pytest.raises(DataError, match=r"1 … 2 of 3 examples"):
            common_first_variation(3, k, 0)
