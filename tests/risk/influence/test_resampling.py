"""Held-out losses are those of models really trained without the example, and their errors are honest."""

import math
from functools import partial

import pytest
import torch
from held_out import EXACT, MOMENTUM, N, assert_held_out, data, expected, make_mlp, record
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.flop_counter import FlopCounterMode

from oracles.resampling import holdout_weights as oracle_weights
from oracles.resampling import nested_cross_validation
from poprisk.errors import DataError
from poprisk.risk._error import inflated_error, small_sample
from poprisk.risk._k_fold import k_fold
from poprisk.risk._resampled import holdout_weights
from poprisk.risk._resampling import cross_validation_risk, holdouts, leave_one_out, subsets
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import retrain
from poprisk.runs._problem import Problem
from poprisk.runs._replay import replay
from poprisk.runs._training import train


@pytest.fixture(scope="module")
def run():
    return record()


@pytest.mark.parametrize("renormalize", [True, False])
def test_leave_one_out(run, renormalize):
    held = [(i,) for i in range(N)]
    alphas = 1 - torch.eye(N, dtype=torch.float64)
    weights, outputs = expected(run, held, alphas * (N / (N - 1) if renormalize else 1.0))
    found = leave_one_out(run, renormalize=renormalize)
    torch.testing.assert_close(found.weights, weights, **EXACT)
    assert found.example.tolist() == list(range(N))
    assert_held_out(found, run, outputs)
    assert found.risk.value == pytest.approx(found.losses.mean().item())
    assert found.risk.valid == ("is larger than the risk" not in found.risk.reason)
    assert found.risk.cost == found.trainings == N
    assert found.target == "a model trained on 11 of the 12 examples"
    some = leave_one_out(run, [7, 2], renormalize=renormalize)
    torch.testing.assert_close(some.outputs, outputs[[7, 2]], **EXACT)
    assert not some.risk.valid  # two examples have no spread to speak of
    assert "too few" in some.risk.reason
    assert some.trainings == 2


def test_k_fold(run):
    found = k_fold(run, folds=4, seed=6)
    assert found.example.tolist() == list(range(N))
    assert sorted(found.member.bincount().tolist()) == [3, 3, 3, 3]
    held = [tuple((found.member == f).nonzero().squeeze(1).tolist()) for f in range(4)]
    weights, outputs = expected(run, held)
    torch.testing.assert_close(found.weights, weights, **EXACT)
    order = torch.tensor([i for index in held for i in index]).argsort()
    assert_held_out(found, run, outputs[order])
    assert found.target == "a model trained on 9 of the 12 examples"
    assert found.trainings == 4
    assert found.risk.standard_error > found.risk.value  # of 12 examples: the only reason why it is not valid
    assert "the standard error" in found.risk.reason
    assert not found.risk.valid
    problem = run.problem

    def loss(w):
        return F.cross_entropy(problem.model(torch.float64).outputs(w, problem.inputs), problem.targets)

    price = sum(loss(w) for w in weights) / 4 - loss(run.weights(run.num_steps))
    assert found.bias_corrected.value == pytest.approx((found.losses.mean() - price).item())
    assert found.bias_corrected.standard_error == found.risk.standard_error
    assert found.bias_corrected.target == "a model trained on all 12 examples"
    assert not torch.equal(k_fold(run, folds=4, seed=4).member, found.member)
    uneven = k_fold(run, folds=5)
    assert uneven.target == "a model trained on 9 to 10 of the 12 examples"
    assert k_fold(run, folds=N).risk.value == pytest.approx(leave_one_out(run).risk.value)


