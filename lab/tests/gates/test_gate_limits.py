"""Why no gate can have both: detection takes time, and replayed examples cannot say which world they come from."""

import itertools

import pytest
import torch

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.peers import adamw
from poprisk_lab.gates.limits import TwoWorlds, detection_steps, smallest_error
from poprisk_lab.gates.variants import VARIANTS

H = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "rho": 0.99, "alpha": 1.0, "strength": 1.0, "gate_warmup": 5.0}


def test_the_best_test_there_is_errs_as_the_bound_says():
    grid = itertools.product((0.03, 0.1, 0.5, 1.0), (0.001, 0.01, 0.1, 0.2), (1, 64))
    for ratio, error, together in grid:
        steps = detection_steps(ratio, error, together)
        assert smallest_error(ratio, steps, together) >= error  # fewer steps cannot do
        assert smallest_error(ratio, 4 * steps + 8 / (together * ratio**2), together) < error  # the order is right


def test_simulated_tests_do_not_beat_the_bound():
    generator = torch.Generator().manual_seed(0)
    ratio, steps = 0.3, 30
    for mean in (0.0, ratio):
        sums = (mean + torch.randn(20_000, steps, dtype=torch.float64, generator=generator)).mean(1)
        wrong = ((sums > ratio / 2) if mean == 0 else (sums <= ratio / 2)).double().mean().item()
        assert wrong == pytest.approx(smallest_error(ratio, steps), abs=0.01)
    assert detection_steps(ratio, smallest_error(ratio, steps)) <= steps


def worlds(examples=40, noise=1.0):
    generator = torch.Generator().manual_seed(1)
    truth = torch.randn(examples, dtype=torch.float64, generator=generator)
    return TwoWorlds(truth + noise * torch.randn(examples, dtype=torch.float64, generator=generator), truth)


def trained(rule, states, steps=400):
    """One training; returns where it ends. Nothing in it refers to a world."""
    here = worlds()
    w = torch.zeros(1, 40, dtype=torch.float64)
    state = {name: torch.zeros_like(w) for name in states}
    generator = torch.Generator().manual_seed(2)
    order: list[int] = []
    for t in range(1, steps + 1):
        order = order or torch.randperm(40, generator=generator).tolist()
        batch, order = torch.tensor(order[:8]), order[8:]
        u, state = rule(here.gradient(w[0], batch)[None], state, H, t)
        w = w - 0.02 * u
    return here, w[0]


@pytest.mark.parametrize("name", ["adamw", "lagged_agreement", "closing_with_replay", "pooled_blocks", "slow_evidence"])
def test_whatever_the_rule_it_pays_in_one_of_the_worlds(name):
    rule, states = (adamw, ("m", "v")) if name == "adamw" else (VARIANTS[name].direction, VARIANTS[name].states)
    here, w = trained(rule, states)
    clean, noisy = here.excess(w)
    assert max(clean, noisy) >= here.price
    assert clean + noisy >= 2 * here.price
    if name == "adamw":  # it learns what it is told: right in the one world, memorized noise in the other
        assert clean < 0.05
        assert noisy > 0.5


def test_the_price_is_exact():
    here = worlds()
    middle = (here.labels + here.truth) / 2
    assert here.excess(middle) == pytest.approx((here.price, here.price))
    generator = torch.Generator().manual_seed(3)
    for _ in range(50):
        w = middle + torch.randn(40, dtype=torch.float64, generator=generator)
        assert sum(here.excess(w)) >= 2 * here.price


def test_bad_numbers_are_refused():
    with pytest.raises(HyperparameterError, match="ratio > 0"):
        detection_steps(0.0, 0.1)
    with pytest.raises(HyperparameterError, match="error <= 1/4"):
        detection_steps(0.1, 0.5)
