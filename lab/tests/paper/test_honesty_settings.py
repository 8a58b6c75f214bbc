"""The settings of the honesty study: what they cover, that the splits are disjoint, and that the truth is the truth."""

import math
from collections import Counter
from dataclasses import fields, replace
from functools import cache
from itertools import combinations

import pytest
import torch

from poprisk_lab.paper.risk_honesty import sources
from poprisk_lab.paper.risk_honesty.design import SPLITS, settings
from poprisk_lab.paper.risk_honesty.networks import LOSSES, MAKERS
from poprisk_lab.paper.risk_honesty.task import GATES, Setting, final_module


@cache
def drawn(split):
    return settings(split)


@cache
def trained(name):
    [setting] = [s for s in drawn("tune") if s.name.startswith(name)]
    return setting, setting.run()


@pytest.mark.parametrize(("split", "least"), [("tune", 100), ("seen", 200), ("report", 200), ("fresh", 200)])
def test_a_split_covers_every_factor(split, least):
    made = drawn(split)
    assert len(made) >= least
    assert len({s.name for s in made}) == len({s.seed for s in made}) == len(made)
    counts = {field.name: Counter(getattr(s, field.name) for s in made) for field in fields(Setting)}
    assert set(counts["model"]) == set(MAKERS)
    assert set(counts["loss"]) == set(LOSSES)
    assert set(counts["optimizer"]) == {"sgd", "momentum", "adamw", *GATES}
    assert set(counts["source"]) == {*SPLITS[split].teachers, *SPLITS[split].real}
    assert set(counts["n"]) == set(SPLITS[split].sizes)
    assert set(counts["regime"]) == {"under-trained", "early", "trained", "long"}
    assert {s.noise for s in made if s.classes} >= set(SPLITS[split].wrong)
    assert {"normal", "student3", "student6", "contaminated"} == set(counts["tails"])
    for name in ("imbalance", "duplicates", "augmented", "hold_back", "double", "cosine"):
        assert len(counts[name]) >= 2, name
    for each in ("model", "loss", "optimizer", "regime"):
        assert min(counts[each].values()) >= least // 20, each


@pytest.mark.parametrize("split", ["report", "fresh"])
def test_the_report_goes_from_30_examples_to_5000_and_from_clean_to_half_wrong(split):
    made = drawn(split)
    assert {30, 5000} <= {s.n for s in made}
    assert {0.0, 0.5} <= {s.noise for s in made if s.classes}


@pytest.mark.parametrize("split", ["report", "fresh"])
def test_the_report_has_enough_of_the_models_that_are_hard_to_follow(split):
    made = drawn(split)
    assert sum(s.model.startswith("cnn") for s in made) >= 24
    assert sum(s.model.endswith("batchnorm") for s in made) >= 30
    assert sum(s.model == "transformer" for s in made) >= 12


@pytest.mark.parametrize(("one", "other"), list(combinations(SPLITS, 2)))
def test_the_design_is_always_the_same_and_the_splits_are_disjoint(one, other):
    assert settings(one) == drawn(one)
    few = {"sizes": {30, 5000}} if one != "tune" else {}
    for name in ("teachers", "sizes", "widths", "rates", "spread", "features", "linear_features"):
        shared = set(getattr(SPLITS[one], name)) & set(getattr(SPLITS[other], name))
        assert shared == few.get(name, set()), name
    assert {s.width for s in drawn(one)}.isdisjoint(s.width for s in drawn(other))
    assert {s.seed for s in drawn(one)}.isdisjoint(s.seed for s in drawn(other))
    halved = set(sources.HALVED) if (one, other) == ("tune", "seen") else set()
    assert set(SPLITS[one].real) & set(SPLITS[other].real) == halved


@pytest.mark.parametrize("name", [*SPLITS["report"].real, *SPLITS["fresh"].real])
def test_the_report_has_tasks_of_its_own_on_real_data(name):
    kind, outputs, shape = sources.REAL[name]
    x, y = sources._table(name)
    assert tuple(x.shape[1:]) == shape
    assert not any(bool((column - y.reshape(-1)).abs().max() < 1e-6) for column in x.double().T)
    assert (y.is_floating_point() and y.shape[1] == 1) if kind == "regression" else int(y.max()) + 1 == outputs
    assert sources.available(name) == len(x)


@pytest.mark.parametrize("source", sources.HALVED)
def test_the_splits_share_no_row_of_a_real_data_set(source):
    _, outputs, shape = sources.REAL[source]
    request = sources.Request(source, outputs, shape, 0.0, "normal", 1.0, 3, 0)
    one, other = (
        {tuple(row) for part in (0, 2) for row in sources.draw(replace(request, half=h), 50, 0.0, 0)[part].tolist()}
        for h in (0, 1)
    )
    assert len(one) > 50
    assert one.isdisjoint(other)


def test_copies_are_exact_and_no_test_example_is_a_training_example():
    request = sources.Request("tanh", 3, (6,), 0.3, "normal", 8.0, 5, 0)
    x, y, test_x, _ = sources.draw(request, 60, 0.5, 1000)
    rows = {(*row, label) for row, label in zip(x.tolist(), y.tolist(), strict=True)}
    assert len(x) == 60
    assert len(rows) == 30
    assert {row[:-1] for row in rows}.isdisjoint(map(tuple, test_x.tolist()))
    counts = torch.bincount(sources.draw(replace(request, noise=0.0), 2000, 0.0, 10)[1], minlength=3)
    free = torch.bincount(sources.draw(replace(request, noise=0.0, imbalance=1.0), 2000, 0.0, 10)[1], minlength=3)
    assert counts[2] / counts[0] < 0.3 * free[2] / free[0]


@pytest.mark.parametrize("tails", ["normal", "student3", "student6", "contaminated"])
def test_noise_has_the_tails_it_is_said_to_have(tails):
    request = sources.Request("linear", 0, (4,), 1.0, tails, 1.0, 5, 0)
    noise = sources.draw(request, 10, 0.0, 20_000)[3] - sources.draw(replace(request, noise=0.0), 10, 0.0, 20_000)[3]
    far = (noise.abs() > 4 * noise.abs().median() / 0.6745).double().mean().item()
    assert far < 3e-4 if tails == "normal" else far > 1e-3


def test_the_truth_is_the_mean_loss_of_the_last_weights():
    setting, run = trained("tune 004")  # a linear model
    truth = setting.truth(run)
    *_, x, y = setting._data
    w = run.weights(run.num_steps).double()
    losses = 0.5 * (x.flatten(1) @ w[:-1, None] + w[-1] - y).square()
    assert math.isclose(truth.value, losses.mean().item(), rel_tol=1e-5)
    assert math.isclose(truth.error, losses.std().item() / math.sqrt(len(y)), rel_tol=1e-5)
    assert truth.examples == len(y) == 20_000


def test_the_final_module_has_the_buffers_of_the_last_step():
    setting, run = trained("tune 070")  # batch normalization
    module = final_module(run)
    assert not module.training
    moved = [b for name, b in module.named_buffers() if name.endswith("running_mean")]
    assert all(b.abs().max() > 0 for b in moved)
    assert setting.training_loss(run) < setting.truth(run).value


def test_held_back_weights_have_a_truth_of_their_own():
    setting, run = trained("tune 108")
    kept = setting.kept_truth(run)
    assert kept is not None
    assert kept.value != setting.truth(run).value
    assert trained("tune 070")[0].kept_truth(trained("tune 070")[1]) is None
