"""Runs whose linearized predictions look right and are wrong: the verdict of exclusion rests on real deletions."""

import math
from functools import cache, partial

import pytest
import torch
from torch import nn

from poprisk import PopRiskAdamW, Problem, RiskMeter, out_of_sample_probabilities, population_risk, train
from poprisk._core.seeds import shuffled
from poprisk.optim import Gate
from poprisk.risk import exclusion, exclusion_risk, leave_one_out
from poprisk.risk._controls import corrected_gap
from poprisk.risk._influence.exclusion_sweep import ExclusionSweep
from poprisk.risk._influence.sensitivity import Unrolled


def absolute(outputs, target):
    return (outputs - target).abs().sum()


def pinball(outputs, target):
    return torch.maximum(0.8 * (target - outputs), 0.2 * (outputs - target)).sum()


def hinge(outputs, target):
    return (1 - outputs * target).clamp(min=0).sum()


def tanh(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def relu(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, outputs))


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs)


def regression(count, d, seed, noise=0.5):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, d, generator=generator)
    teacher = torch.randn(d, 1, generator=torch.Generator().manual_seed(1)) / math.sqrt(d)
    return x, x @ teacher + noise * torch.randn(count, 1, generator=generator)


def signs(count, d, seed):
    x, y = regression(count, d, seed)
    return x, y.sign()


def classes(count, d, seed, noise=0.3):
    generator = torch.Generator().manual_seed(seed)
    centres = 2.4 * torch.randn(4, d, generator=torch.Generator().manual_seed(1)) / math.sqrt(d)
    y = torch.randint(4, (count,), generator=generator)
    x = centres[y] + torch.randn(count, d, generator=generator)
    flipped = torch.rand(count, generator=generator) < noise
    return x, torch.where(flipped, torch.randint(4, (count,), generator=generator), y)


SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
SETTINGS = {  # data, number of examples, features, network, outputs, loss, optimizer, steps, batch size
    "linear regression, float32, AdamW": (
        *(regression, 40, 5, linear, 1, "squared", partial(ADAMW, lr=0.05, betas=(0.9, 0.95)), 300, None),
    ),
    "softmax regression, SGD": (classes, 40, 8, linear, 4, "cross_entropy", partial(SGD, lr=3.0), 100, 20),
    "softmax regression, AdamW": (classes, 40, 8, linear, 4, "cross_entropy", partial(ADAMW, lr=0.3), 100, 20),
    "absolute error, linear": (regression, 40, 5, linear, 1, absolute, partial(ADAMW, lr=0.1), 150, 20),
    "absolute error, tanh": (regression, 40, 5, tanh, 1, absolute, partial(ADAMW, lr=0.03), 100, 20),
    "pinball": (regression, 40, 5, linear, 1, pinball, partial(SGD, lr=0.3), 100, 20),
    "hinge": (signs, 40, 5, linear, 1, hinge, partial(ADAMW, lr=0.1), 100, 20),
    "hard gate": (
        *(classes, 50, 8, linear, 4, "cross_entropy"),
        *(partial(PopRiskAdamW, lr=0.3, gate=Gate("hard", normalize=False)), 100, 25),
    ),
    "ReLU network": (classes, 50, 8, relu, 4, "cross_entropy", partial(ADAMW, lr=0.02), 80, 25),
}


@cache
def setting(name):
    """A run, its risk by a large test set, and the risk by exclusion."""
    data, n, d, make, outputs, loss, optimizer, steps, batch = SETTINGS[name]
    arguments = {"inputs": d, "outputs": outputs}
    problem = Problem(make, loss, *data(n, d, 0), arguments=arguments)
    run = train(problem, optimizer, steps, batch_size=batch, progress=False)
    x, y = data(20_000, d, 10**6)
    truth = run.model().batch_outputs(run.weights(steps), x)
    return run, torch.func.vmap(run.model().loss)(truth, y).mean().item(), population_risk(run, "exclusion")


@pytest.mark.parametrize("name", SETTINGS)
def test_valid_means_right(name):
    _, truth, risk = setting(name)
    off = abs(risk.value - truth)
    assert not risk.valid or off <= 0.2 * truth or off <= 2.5 * risk.standard_error
    assert risk.value < 10 * truth  # a number far from any loss of the model is never returned


def test_most_of_them_are_valid():
    assert sum(setting(name)[2].valid for name in SETTINGS) >= 8


@pytest.mark.parametrize("name", ["linear regression, float32, AdamW", "absolute error, linear"])
def test_predictions_beyond_what_the_model_learned_are_shortened(name):
    run, _, _ = setting(name)
    raw = ExclusionSweep(Unrolled(run), torch.arange(40)).outputs_at(run.num_steps).tangent
    found = exclusion(run, controls=0)
    assert float(raw.abs().max()) > 20  # what the linearized run says
    assert float(found.displacement.abs().max()) < 20
    assert bool(found.doubtful[(raw - found.displacement).abs().squeeze(1) > 1e-3].all())
    assert found.losses.isfinite().all()
    assert not found.risk.valid
    assert "controls=0" in found.risk.reason


