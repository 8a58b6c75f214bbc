"""Over all orders of batches the martingale is exact, no sampling needed; over replicate seeds the rates are as stated.

On tiny problems every sequence of batches can be run, so that expectations are finite sums.
"""

from itertools import combinations, permutations, product

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.estimate import Estimate
from poprisk.errors import DataError
from poprisk.operators._drift_diffusion import DriftDiffusion, drift_diffusion
from poprisk.operators._gradient_descent import RecordedSteps
from poprisk.runs._step import AffineStep
from poprisk_lab.theory.diffusion_rates import (
    FluctuationVariance,
    diffusion_rate,
    fluctuation_variance,
    growth_exponents,
    replicate_rates,
)
from poprisk_lab.theory.power_law import power_law_exponent, replicate_exponent


def sgd(model, x, y, batches, *, lr, momentum=0.0, normalized=False):
    """Plain loops around the definition; `normalized` divides the step by the batch gradient's size, as Adam would."""
    w, v = model.weights, torch.zeros_like(model.weights)
    weights, steps, buffers = [w], [], [v]
    for batch in batches:
        rows = torch.tensor(batch)
        g = model.per_example_gradients(w, x[rows], y[rows]).mean(0)
        M = torch.full_like(w, lr) / (g.norm() if normalized else 1.0)
        v = momentum * v + g
        w = w - M * v
        selection = torch.full((len(batch),), len(x) / len(batch), dtype=x.dtype)
        steps.append(AffineStep(rows, selection, M, momentum=momentum))
        weights.append(w)
        buffers.append(v)
    return RecordedSteps(weights, steps, buffers)


