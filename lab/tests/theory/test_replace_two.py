"""Retraining with two examples replaced: against a loop, on channels that are noise by construction, and on others."""

from functools import cache

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from oracles import drift_diffusion as oracle
from poprisk._core.autodiff.flat import FlatModel
from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.theory.power_law import power_law_exponent
from poprisk_lab.theory.replace_two import noise_mean_sweep, replace_two, weight_mask

WIDTH = 4


def two_heads(w, x):
    """A hidden layer shared by a head for the signal and a head for labels that are coin flips."""
    hidden = torch.tanh(x @ w[: 2 * WIDTH].view(2, WIDTH))
    return hidden @ w[2 * WIDTH :].view(2, WIDTH).T


def signal_and_coin(u, y):
    """Squared for the signal. Linear in the second output: its gradient is the coin times features, at any weights."""
    return (u[0] - y[0]).square() / 2 - y[1] * u[1]


def draw(count, generator):
    x = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    coin = 2.0 * torch.randint(2, (count,), generator=generator) - 1
    return x, torch.stack([torch.sin(x[:, 0]) + 0.5, coin.double()], dim=1)


def start():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4 * WIDTH, generator=generator, dtype=torch.float64)


def descend(x, y, steps=4, lr=0.1):
    """Full-batch gradient descent with the gradient written out, to be quick."""
    A, B = start()[: 2 * WIDTH].view(2, WIDTH), start()[2 * WIDTH :].view(2, WIDTH)
    for _ in range(steps):
        hidden = torch.tanh(x @ A)
        pull = torch.stack([hidden @ B[0] - y[:, 0], -y[:, 1]], dim=1) / len(x)
        into = (pull @ B) * (1 - hidden.square())
        A, B = A - lr * x.T @ into, B - lr * pull.T @ hidden
    return torch.cat([A.reshape(-1), B.reshape(-1)])


MODEL = FlatModel.from_function(two_heads, start(), signal_and_coin)
NOISE = torch.zeros(4 * WIDTH, dtype=torch.bool)
NOISE[3 * WIDTH :] = True
SIGNAL = torch.zeros(4 * WIDTH, dtype=torch.bool)
SIGNAL[2 * WIDTH : 3 * WIDTH] = True


@cache
def sweep(channel):
    mask, sizes = {"noise": (NOISE, (8, 16, 32, 64)), "signal": (SIGNAL, (16, 64, 256))}[channel]
    return noise_mean_sweep(descend, draw, MODEL, sizes, mask, replicates=40)


def test_the_trainer_descends():
    x, y = draw(5, torch.Generator().manual_seed(0))
    expected = start() - 0.1 * MODEL.per_example_gradients(start(), x, y).mean(0)
    assert_close(descend(x, y, steps=1), expected)


def test_the_loop_agrees():
    generator = torch.Generator().manual_seed(3)
    found = replace_two(descend, draw, MODEL, 5, NOISE, replicates=2, pairs=2, fresh=3, generator=generator)

    def gradient(w, z):
        return MODEL.per_example_gradients(w, z[0][None], z[1][None])[0, NOISE].numpy()

    def train(S):
        return descend(torch.stack([x for x, _ in S]), torch.stack([y for _, y in S]))

    generator, rows = torch.Generator().manual_seed(3), []
    for _ in range(2):
        S, elsewhere = (list(zip(*draw(count, generator), strict=True)) for count in (5, 3))
        pairs, fresh = [], []
        for _ in range(2):
            pairs.append(tuple(torch.randperm(5, generator=generator)[:2].tolist()))
            fresh.append(tuple(zip(*draw(2, generator), strict=True)))
        rows.append(oracle.replace_two_terms(gradient, train, S, elsewhere, fresh, pairs))
    mean = {name: np.mean([row[name] for row in rows]) for name in rows[0]}
    V = max(mean["trained"], mean["replaced"])
    assert found.noise_mean.value == pytest.approx(mean["noise_mean"], rel=1e-10)
    assert found.second_moment.value == pytest.approx(V, rel=1e-10)
    assert found.defect.value == pytest.approx(mean["defect"] ** 0.5, rel=1e-10)
    assert found.channel_mean.value == pytest.approx(mean["channel"], rel=1e-10)
    right = oracle.noise_mean_right_side(V, mean["defect"] ** 0.5, 5)
    assert found.bound.right == pytest.approx(right, rel=1e-10)
    assert found.noise_mean.cost == 6


