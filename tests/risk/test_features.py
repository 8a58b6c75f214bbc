"""Out-of-sample probabilities from the features of kept weights: real refits, and a verdict that can fail."""

from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from poprisk import KeepBest, Problem, hold_back, out_of_sample_probabilities, train
from poprisk.errors import HyperparameterError, RunError
from poprisk.risk import _features
from poprisk.risk._features import left_out_probabilities

N = 900


@cache
def flipped():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 6, generator=generator)
    true = x[:, :3].argmax(1)
    wrong = torch.rand(N, generator=generator) < 0.3
    return x, torch.where(wrong, (true + 1) % 3, true), wrong


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 3))


@cache
def kept():
    """A loop as users write it, with augmentation, and what was trained on."""
    x, y, _ = flipped()
    torch.manual_seed(0)
    model, generator = network(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (inputs, labels), held = hold_back((x, y), 0.1)
    keeper = KeepBest(model, optimizer, held, F.cross_entropy)
    for _ in range(25):
        for rows in torch.randperm(len(inputs), generator=generator).split(90):
            noise = 0.1 * torch.randn(inputs[rows].shape, generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[rows] + noise), labels[rows]).backward()
            optimizer.step()
    keeper.finish()
    return keeper, (inputs, labels)


@cache
def augmented_run():
    x, y, _ = flipped()
    noisy = lambda x, generator: x + 0.1 * torch.randn(x.shape, generator=generator)  # noqa: E731
    problem = Problem(network, "cross_entropy", x, y, augment=noisy)
    rule = partial(torch.optim.AdamW, lr=1e-2)
    return train(problem, rule, 200, batch_size=90, hold_back=0.1, progress=False)


def test_left_out_scores_are_those_of_real_refits():
    generator = torch.Generator().manual_seed(0)
    points, labels = torch.randn(30, 4, generator=generator), torch.randint(3, (30,), generator=generator)
    held = torch.randn(5, 4, generator=generator)
    x, y = points.double() - points.double().mean(0), F.one_hot(labels, 3).double()
    values = torch.linalg.eigvalsh(x.T @ x)
    for ridge, (scores, held_scores) in zip(
        _features._RIDGES, _features._regressions(points, labels, held, 3), strict=True
    ):
        added = ridge * values.mean() * torch.eye(4, dtype=torch.double)

        def fitted(rows, at, added=added):
            centre, mean = x[rows].mean(0), y[rows].mean(0)
            z = x[rows] - centre
            return mean + (at - centre) @ torch.linalg.solve(z.T @ z + added, z.T @ (y[rows] - mean))

        real = torch.stack([fitted(torch.arange(30) != i, x[i]) for i in range(30)])
        assert_close(scores, real, rtol=1e-9, atol=1e-9)
        assert_close(held_scores, fitted(torch.ones(30, dtype=torch.bool), held.double() - points.double().mean(0)))


def test_a_keeper_judges_the_labels_it_was_trained_on():
    keeper, data = kept()
    found = out_of_sample_probabilities(keeper, data=data)
    assert found.valid, found.reason
    assert (found.method, found.cost, len(found.probabilities)) == ("features", 0.0, len(data[1]))
    assert torch.equal(found.labels, data[1])
    _, _, wrong = flipped()
    (_, flags), _ = hold_back((flipped()[1], wrong), 0.1, labels=flipped()[1])
    own = found.probabilities.gather(1, data[1][:, None])[:, 0]
    assert own[flags].mean() < 0.5 * own[~flags].mean()
    assert abs(found.log_loss - float(keeper.finish().value)) < 0.25


def test_a_run_with_augmentation_gives_those_of_all_its_examples():
    run = augmented_run()
    found = out_of_sample_probabilities(run)
    assert found.valid, found.reason
    assert found.method == "features"
    assert found.probabilities.shape == (N, 3)
    assert_close(found.probabilities.sum(1), torch.ones(N))
    assert run.kept is not None
    held = run.kept.held
    own = found.probabilities.gather(1, found.labels[:, None])[:, 0]
    left = torch.ones(N, dtype=torch.bool)
    left[held] = False
    assert abs(float(own[left].log().mean() - own[held].log().mean())) < 0.3


def test_features_that_know_the_label_are_found_out():
    """A verdict that cannot fail says nothing: here the features of trained examples contain their labels."""
    x, y, _ = flipped()
    secret = 3 * F.one_hot(y, 3).float()
    told = left_out_probabilities(
        torch.cat([x, secret], 1)[100:], y[100:], torch.cat([x, 0 * secret], 1)[:100], y[:100], 3
    )
    fair = left_out_probabilities(x[100:], y[100:], x[:100], y[:100], 3)
    assert not told.valid
    assert fair.valid, fair.reason
    few = left_out_probabilities(x[12:], y[12:], x[:12], y[:12], 3)
    assert not few.valid
    assert "too few" in few.reason


def test_a_little_memory_is_taken_off():
    """Half a unit on the own label's score of trained examples: the constant finds it, and the losses agree."""
    x, y, _ = flipped()
    trace = torch.zeros(N, 3)
    trace[100:] = 0.15 * F.one_hot(y[100:], 3)
    points = torch.cat([x + trace @ torch.eye(3, 6), x.square()], 1)
    found = left_out_probabilities(points[100:], y[100:], points[:100], y[:100], 3)
    losses = [-p.gather(1, t[:, None]).log().mean() for p, t in ((found.trained, y[100:]), (found.held, y[:100]))]
    assert abs(float(losses[0] - losses[1])) < 0.2


def test_what_is_missing_is_said():
    keeper, data = kept()
    with pytest.raises(HyperparameterError, match="data="):
        out_of_sample_probabilities(keeper)
    with pytest.raises(HyperparameterError, match="by their features"):
        out_of_sample_probabilities(keeper, "k_fold", 5, data=data)
    with pytest.raises(HyperparameterError, match="leave data out"):
        out_of_sample_probabilities(augmented_run(), data=data)
    x, y, _ = flipped()
    plain = train(Problem(network, "cross_entropy", x, y), torch.optim.AdamW, 3, batch_size=90, progress=False)
    with pytest.raises(RunError, match="held-back"):
        out_of_sample_probabilities(plain, "features")
    model = network()
    unfinished = KeepBest(model, torch.optim.AdamW(model.parameters()), (x[:50], y[:50]), F.cross_entropy)
    with pytest.raises(HyperparameterError, match="finish"):
        out_of_sample_probabilities(unfinished, data=(x, y))


def test_the_risk_along_a_training_is_that_of_every_moment():
    keeper, _ = kept()
    risks = keeper.risks
    assert [each.step for each in risks] == [each.step for each in keeper.curve.moments]
    for each, moment in zip(risks, keeper.curve.moments, strict=True):
        assert each.value == float(moment.losses.double().mean())
        assert each.valid
        assert each.accuracy == float(1 - moment.scores.double().mean())
        assert each.standard_error >= float(moment.losses.double().std()) / len(moment.losses) ** 0.5
    model, block = network(), (torch.ones(4, 6), torch.arange(4) % 3)
    few = KeepBest(model, torch.optim.SGD(model.parameters(), 0.1), block, F.cross_entropy)
    few.measure()
    assert not few.risks[0].valid
