"""Verdicts of folds that can fail: duplicates, the interpolation peak, folds that are behind, examples held back."""

import math
from functools import cache, partial

import pytest
import torch
from torch import nn

from poprisk import Problem, population_risk, train
from poprisk._core.seeds import shuffled
from poprisk.errors import DataError
from poprisk.report import analyze
from poprisk.risk import k_fold, leave_one_out
from poprisk.risk._fold_checks import FoldChecks, compared, probe_inputs, twin_share
from poprisk.risk._verdict import Found, judge_retraining


@cache
def regression(n, d, seed=0, repeats=1, noise=0.5, steps=1000, lr=0.2):
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    teacher, x = draw(d, 1) / math.sqrt(d), draw(n + 2000, d)
    y = x @ teacher + noise * draw(n + 2000, 1)
    sizes = {"in_features": d, "out_features": 1}
    kept = (x[:n].repeat(repeats, 1), y[:n].repeat(repeats, 1))
    problem = Problem(nn.Linear, "squared", *kept, arguments=sizes, test=(x[n:], y[n:]))
    optimizer = partial(torch.optim.SGD, lr=lr, momentum=0.9)
    return train(problem, optimizer, steps, dtype=torch.float64, progress=False, every=steps)


def true_risk(run):
    inputs, targets = run.problem.test
    model = run.module()
    nn.utils.vector_to_parameters(run.weights(run.num_steps), model.parameters())
    with torch.no_grad():
        return float(0.5 * (model(inputs) - targets).square().sum(1).mean())


def wrong(risk, truth):
    off = abs(float(risk.value) - truth)
    return off > 0.2 * truth and off > 2.5 * float(risk.standard_error)


@pytest.mark.parametrize(("folds", "seed"), [(10, 1), (3, 1)])
def test_the_interpolation_peak_is_seen(folds, seed):
    """With 40 examples and 39 features the model is far larger than those trained on 36 or 27 of them."""
    run = regression(40, 39, seed)
    risk = k_fold(run, folds, progress=False).risk
    assert float(risk.value) < 0.5 * true_risk(run)  # the fold models themselves are fine
    assert not risk.valid
    assert "do not stand for the run's model" in risk.reason
    assert "hold_back" in risk.reason


@pytest.mark.parametrize(("n", "d"), [(80, 39), (60, 10)])
def test_folds_off_the_peak_are_valid(n, d):
    run = regression(n, d, seed=1, steps=300)
    risk = k_fold(run, 10, progress=False).risk
    assert risk.valid
    assert not wrong(risk, true_risk(run))


def classifier(batch_norm):
    norm = [nn.BatchNorm1d(24)] if batch_norm else []
    return nn.Sequential(nn.Linear(8, 24), *norm, nn.ReLU(), nn.Linear(24, 3))


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("passes", [2, 25])
def test_networks_are_not_taken_for_peaks(batch_norm, passes):
    """Hardly trained and interpolating alike."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 8, generator=generator)
    y = (x[:, :3] + 0.5 * torch.randn(96, 3, generator=generator)).argmax(1)
    problem = Problem(partial(classifier, batch_norm), "cross_entropy", x, y)
    run = train(
        problem, partial(torch.optim.AdamW, lr=0.01), 3 * passes, batch_size=32, progress=False, every=3 * passes
    )
    assert k_fold(run, 5, progress=False).risk.valid


def test_repeated_rows_stay_in_one_fold():
    """Each of 15 rows four times, and 12 features: without grouping, the twins give every answer away."""
    run = regression(15, 12, repeats=4, steps=400)
    found, truth = k_fold(run, 5, progress=False), true_risk(run)
    inputs = run.problem.inputs
    for i in range(60):
        equal = (inputs == inputs[i]).all(1)
        assert len(found.member[equal].unique()) == 1
    assert not (found.risk.valid and wrong(found.risk, truth))
    assert float(found.risk.value) > 0.3 * truth
    risk = leave_one_out(run, range(12), progress=False).risk
    assert float(risk.value) < 0.3 * truth  # a twin of each was trained on
    assert not risk.valid
    assert "100% of the held-out inputs were also trained on" in risk.reason


def test_the_error_counts_equal_inputs_once():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, generator=generator).repeat(10, 1)
    problem = Problem(nn.Linear, "squared", x, x[:, :1], arguments={"in_features": 2, "out_features": 1})
    run = train(problem, partial(torch.optim.SGD, lr=0.1), 20, progress=False)
    assert not population_risk(run, "k_fold", 10).valid  # six different inputs are too few
    with pytest.raises(DataError, match="between 2 and the 6 different inputs, got 7"):
        k_fold(run, 7)


def test_without_duplicates_the_partition_is_of_single_examples():
    run = regression(20, 3, steps=5)
    fold = torch.empty(20, dtype=torch.long)
    fold[shuffled(20, 3, "folds")] = torch.arange(20) % 4
    assert torch.equal(k_fold(run, 4, seed=3).member, fold)


def shifted(x, generator):
    moves = torch.randint(-1, 2, (len(x), 2), generator=generator).tolist()
    return torch.stack([torch.roll(image, move, (1, 2)) for image, move in zip(x, moves, strict=True)])


def convolutions():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4)
    )


@pytest.mark.parametrize("passes", [3, 6])
def test_folds_that_are_behind_do_not_show_memorization(passes):
    """A network that has just begun to learn, three folds of it, and next to nothing memorized."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(1200) % 4
    x = torch.randn(4, 1, 6, 6, generator=generator)[y] + 0.7 * torch.randn(1200, 1, 6, 6, generator=generator)
    problem = Problem(convolutions, "cross_entropy", x[:240], y[:240], test=(x[240:], y[240:]), augment=shifted)
    run = train(problem, partial(torch.optim.AdamW, lr=3e-3), 7 * passes, batch_size=32, progress=False)
    found = analyze(run, retrain=3, progress=False)
    curves, risk = found.curves, found.last_risk
    drop = curves.train[0] - curves.train[-1]
    truth = (curves.test[-1] - curves.train[-1]) / drop
    share, error = (float(risk.value) - curves.train[-1]) / drop, float(risk.standard_error) / drop
    assert truth < 0.2
    assert not risk.valid or abs(share - truth) < 2.5 * error