def test_a_noise_channel_s_mean_dies_like_one_over_n():
    found = sweep("noise")
    assert all(cell.bound.holds for cell in found.cells)
    assert all(cell.bound.tightness > 0.05 for cell in found.cells), "the bound is not vacuous"
    for cell in found.cells:
        assert abs(cell.channel_mean.value) < 4 * cell.channel_mean.standard_error
    slope = found.noise_mean_exponent
    assert abs(slope.value + 1) < 3 * slope.standard_error
    assert slope.standard_error < 0.15
    assert abs(found.defect_exponent.value + 1) < 0.25, "the stability that the paper assumes"
    alone = replace_two(descend, draw, MODEL, 8, NOISE, replicates=40, generator=torch.Generator().manual_seed(0))
    assert found.cells[0].noise_mean.value == alone.noise_mean.value
    fitted = power_law_exponent((8, 16, 32, 64), [cell.noise_mean for cell in found.cells])
    assert (slope.value, slope.standard_error) == pytest.approx((fitted.value, fitted.standard_error))


def test_a_signal_channel_s_mean_stays():
    found = sweep("signal")
    assert abs(found.noise_mean_exponent.value) < 0.1
    for cell in found.cells:
        assert cell.channel_mean.value > 4 * cell.channel_mean.standard_error
        assert cell.bound_with_mean.holds
    assert not found.cells[-1].bound.holds, "a signal channel is beyond the bound"


def test_features_without_signal_are_no_noise_channel_once_they_are_fitted():
    """Squared loss, a linear model: the population gradient along them is the weight they were given."""
    model = FlatModel(torch.nn.Linear(17, 1, bias=False).double(), "squared")

    def sample(count, generator):
        x = torch.randn(count, 17, generator=generator, dtype=torch.float64)
        return x, x[:, :1] + torch.randn(count, 1, generator=generator, dtype=torch.float64)

    def least_squares(x, y, steps):
        w = torch.zeros(17, dtype=torch.float64)
        for _ in range(steps):
            w = w - 0.05 * x.T @ (x @ w - y[:, 0]) / len(x)
        return w

    mask = weight_mask(model, {"weight": (slice(None), slice(1, None))})
    options = {"replicates": 40, "fresh": 200}
    at_start = replace_two(lambda x, y: least_squares(x, y, 0), sample, model, 8, mask, **options)
    later = replace_two(lambda x, y: least_squares(x, y, 20), sample, model, 8, mask, **options)
    assert abs(at_start.channel_mean.value) < 4 * at_start.channel_mean.standard_error
    assert at_start.defect.value == 0.0
    assert later.channel_mean.value > 4 * later.channel_mean.standard_error
    assert later.bound.holds
    assert later.bound_with_mean.right > later.bound.right


def test_a_projector_by_its_rows():
    generator = torch.Generator().manual_seed(0)
    rows = torch.eye(4 * WIDTH, dtype=torch.float64)[NOISE]
    turned = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64)).Q @ rows
    by_mask = replace_two(descend, draw, MODEL, 4, NOISE, replicates=2)
    by_rows = replace_two(descend, draw, MODEL, 4, turned, replicates=2)
    assert_close(by_rows.noise_mean.value, by_mask.noise_mean.value)
    assert_close(by_rows.defect.value, by_mask.defect.value)


def test_several_input_tensors_are_replaced_together():
    def pair_model(w, x):
        return x[0] * w[0] + x[1] * w[1]

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

        def forward(self, first, second):
            return pair_model(self.w, (first, second))

    def sample(count, generator):
        x = torch.randn(2, count, 1, generator=generator, dtype=torch.float64)
        return (x[0], x[1]), x[0] + x[1]

    def moments(inputs, targets):
        return torch.stack([(part * targets).mean() for part in inputs])

    found = replace_two(moments, sample, FlatModel(Sum(), "squared"), 6, torch.ones(2, dtype=torch.bool), replicates=3)
    assert found.defect.value > 0


def test_bad_input_is_refused():
    with pytest.raises(HyperparameterError, match="at least 2"):
        replace_two(descend, draw, MODEL, 1, NOISE)
    with pytest.raises(DataError, match="orthonormal, got products off"):
        replace_two(descend, draw, MODEL, 4, torch.ones(2, 4 * WIDTH, dtype=torch.float64))
    with pytest.raises(DataError, match="a mask"):
        replace_two(descend, draw, MODEL, 4, NOISE[:3])
    with pytest.raises(DataError, match="train must return"):
        replace_two(lambda x, y: start()[:2], draw, MODEL, 4, NOISE)
    with pytest.raises(DataError, match="two different"):
        noise_mean_sweep(descend, draw, MODEL, [4, 4], NOISE)
    with pytest.raises(DataError, match="no trainable parameter 'bias'"):
        weight_mask(MODEL, {"bias": ...})
