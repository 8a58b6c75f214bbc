"""Population risk from one run: which estimator answers, whose risk it is, and when it says that it does not know."""

from functools import partial

import pytest
import torch
from torch import nn

from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.risk import _k_fold as k_fold_module
from poprisk.risk._exclusion import exclusion_risk
from poprisk.risk._first_order import generalization_gap
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._meter import RiskMeter
from poprisk.risk._resampling import leave_one_out
from poprisk.risk._risk import population_risk
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def noisy(n, *, width, classes=0, seed=0, noise=0.5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    signal = torch.sin(2 * x[:, :1]) + x[:, 1:2]
    if classes:
        flipped = torch.rand(n, generator=generator) < noise
        clean = (signal[:, 0] > 0).long()
        y = torch.where(flipped, torch.randint(classes, (n,), generator=generator), clean)
    else:
        y = signal + noise * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    arguments = {"width": width, "outputs": classes or 1}
    loss = "cross_entropy" if classes else "squared"
    return Problem(network, loss, x, y, arguments=arguments, seed=seed)


def network(width, outputs):
    if not width:
        return nn.Linear(3, outputs)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, outputs))


def run_of(problem, steps, rule: partial = SGD, batch=None):
    return train(problem, rule, steps, batch_size=batch, dtype=torch.float64, progress=False)


@pytest.fixture(scope="module")
def interpolated():
    """Memorized: the training loss is a hundredth of the risk."""
    return run_of(noisy(24, width=30, noise=1.0), 90, partial(torch.optim.Adam, lr=0.08))


def test_exclusion_is_leave_one_out_for_linear_models():
    """Also stopped early, with minibatches and momentum: the linearization leaves nothing out."""
    run = run_of(noisy(40, width=0), 17, batch=5)
    risk = population_risk(run, "exclusion")
    exact = leave_one_out(run).losses.mean().item()
    assert risk.value == pytest.approx(exact, rel=1e-10)
    assert risk.valid
    assert risk.target == "a model trained on 39 of the 40 examples"


def test_early_all_agree():
    run = run_of(noisy(60, width=8), 40, batch=20)
    exclusion, folds = population_risk(run), population_risk(run, "k_fold", 10)
    exact = leave_one_out(run, range(0, 60, 4))
    assert exclusion.method == "exclusion"
    assert exclusion.valid
    assert folds.cost == 10
    assert abs(exclusion.value - folds.value) < 2 * folds.standard_error
    sampled = population_risk(run, "exclusion", examples=torch.arange(0, 60, 4))
    gap = exact.losses.mean() - exact.own_losses.mean()
    assert sampled.gap == pytest.approx(gap.item(), rel=0.1)
    all_of_them = population_risk(run, "exclusion", examples=60, controls=0)
    few = [population_risk(run, "exclusion", examples=15, controls=0, seed=seed) for seed in range(8)]
    assert sum(each.standard_error for each in few) / len(few) > all_of_them.standard_error


def test_at_interpolation_it_says_that_it_does_not_know(interpolated, monkeypatch):
    def never(*_, **__):
        raise AssertionError("no fold may be trained without a budget")

    with monkeypatch.context() as patched:
        patched.setattr(k_fold_module, "retrain", never)
        risk = population_risk(interpolated, "exclusion")
        checked = population_risk(interpolated)
        first = population_risk(interpolated, "first_order")
    assert not risk.valid
    assert "retrain_budget=10" in risk.reason
    assert risk.cost == 24 + 16  # directions and controls
    assert not first.valid
    assert first.value < 0.1  # the risk is about 1.5
    assert checked.method == "leverage"  # corrected by real deletions
    assert abs(checked.value - 1.5) < 2 * checked.standard_error


def test_first_order_does_not_vouch_for_itself_at_interpolation(interpolated):
    first = population_risk(interpolated, "first_order")
    assert not first.valid
    assert first.training_loss < first.value < 0.1  # the risk is about 1.5


def test_with_a_budget_it_knows(interpolated):
    risk = population_risk(interpolated, retrain_budget=10)
    assert risk.valid
    assert risk.method == "k_fold"
    assert risk.value > 5 * risk.training_loss
    assert risk.target == "a model trained on 21 to 22 of the 24 examples"
    few = population_risk(interpolated, retrain_budget=4)
    assert few.cost == 4


def test_first_order_is_believed_only_where_it_may_be():
    run = run_of(noisy(400, width=4, noise=0.3), 30, batch=100)
    risk = population_risk(run, "first_order", examples=100)
    assert risk.target == "this model"
    assert risk.valid == (risk.standard_error <= 0.07 * risk.value)
    few = run_of(noisy(20, width=4), 30)
    small = population_risk(few, "first_order")
    assert not small.valid
    model, data = few.problem.model(torch.float64), (few.problem.inputs, few.problem.targets)
    training = model.per_example_losses(few.weights(30), *data).mean().item()
    assert small.value == pytest.approx(training + generalization_gap(few).value, rel=1e-9)
    assert small.training_loss == pytest.approx(training, rel=1e-12)
    assert any(word in small.reason for word in ("standard error", "by exclusion", "which checks the first order"))


def test_one_unseen_mistake_is_part_of_the_error():
    """All held-out examples right and sure of it: the spread of their losses is nothing, the error is not."""
    x = torch.cat([torch.linspace(-3.1, -2.9, 20), torch.linspace(2.9, 3.1, 20)]).double().unsqueeze(1)
    problem = Problem(nn.Linear, "cross_entropy", x, torch.arange(2).repeat_interleave(20),
                      arguments={"in_features": 1, "out_features": 2})  # fmt: skip
    risk = population_risk(run_of(problem, 60))
    assert risk.value < 1e-3
    assert 0.01 < risk.standard_error < 1