def test_real_deletions_remove_the_bias_of_softmax_regression():
    run, _, risk = setting("softmax regression, SGD")
    exact = leave_one_out(run).risk.value
    predicted = exclusion_risk(run, controls=0).value
    assert predicted < 0.85 * exact
    assert abs(risk.value - exact) < 0.07 * exact


def test_a_corrected_mean_does_not_make_single_predictions_valid():
    """Of so few examples, which ones are really deleted decides where a network is near the limit."""
    for name, seed, good in (("hard gate", 0, False), ("softmax regression, SGD", 0, False), ("ReLU network", 3, True)):
        found = exclusion(setting(name)[0], seed=seed)
        assert found.risk.valid
        assert found.predictions.valid == good
    run, _, _ = setting("hard gate")
    assert not out_of_sample_probabilities(run).valid
    assert out_of_sample_probabilities(run, retrain_budget=5).method == "k_fold"


def test_all_controls_are_leave_one_out():
    run, _, _ = setting("hard gate")
    risk = exclusion_risk(run, 30, controls=30, seed=1)
    chosen = shuffled(50, 1, "examples")[:30]
    exact = leave_one_out(run, chosen)
    assert risk.gap == pytest.approx(exact.gap, rel=1e-4)
    assert risk.cost == 60


def test_a_bad_prediction_is_given_no_weight_and_a_good_one_counts():
    generator = torch.Generator().manual_seed(0)
    real = torch.rand(200, generator=generator, dtype=torch.float64)
    rows = torch.randperm(200, generator=generator)[:20]
    noise = 1e20 * torch.randn(200, generator=generator, dtype=torch.float64)
    found = {"noise": corrected_gap(noise, real[rows], rows), "shifted": corrected_gap(real + 3, real[rows], rows)}
    value, error, share = found["noise"]
    assert abs(value - real.mean()) <= 3 * error < 0.5
    assert share * 1e20 < 10
    value, error, share = found["shifted"]
    assert (value, error, share) == pytest.approx((real.mean().item(), 0, 1), abs=1e-9)


def test_repeated_rows_are_left_out_together():
    x, y = regression(30, 20, 0)
    problem = Problem(linear, "squared", x.repeat(2, 1), y.repeat(2, 1), arguments={"inputs": 20, "outputs": 1})
    run = train(problem, partial(torch.optim.SGD, lr=0.1), 400, progress=False)
    once = train(Problem(linear, "squared", x, y, arguments={"inputs": 20, "outputs": 1}),
                 partial(torch.optim.SGD, lr=0.1), 400, progress=False)  # fmt: skip
    assert torch.allclose(run.weights(400), once.weights(400), atol=1e-5)
    twice, single = exclusion(run, controls=0), exclusion(once, controls=0)
    assert torch.allclose(twice.losses[:30], single.losses, rtol=1e-3)
    assert torch.allclose(twice.losses[30:], single.losses, rtol=1e-3)
    x, y = regression(20_000, 20, 10**6)
    truth = 0.5 * (run.model().batch_outputs(run.weights(400), x) - y).square().mean().item()
    risk = population_risk(run)
    assert not risk.valid or abs(risk.value - truth) <= 2.5 * risk.standard_error
    assert risk.value > 0.5 * truth


def test_inputs_of_a_few_kinds_have_no_valid_risk():
    x, _ = regression(5, 3, 0)
    y = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    problem = Problem(linear, "squared", x.repeat(10, 1), y, arguments={"inputs": 3, "outputs": 1})
    risk = population_risk(train(problem, partial(torch.optim.SGD, lr=0.1), 20, progress=False))
    assert not risk.valid
    assert "5 examples are too few" in risk.reason or "5 of the 50 inputs are different" in risk.reason


@pytest.mark.parametrize(("n", "d", "steps"), [(40, 39, 400), (30, 28, 400)])
def test_at_the_interpolation_peak_it_is_not_valid(n, d, steps):
    problem = Problem(linear, "squared", *regression(n, d, 0), arguments={"inputs": d, "outputs": 1})
    risk = population_risk(train(problem, partial(torch.optim.SGD, lr=0.3), steps, progress=False))
    assert not risk.valid
    assert "jackknife variance" in risk.reason
    fewer = Problem(linear, "squared", *regression(n, n // 5, 0), arguments={"inputs": n // 5, "outputs": 1})
    assert population_risk(train(fewer, partial(torch.optim.SGD, lr=0.3), 100, progress=False)).valid


def test_the_meter_takes_its_controls_along_and_comes_back_from_folds():
    run, _, risk = setting("ReLU network")
    data, n, d, make, outputs, loss, optimizer, _, batch = SETTINGS["ReLU network"]
    problem = Problem(make, loss, *data(n, d, 0), arguments={"inputs": d, "outputs": outputs})
    shorter = train(problem, optimizer, 50, batch_size=batch, progress=False)
    for budget in (0, 10):
        meter = RiskMeter(retrain_budget=budget).read(shorter, [20, 50]).read(run, [65, 80])
        assert [reading.step for reading in meter.readings] == [20, 50, 65, 80]
        assert meter.readings[-1].risk.to_dict() == risk.to_dict()
        assert population_risk(run, retrain_budget=budget).to_dict() == risk.to_dict()