def test_a_bias_of_the_folds_is_in_their_error():
    """Folds that fit their own examples worse by 0.05 than the run does."""
    found = Found(1.0, 0.02, "k_fold", "a model", 0.5, 3, 60, 60)
    assert judge_retraining(found, FoldChecks(0.7, 1.0, 0.55, 0.5)).valid
    behind = judge_retraining(found, FoldChecks(0.7, 1.0, 0.8, 0.5))
    assert not behind.valid
    assert "0.8, that of the run on the same 0.5" in behind.reason
    assert FoldChecks(kept_loss=0.65, own_loss=0.5).lag == pytest.approx(0.15)
    assert FoldChecks(kept_loss=0.3, own_loss=0.5).lag == FoldChecks().lag == 0


@pytest.mark.parametrize(
    ("checks", "doubt", "said"),
    [
        (FoldChecks(1.3, 1.0), 1.0, "it is 1.3 times as far from them as they are from each other (limit 1), as"),
        (FoldChecks(1.3, 1.4), 1.0, "its outputs are 1.4 times as large as theirs (limit 1.2), as"),
        (FoldChecks(0.8, 0.7), 0.5, ""),
        (FoldChecks(0.8, 1.1), 0.0, ""),
    ],
)
def test_models_unlike_the_folds_make_the_error_larger_or_the_risk_not_valid(checks, doubt, said):
    """A run that fits little can be no further off than its gap; one that fits its examples can be anywhere."""
    fits_little, fits_all = (Found(1.0, 0.1, "k_fold", "a model", loss, 10, 60, 60) for loss in (0.7, 0.1))
    risk = judge_retraining(fits_little, checks)
    assert risk.valid
    assert risk.standard_error == pytest.approx(math.hypot(0.1, doubt * 0.3))
    risk = judge_retraining(fits_all, checks)
    assert risk.valid == (not said)
    assert risk.standard_error == pytest.approx(math.hypot(0.1, doubt * 0.9))
    assert said in risk.reason
    assert risk.reason.count("(limit") == bool(said)
    assert ("Hold examples back" in risk.reason) == bool(said)


def test_held_back_examples_are_not_counted_as_trained_on():
    run = regression(60, 3, steps=20)
    held = train(run.problem, partial(torch.optim.SGD, lr=0.1), 20, hold_back=0.1, progress=False)
    assert k_fold(held, 9, progress=False).target == "a model trained on 47 to 49 of the 60 examples"
    assert k_fold(run, 10, progress=False).target == "a model trained on 54 of the 60 examples"
    assert population_risk(held, "exclusion").target == "a model trained on 53 of the 60 examples"


def test_distances_of_models():
    """A model in the middle of others is nearer than they are to each other, by the square root of one half."""
    others = torch.randn(10, 500, 1, generator=torch.Generator().manual_seed(0))
    distance, size = compared(others.mean(0) * 0, others)
    assert distance == pytest.approx(math.sqrt(0.5), abs=0.02)
    assert size == 0
    assert compared(4 * others[0], others[1:])[1] == pytest.approx(4, rel=0.1)
    assert all(math.isnan(v) for v in compared(others[0], others * math.inf))
    same = torch.randn(1, 500, 1, generator=torch.Generator().manual_seed(1)).expand(5, -1, -1)
    assert math.isnan(compared(same[0] * (1 + 1e-5), same)[0])  # one model: nothing to compare


def test_probes_have_the_features_of_the_examples():
    words, numbers = torch.arange(12).reshape(4, 3), torch.rand(4, 2)
    mixed = probe_inputs((words, numbers))
    assert isinstance(mixed, tuple)
    for column in range(3):
        assert set(mixed[0][:, column].tolist()) <= set(words[:, column].tolist())
    assert len(mixed[0]) == len(mixed[1])


def test_twins_are_counted_by_training():
    inputs = torch.tensor([[1.0], [1.0], [2.0]])
    out = torch.tensor([[True, False, False], [True, True, False]])
    member, example = torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1])
    assert twin_share(inputs, example, out, member) == pytest.approx(1 / 3)