def test_nested_cross_validation(run):
    plain, found = k_fold(run, folds=4, seed=3), k_fold(run, folds=4, seed=3, nested=1)
    assert found.trainings == 4 + 6
    assert torch.equal(found.member, plain.member)
    torch.testing.assert_close(found.losses, plain.losses, **EXACT)
    assert found.risk.value == pytest.approx(plain.risk.value)
    problem, fold, pairs = run.problem, plain.member, {}
    for f in range(4):
        for g in range(f):
            index = ((fold == f) | (fold == g)).nonzero().squeeze(1).tolist()
            _, outputs = expected(run, [index])
            losses = F.cross_entropy(outputs, problem.targets[index], reduction="none")
            pairs[frozenset((f, g))] = dict(zip(index, losses.tolist(), strict=True))
    error, corrected = nested_cross_validation(plain.losses, fold, 4, pairs)
    runner_up = found.outputs.topk(2, dim=1).indices[:, 1]  # what one unseen mistake would cost, shared by all
    mistake = F.cross_entropy(found.outputs, runner_up).item() / N
    assert found.risk.standard_error == pytest.approx(math.hypot(error, mistake))
    assert found.bias_corrected.value == pytest.approx(corrected)
    assert found.method == "nested 4-fold"
    twice = k_fold(run, folds=3, seed=3, nested=2)
    assert twice.trainings == 2 * (3 + 3)
    assert math.isfinite(twice.risk.standard_error)
    assert len(twice.losses) == N


def test_holdouts_and_subsets(run):
    found = holdouts(run, 3, 4, seed=5)
    held = [tuple(found.example[found.member == k].tolist()) for k in range(4)]
    assert [len(set(index)) for index in held] == [3, 3, 3, 3]
    assert len(set(held)) > 1
    weights, outputs = expected(run, held)
    torch.testing.assert_close(found.weights, weights, **EXACT)
    assert_held_out(found, run, outputs)
    masks = torch.ones(4, N, dtype=torch.bool)
    for k, index in enumerate(held):
        masks[k, list(index)] = False
    same = subsets(run, masks)
    assert torch.equal(same.weights, found.weights)
    assert torch.equal(same.example, found.example)
    few = torch.ones(8, N, dtype=torch.bool)  # so much is left out that all examples are shown to every member
    few[:, :7] = False
    few[7] = True
    half = subsets(run, few)
    assert half.example.tolist() == [*range(7)] * 7
    torch.testing.assert_close(half.outputs[:7], half.member_outputs(run.problem.inputs[:7])[0], **EXACT)
    assert half.target == "a model trained on 5 to 12 of the 12 examples"
    inputs, labels = run.problem.test
    losses = half.member_losses(inputs, labels)
    torch.testing.assert_close(
        losses[7], F.cross_entropy(half.member_outputs(inputs)[7], labels, reduction="none"), **EXACT
    )
    untouched = subsets(run, torch.ones(1, N, dtype=torch.bool))
    assert untouched.outputs.shape == (0, 3)
    assert not untouched.risk.valid
    assert math.isnan(untouched.risk.value)


def test_another_precision_has_a_run_of_its_own():
    inputs, labels = data()
    problem = Problem(make_mlp, "cross_entropy", inputs.float(), labels)
    run = train(problem, partial(Adam, lr=0.05), 15, batch_size=5, progress=False)
    wide, narrow = leave_one_out(run, dtype=torch.float64), leave_one_out(run)
    assert (wide.outputs.dtype, narrow.outputs.dtype) == (torch.float64, torch.float32)
    assert (wide.trainings, narrow.trainings) == (N + 1, N)
    torch.testing.assert_close(wide.displacement.float(), narrow.displacement, rtol=1e-2, atol=1e-3)
    assert wide.weights.shape == narrow.weights.shape


def test_holdout_weights_keep_their_sum_unless_told_otherwise():
    for held in ([1], [0, 3]):
        torch.testing.assert_close(holdout_weights(5, held), oracle_weights(5, held))
    assert torch.equal(holdout_weights(4, [1], renormalize=False), torch.tensor([1.0, 0, 1, 1], dtype=torch.float64))


def truth(inputs):
    return inputs.sum(1, keepdim=True).tanh()


