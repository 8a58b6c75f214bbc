"""Confident learning against its definition in loops, and the reading of its count over time."""

import math

import pytest
import torch

from poprisk.risk._audit.confident import WrongCount, confident_joint, read_count, wrong_count
from poprisk.risk._audit.histories import rank_share


def naive_joint(p, labels):
    """Algorithm of Northcutt et al., example by example."""
    classes = p.shape[1]
    thresholds = [p[labels == j, j].mean() if (labels == j).any() else math.inf for j in range(classes)]
    joint = torch.zeros(classes, classes, dtype=p.dtype)
    for row, given in zip(p, labels, strict=True):
        above = [j for j in range(classes) if row[j] >= thresholds[j] * (1 - 1e-6)]
        if above:
            joint[given, max(above, key=lambda j: row[j])] += 1
    return joint


def probabilities(n=200, classes=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(n, classes, generator=generator, dtype=torch.float64)).softmax(1)
    return p, torch.randint(classes - 1, (n,), generator=generator)  # no example of the last class


def test_the_joint_is_its_definition():
    p, labels = probabilities()
    torch.testing.assert_close(confident_joint(p, labels), naive_joint(p, labels))


def test_known_probabilities_give_the_exact_number():
    true = torch.arange(4).repeat(25)
    given = true.clone()
    given[:10] = (true[:10] + 1) % 4
    p = 0.9 * torch.nn.functional.one_hot(true, 4).double() + 0.025
    assert wrong_count(p, given).value == pytest.approx(10)


def test_cleanlab_counts_the_same_joint():
    count = pytest.importorskip("cleanlab.count")
    p, labels = probabilities(classes=4)
    p, labels = torch.cat([p, p[:20]]), torch.cat([labels, torch.full((20,), 3)])
    theirs = count.compute_confident_joint(labels.numpy(), p.numpy(), calibrate=False)
    mine = confident_joint(p, labels)
    assert (torch.as_tensor(theirs) - mine).abs().sum() <= 4  # cleanlab puts at least 1 on its diagonal


def counts(values):
    return [WrongCount(float(v), math.sqrt(v)) for v in values]


def test_the_count_is_read_where_it_is_level():
    """Falls as 1/t while learning, rests at 100, falls again while memorizing."""
    steps = [round(2 ** (j / 2)) for j in range(2, 30)]
    level = [100 + 40_000 / t if t < 2000 else 100 * (2000 / t) ** 2 for t in steps]
    found = read_count(steps, counts(level), n=1000, classes=10, epoch=20)
    assert found.valid
    assert abs(found.value - 100) <= 2 * found.standard_error
    assert found.standard_error < 60


@pytest.mark.parametrize("power", [1.2, 2.0])
def test_a_count_that_never_rests_is_not_valid(power):
    steps = [round(1.5**j) for j in range(1, 20)]
    found = read_count(steps, counts([5000 / t**power for t in steps]), n=1000, classes=10, epoch=5)
    assert not found.valid
    assert found.value == pytest.approx(5000 / steps[-1] ** power)


def test_one_moment_is_not_enough():
    found = read_count([10], counts([7]), n=100, classes=3, epoch=1)
    assert (found.value, found.valid) == (7.0, False)


def test_ranks_are_scipys():
    from scipy.stats import rankdata

    scores = torch.tensor([3.0, -1.0, 3.0, 2.0, math.inf])
    torch.testing.assert_close(rank_share(scores), torch.as_tensor(rankdata(scores.numpy()) / 5))
    assert rank_share(torch.tensor([0.0, math.nan]))[1] == 1.0