def problem(n, *, linear=False):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    module = nn.Linear(2, 1) if linear else nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.randn(n + 2, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return FlatModel(module.double(), "squared"), x[:n], y, x[n:]


def all_runs(model, x, y, q, orders, *, sampling, **options):
    splits, variances = [], []
    for batches in orders:
        run = sgd(model, x, y, batches, **options)
        splits.append(drift_diffusion(run, model, x, y, q, sampling=sampling))
        variances.append(fluctuation_variance(run, model, x, y, q, sampling=sampling))
    assert max(split.closure for split in splits) < 1e-11
    return splits, variances


def expectations(splits, variances):
    """The mean diffusion, its mean square, and the predicted mean square, as fractions of the last."""
    predicted = sum(v.total for v in variances) / len(variances)
    diffusion = torch.stack([s.diffusion for s in splits])
    mean = (diffusion.mean(0).norm() / predicted**0.5).item()
    square, rate = diffusion.square().sum(1).mean().item(), diffusion_rate(splits, variances)
    assert (rate.measured.value, rate.predicted.value) == pytest.approx((square, predicted), rel=1e-12)
    assert (rate.bound.left, rate.bound.right) == pytest.approx(
        (square, sum(v.ceiling for v in variances) / len(splits))
    )
    return mean, square / predicted


ORDERS = {
    "independent": [list(order) for order in product(combinations(range(3), 2), repeat=2)],
    "replacement": [list(order) for order in product(product(range(2), repeat=2), repeat=2)],
    "epochs": [[[i] for i in order] for order in permutations(range(3))],
}


@pytest.mark.parametrize("sampling", ORDERS)
def test_sgd_s_diffusion_is_a_martingale(sampling):
    """Exactly, over all runs there are, on a network: E = 0, and E‖·‖² is the sum of the traces."""
    found = all_runs(*problem(2 if sampling == "replacement" else 3), ORDERS[sampling], sampling=sampling, lr=0.4)
    mean, square = expectations(*found)
    assert mean < 1e-12
    assert square == pytest.approx(1.0, abs=1e-12)
    rate = diffusion_rate(*found)
    assert rate.excess.value == pytest.approx(0.0, abs=1e-12 * rate.predicted.value)
    assert rate.correlation.value == pytest.approx(0.0, abs=1e-12)
    assert rate.bound.holds
    attained = rate.bound.tightness == pytest.approx(1.0, abs=1e-9)
    assert attained == (sampling != "independent"), "two of three at once fluctuate less than two draws"


def test_epochs_against_the_full_gradient_are_no_martingale():
    """Dealt out without repetition, later batches make up for earlier ones: the increments are anticorrelated."""
    rate = diffusion_rate(*all_runs(*problem(3), ORDERS["epochs"], sampling="independent", lr=0.1))
    assert -1 < rate.correlation.value < -0.7
    assert rate.measured.value < 0.2 * rate.predicted.value
    assert rate.bound.holds
    small = diffusion_rate(*all_runs(*problem(3), ORDERS["epochs"], sampling="independent", lr=0.001))
    assert small.correlation.value == pytest.approx(-1, abs=1e-3), "at rest an epoch cancels exactly"


def test_momentum_is_exact_for_linear_models_only():
    orders = [[[i], [j]] for i, j in product(range(3), repeat=2)]
    options = {"sampling": "independent", "lr": 0.4, "momentum": 0.7}
    mean, square = expectations(*all_runs(*problem(3, linear=True), orders, **options))
    assert mean < 1e-12
    assert square == pytest.approx(1.0, abs=1e-12)
    mean, square = expectations(*all_runs(*problem(3), orders, **options))
    assert 1e-4 < mean < 0.5
    assert 1e-4 < abs(square - 1) < 0.5


def test_a_preconditioner_that_knows_the_batch_leaves_no_martingale():
    orders = [[[i], [j]] for i, j in product(range(3), repeat=2)]
    mean, _ = expectations(*all_runs(*problem(3), orders, sampling="independent", lr=0.1, normalized=True))
    assert mean > 0.05


def test_rates_over_replicate_seeds():
    """Small steps far from rest: drift like T, diffusion like the root of T."""
    model, x, y, q = problem(16)
    y = y + 3.0
    runs = []
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        batches = [torch.randperm(16, generator=generator)[:2].tolist() for _ in range(24)]
        runs.append(sgd(model, x, y, batches, lr=1e-3))
    rates = replicate_rates(runs, model, x, y, q)
    rate, growth = rates.diffusion, rates.growth
    assert abs(rate.excess.value) < 4 * rate.excess.standard_error
    assert abs(rate.correlation.value) < 4 * rate.correlation.standard_error
    assert rate.bound.holds
    assert rate.bound.right > rate.predicted.value
    assert growth.drift.value == pytest.approx(1.0, abs=0.05)
    assert growth.drift.standard_error < 0.02
    assert abs(growth.diffusion.value - 0.5) < 3 * growth.diffusion.standard_error
    assert growth.diffusion.standard_error < 0.15
    assert growth.sizes[0] == 3
    assert growth.sizes[-1] == 24


def test_noise_without_drift_moves_the_test_outputs_like_drift():
    """Gradients ±1 and outputs w²: no drift at all, and yet N η² in the mean, all of it curvature."""
    start = torch.ones(1, dtype=torch.float64)
    model = FlatModel.from_function(lambda w, x: x * w**2, start, lambda u, y: y * u.sum().sqrt())
    x, y = torch.ones(2, 1, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    orders = [[[i] for i in order] for order in product(range(2), repeat=4)]
    splits, variances = all_runs(model, x, y, x[:1], orders, sampling="independent", lr=0.1)
    mean = torch.stack([s.displacement for s in splits]).mean(0)
    assert_close(mean, torch.full_like(mean, 4 * 0.1**2), rtol=1e-10, atol=0)
    assert max(s.drift.norm() for s in splits) < 1e-14
    for split in splits:
        assert_close(split.remainder_steps, torch.full_like(split.remainder_steps, 0.1**2), rtol=1e-9, atol=0)
    assert diffusion_rate(splits, variances).excess.value == pytest.approx(0, abs=1e-12)
    growth = growth_exponents(splits)
    assert growth.remainder.value == pytest.approx(1.0, abs=1e-6)
    assert growth.diffusion.value == pytest.approx(0.5, abs=0.1)


def test_the_batch_size_divides_the_variance():
    model, x, y, q = problem(6)
    totals = []
    for b in (1, 2, 6):
        run = sgd(model, x, y, [list(range(b))], lr=0.1)
        totals.append(fluctuation_variance(run, model, x, y, q))
    assert totals[1].total / totals[0].total == pytest.approx((4 / (2 * 5)) / 1)
    assert totals[1].ceiling / totals[0].ceiling == pytest.approx(1 / 2)
    assert totals[2].total == 0.0
    moves = (
        0.1 * model.per_example_gradients(model.weights, x, y) @ model.output_jacobian(model.weights, q).flatten(0, 1).T
    )
    assert totals[0].total == pytest.approx((moves - moves.mean(0)).square().sum(1).mean().item())


def test_exponents_of_known_laws():
    generator = torch.Generator().manual_seed(0)
    walks = torch.randn(200, 64, generator=generator, dtype=torch.float64).cumsum(1)
    sizes = [8, 16, 32, 64]
    found = replicate_exponent(sizes, walks[:, [s - 1 for s in sizes]].square())
    assert abs(found.value - 0.5) < 3 * found.standard_error
    assert 0.01 < found.standard_error < 0.1
    noisy = [Estimate(3.0 * n**-1.5, 0.1 * n**-1.5) for n in sizes]
    assert power_law_exponent(sizes, noisy).value == pytest.approx(-1.5)
    assert not power_law_exponent(sizes, [*noisy[:3], Estimate(0.0, 0.1)]).valid
    assert not replicate_exponent(sizes, torch.ones(2, 4)).valid
    assert not replicate_exponent(sizes, torch.zeros(5, 4)).valid


def test_bad_input_is_refused():
    zero = torch.zeros(4, 1)
    split, variance = DriftDiffusion(zero, zero, zero, zero, zero[0]), FluctuationVariance(zero[:, 0], zero[:, 0])
    with pytest.raises(DataError, match="at least 2 runs, got 1"):
        diffusion_rate([split], [variance])
    with pytest.raises(DataError, match="got 2 and 1"):
        diffusion_rate([split, split], [variance])
    short = FluctuationVariance(zero[:2, 0], zero[:2, 0])
    with pytest.raises(DataError, match="on one window"):
        diffusion_rate([split, split], [variance, short])
    with pytest.raises(DataError, match="first=4"):
        growth_exponents([split, split], first=4)
    with pytest.raises(DataError, match="two different positive sizes"):
        power_law_exponent([2, 2], [Estimate(1.0, 0.1)] * 2)
    assert not diffusion_rate([split, split], [variance, variance]).correlation.valid
    model, x, y, q = problem(2)
    one = sgd(model, x, y, [[0]], lr=0.1)
    other = RecordedSteps([w + 1 for w in one.all_weights], one.all_steps, one.buffers)
    with pytest.raises(DataError, match="the same weights"):
        replicate_rates([one, other], model, x, y, q)
    assert_close(split.closure, 0.0)