def draw(n, generator):
    inputs = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return inputs, truth(inputs) + torch.randn(n, 1, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("k", [1, 2])
def test_cross_validation_is_population_risk_of_a_smaller_learner(k):
    r"""Theorem cv_family, :math:`E L_k(S_n) = E L_D(w_T(S_{n-k}))`, for leave-one-out and for 4-fold with n = 8.

    Left: data sets of n points with k of them at weight 0, scored on those. Right: other data sets of n - k points,
    trained as such, scored on fresh points.
    """
    n, sets, fresh = 8, 1500, 20
    generator = torch.Generator().manual_seed(0)
    pool = draw(n * sets, generator)
    options = {"steps": 25, "dtype": torch.float64, "progress": False}

    def stacked(points, offset, weights):
        problem = Problem(make_mlp, "squared", *draw(points, generator), arguments={"width": 3, "outputs": 1})
        run = train(problem, MOMENTUM, **options)
        index = points + offset + points * torch.arange(sets).unsqueeze(1) + torch.arange(points)
        return run, retrain(run, Members(weights, index_map=index, pool=pool)).weights

    held = torch.arange(k)  # by exchangeability any k places will do
    run, left = stacked(n, 0, holdout_weights(n, held).repeat(sets, 1))
    model = run.problem.model(torch.float64)
    rows = n * torch.arange(sets).unsqueeze(1) + torch.arange(n)

    def losses(weights, inputs, targets):
        repeated = weights.repeat_interleave(inputs.shape[1], 0)
        return model.per_example_losses(repeated, inputs.flatten(0, 1), targets.flatten(0, 1)).view(sets, -1)

    held_out = losses(left, pool[0][rows[:, held]], pool[1][rows[:, held]]).mean(1)
    trained = losses(left, pool[0][rows[:, k:]], pool[1][rows[:, k:]]).mean(1)
    pool = draw(n * sets, generator)
    _, right = stacked(n - k, 0, torch.ones(sets, n - k))
    inputs, targets = draw(sets * fresh, generator)
    population = losses(right, inputs.view(sets, fresh, 4), targets.view(sets, fresh, 1)).mean(1)
    error = ((held_out.var() + population.var()) / sets).sqrt()
    assert (held_out.mean() - population.mean()).abs() <= 3 * error
    assert population.mean() - trained.mean() > 10 * error  # so that training losses would not pass for held-out ones


def ridge_losses(n, p, penalty, sets, K, seed=0):
    """Held-out and training losses of K-fold ridge regression on many data sets, and the risk of each whole model."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(sets, n, p, generator=generator, dtype=torch.float64)
    b = torch.full((p, 1), p**-0.5, dtype=torch.float64)
    Y = X @ b + torch.randn(sets, n, 1, generator=generator, dtype=torch.float64)

    def fit(X, Y):
        return torch.linalg.solve(X.mT @ X + penalty * X.shape[1] * torch.eye(p, dtype=X.dtype), X.mT @ Y)

    fold, held_out = torch.arange(n) % K, torch.empty(sets, n, dtype=torch.float64)
    for f in range(K):
        kept = fold != f
        w = fit(X[:, kept], Y[:, kept])
        held_out[:, ~kept] = 0.5 * (X[:, ~kept] @ w - Y[:, ~kept]).square().squeeze(2)
    w = fit(X, Y)
    return held_out, 0.5 * (X @ w - Y).square().squeeze(2), 0.5 * ((w - b).square().sum((1, 2)) + 1), fold


@pytest.mark.parametrize(("n", "p", "penalty"), [(100, 20, 0.0), (100, 50, 0.0), (100, 100, 0.1)])
def test_the_standard_error_does_not_undercover(n, p, penalty):
    """The risk of the trained model lies within two errors nearly always, where two naive errors miss it often."""
    held_out, own, risk, fold = ridge_losses(n, p, penalty, sets=300, K=10)
    off = (held_out.mean(1) - risk).abs()
    naive = held_out.std(1) / math.sqrt(n)
    ours = torch.tensor([inflated_error(a, torch.arange(n), b, fold) for a, b in zip(held_out, own, strict=True)])
    assert (off <= 2 * naive).double().mean() < 0.9
    assert (off <= 2 * ours).double().mean() >= 0.92
    assert (ours / naive).max() < 4  # and not by being useless


def test_repeated_examples_count_once():
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    once = inflated_error(losses, torch.arange(4), torch.ones(4))
    thrice = inflated_error(losses.repeat(3), torch.arange(4).repeat(3), torch.ones(12))
    assert once == pytest.approx(thrice)
    naive = losses.std().item() / 2 * small_sample(4)
    assert once == pytest.approx(naive * (1 + 1.5 / 2.5))
    assert inflated_error(losses, torch.arange(4), 2 * losses) == pytest.approx(naive)


def test_a_training_that_diverges_is_no_valid_estimate():
    inputs, labels = data()
    inputs[3] *= 1e3
    targets = labels.double().unsqueeze(1)
    problem = Problem(nn.Linear, "squared", inputs, targets, arguments={"in_features": 4, "out_features": 1})
    run = train(problem, partial(SGD, lr=1.0), 70, dtype=torch.float64, progress=False)
    found = k_fold(run, folds=4)
    assert not found.risk.valid
    assert "diverged" in found.risk.reason
    assert not found.bias_corrected.valid


def test_bad_input(run):
    small = train(Problem(make_mlp, "cross_entropy", *data(2)), MOMENTUM, 1, progress=False)
    with pytest.raises(DataError, match="at least 3 examples, got 2"):
        leave_one_out(small)
    for indices in ([], [N], [-1], [1, 1]):
        with pytest.raises(DataError, match="different examples of 0 … 11"):
            leave_one_out(run, indices)
    for folds in (1, N + 1):
        with pytest.raises(DataError, match=f"folds must lie between 2 and the 12 examples, got {folds}"):
            k_fold(run, folds)
    with pytest.raises(DataError, match="only K-fold can be corrected"):
        leave_one_out(run, [0]).bias_corrected
    with pytest.raises(DataError, match="between 3 and"):
        k_fold(run, 2, nested=1)
    with pytest.raises(DataError, match="nested must be 0"):
        k_fold(run, 3, nested=-1)
    for k, count in ((0, 1), (N - 1, 1), (1, 0)):
        with pytest.raises(DataError, match="holdouts need 1 … 10"):
            holdouts(run, k, count)
    for masks in (torch.ones(1, N), torch.ones(N, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool)):
        with pytest.raises(DataError, match="rows of 12 booleans"):
            subsets(run, masks)
    with pytest.raises(DataError, match="at most 11 different examples"):
        subsets(run, torch.zeros(1, N, dtype=torch.bool))
    for n, held in ((3, [3]), (3, [-1])):
        with pytest.raises(DataError, match="the examples 0 … 2"):
            holdout_weights(n, held)
    for held in ([0, 0], [0, 1, 2]):
        with pytest.raises(DataError, match="at most 2 different"):
            holdout_weights(3, held)


def test_ten_folds_cost_ten_trainings():
    """All told, with the look at what was held out and the comparison of models: 1.1 times ten runs' arithmetic."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 32, generator=generator)
    labels = torch.randint(3, (40,), generator=generator)
    problem = Problem(make_mlp, "cross_entropy", inputs, labels, arguments={"inputs": 32, "width": 24})
    one_run = train(problem, MOMENTUM, 60, batch_size=20, every=60, progress=False)
    with FlopCounterMode(display=False) as one:
        replay(one_run)
    with FlopCounterMode(display=False) as ten:
        k_fold(one_run, folds=10)
    assert 9 <= ten.get_total_flops() / one.get_total_flops() <= 11


@pytest.mark.gpu
def test_on_a_device(run):
    """The same numbers on a GPU, whatever is left out."""
    there = record("cuda")
    few = torch.rand(8, N, generator=torch.Generator().manual_seed(0)) < 0.4
    for way in (
        leave_one_out,
        partial(k_fold, folds=4),
        partial(k_fold, folds=4, nested=1),
        partial(holdouts, k=3, count=4),
        partial(subsets, masks=few),
    ):
        found, here = way(there), way(run)
        assert found.outputs.is_cuda
        torch.testing.assert_close(found.losses.cpu(), here.losses, rtol=1e-7, atol=1e-9)
        assert found.risk.standard_error == pytest.approx(here.risk.standard_error, rel=1e-6)


def test_the_papers_risk_by_its_name(run):
    assert cross_validation_risk(run, 1).value == leave_one_out(run).risk.value
    assert cross_validation_risk(run, 3, seed=4).value == k_fold(run, 4, 4).risk.value
    with pytest.raises(DataError, match="must divide the 12"):
        cross_validation_risk(run, 5)
