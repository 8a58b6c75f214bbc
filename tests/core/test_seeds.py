"""No draw of ours repeats one that users make with a plain seed, as they do to choose whose labels are wrong."""

from functools import cache

import pytest
import torch
from torch import nn

from poprisk import Problem, hold_back, train
from poprisk._core.seeds import generator_for, shuffled
from poprisk.risk import exclusion, k_fold

N, WRONG = 400, 80


def wrong_labels(seed):
    """The places of wrong labels, as they are usually drawn."""
    wrong = torch.zeros(N, dtype=torch.bool)
    wrong[torch.randperm(N, generator=torch.Generator().manual_seed(seed))[:WRONG]] = True
    return wrong


def share(places, seed):
    return wrong_labels(seed)[places].double().mean().item()


@cache
def short_run():
    x = torch.arange(N, dtype=torch.float64)[:, None] / N
    problem = Problem(nn.Linear, "squared", x, x, arguments={"in_features": 1, "out_features": 1})
    return train(problem, lambda p: torch.optim.SGD(p, lr=0.1), 2, batch_size=100, progress=False)


# Of 40 draws without replacement from 400, a fifth of them wrong, fewer than 0 or more than 18 are 1 in 10,000.
@pytest.mark.parametrize("seed", range(4))
def test_held_back_examples_are_as_noisy_as_the_rest(seed):
    places, labels = torch.arange(N), torch.arange(N) % 4
    for data in ((places, labels), (places, labels.double())):  # by class, and without classes
        _, (held, _) = hold_back(data, 0.1, seed=seed)
        assert 0.05 < share(held, seed) < 0.45
    torch.manual_seed(seed)  # the global stream is the same one
    assert torch.equal(torch.randperm(N)[:WRONG].sort().values, wrong_labels(seed).nonzero().squeeze(1))


@pytest.mark.parametrize("seed", range(4))
def test_examples_that_stand_for_all_are_as_noisy_as_the_rest(seed):
    found = exclusion(short_run(), 40, controls=0, seed=seed)
    assert 0.05 < share(found.examples, seed) < 0.45


def test_wrong_labels_do_not_fill_a_fold():
    found = k_fold(short_run(), 10, seed=0, progress=False)
    noise = [share(found.example[found.member == fold], 0) for fold in range(10)]
    assert max(noise) < 0.45
    assert sum(noise) / 10 == pytest.approx(WRONG / N)


def test_each_purpose_has_numbers_of_its_own():
    plain = torch.randn(N, generator=torch.Generator().manual_seed(3))
    streams = [torch.randn(N, generator=generator_for(3, purpose)) for purpose in ("probes", "sketch")]
    both = torch.corrcoef(torch.stack([plain, *streams])) - torch.eye(3)
    assert both.abs().max() < 0.2
    assert torch.equal(shuffled(N, 3, "folds"), shuffled(N, 3, "folds"))