def test_the_meter_goes_on_where_it_stopped():
    run = run_of(noisy(30, width=6), 60, batch=10)
    at_once = RiskMeter().read(run, [10, 25, 60])
    first = run_of(noisy(30, width=6), 25, batch=10)
    in_turns = RiskMeter().read(first, [10, 25]).read(run, [60])
    assert at_once.curve()["risk"] == pytest.approx(in_turns.curve()["risk"], rel=1e-12)
    assert at_once.readings[-1].risk.value == pytest.approx(population_risk(run).value, rel=1e-12)
    assert at_once.best_step in (10, 25, 60)


def test_the_meter_turns_to_folds_and_finds_where_to_stop(interpolated):
    meter = RiskMeter(retrain_budget=10, seed=3).read(interpolated, [5, 10, 20, 90])
    methods = meter.curve()["method"]
    assert methods[-1] == "k_fold"
    assert all(reading.risk.valid for reading in meter.readings)
    assert meter.best_step < 90
    assert meter.readings[-1].risk.value > 1.5 * min(meter.curve()["risk"])


def test_the_meter_reads_while_training():
    from poprisk.runs._recorder import Recorder

    problem = noisy(20, width=4)
    model = problem.module(torch.float64)
    optimizer = SGD(model.parameters())
    meter = RiskMeter(examples=8)
    with Recorder(None, model, optimizer, problem=problem) as recorder:
        for k in range(30):
            with recorder.step(torch.arange(20)):
                optimizer.zero_grad()
                problem.batch_loss(model(problem.inputs), problem.targets).backward()
                optimizer.step()
            if k % 10 == 9:
                meter.read(recorder.flush(), 1)
    assert [reading.step for reading in meter.readings] == [10, 20, 30]


def test_bad_requests():
    run = run_of(noisy(12, width=0), 5)
    with pytest.raises(HyperparameterError, match=r'method must be "auto", .* or "k_fold", got'):
        population_risk(run, "loo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(HyperparameterError, match="retrain_budget=0: allow 10"):
        population_risk(run, "k_fold")
    with pytest.raises(HyperparameterError, match="0 or more, got -1"):
        population_risk(run, retrain_budget=-1)
    with pytest.raises(DataError, match="between 1 and the 12"):
        population_risk(run, examples=13)
    with pytest.raises(DataError, match="at least 3"):
        population_risk(run_of(noisy(2, width=0), 5))
    with pytest.raises(DataError, match="no valid reading"):
        _ = RiskMeter().best_step
    with pytest.raises(DataError, match=r"lie in 1 … 5, got \[9\]"):
        RiskMeter().read(run, [9])
    with pytest.raises(RunError, match="another run"):
        RiskMeter().read(run, [2]).read(run_of(noisy(12, width=0, seed=1), 5), [4])


def test_too_few_examples_are_never_believed():
    run = run_of(noisy(40, width=0), 20)
    assert not population_risk(run, "exclusion", examples=9).valid
    assert population_risk(run, "exclusion", examples=10).valid
    assert not population_risk(run_of(noisy(5, width=0), 10), retrain_budget=10).valid
    assert not exclusion_risk(run, 4).valid
    with pytest.raises(DataError, match="different indices"):
        population_risk(run, examples=torch.tensor([0] * 20))


def test_a_part_of_a_run_has_no_risk():
    run = run_of(noisy(20, width=0), 20)
    with pytest.raises(RunError, match="start=5"):
        population_risk(Unrolled(run, start=5))
    earlier = population_risk(Unrolled(run, stop=10))
    assert earlier.value == pytest.approx(population_risk(run_of(noisy(20, width=0), 10)).value)


def squeezed():
    return nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))


def test_one_output_without_an_axis_and_the_logistic_loss():
    """An unseen mistake counts for every loss of classes: here nobody is wrong, and the error is not small."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    run = run_of(Problem(squeezed, "logistic", x, (x[:, 0] > 0).double()), 60)
    for risk in (population_risk(run), population_risk(run, "k_fold", 5)):
        assert risk.valid
        assert risk.standard_error > 0.05


def shift(inputs, generator):
    return inputs + 0.1 * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)


def test_an_augmented_run_is_trained_again():
    clean, arguments = noisy(20, width=0), {"width": 0, "outputs": 1}
    problem = Problem(network, "squared", clean.inputs, clean.targets, arguments=arguments, augment=shift)
    run = run_of(problem, 10)
    alone = population_risk(run, controls=0)
    assert not alone.valid
    assert "augmented" in alone.reason
    risk = population_risk(run, retrain_budget=10)
    assert risk.method == "k_fold"
    assert "augmented" in risk.reason


def test_clipping_in_a_loop_of_ones_own_is_said():
    from poprisk.runs._recorder import Recorder

    problem = noisy(20, width=0)
    model = problem.module(torch.float64)
    optimizer = SGD(model.parameters())
    with Recorder(None, model, optimizer, problem=problem) as recorder:
        for _ in range(5):
            with recorder.step(torch.arange(20)):
                optimizer.zero_grad()
                problem.batch_loss(model(problem.inputs), problem.targets).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
    assert "held" in population_risk(recorder.run).reason
    assert "recorded factors" in population_risk(recorder.run, "k_fold", 5).reason
