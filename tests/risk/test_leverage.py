"""Leverage: leave-one-out from tangent kernels, for networks that exclusion cannot follow."""

import math
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.optim import SGD, AdamW

from poprisk import (
    Gate,
    PopRiskAdamW,
    Problem,
    RiskMeter,
    leave_one_out,
    out_of_sample_probabilities,
    population_risk,
    train,
)
from poprisk.errors import RunError
from poprisk.risk._leverage import tangents as tangents_module
from poprisk.risk._leverage.batch_statistics import normalized_layers, without_statistics
from poprisk.risk._leverage.leverage import choose_steps, leverage
from poprisk.risk._leverage.pace import pace_at
from poprisk.risk._leverage.tangents import Tangents
from poprisk.risk._resampled import members_without
from poprisk.risk._retraining.retrain import member_outputs, retrain
from poprisk.risk._verdict import LARGEST_LEVERAGE_ERROR, LEVERAGE_ERROR, Found, judge_leverage, judge_single


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.gru(x.reshape(len(x), 3, 4))[0][:, -1])


MODELS = {
    "relu": lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)),
    "batchnorm": lambda: nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)),
    "gru": Recurrent,
    "bag": lambda: nn.Sequential(nn.EmbeddingBag(20, 8), nn.Linear(8, 3)),
}


PLAIN = partial(SGD, lr=0.1)


def data(n: int, kind: str = "relu", noise: float = 0.3):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 12, generator=generator)
    y = (x[:, :3] + 0.4 * torch.randn(n, 3, generator=generator)).argmax(1)
    y = torch.where(torch.rand(n, generator=generator) < noise, torch.randint(3, (n,), generator=generator), y)
    if kind == "bag":
        x = (torch.rand(n, 6, generator=generator) * 7).long() + 6 * y[:, None]
    return x, y


@cache
def trained(kind: str, steps: int = 30, n: int = 100, every: int = 1, optimizer=PLAIN):
    x, y = data(n, kind)
    problem = Problem(MODELS[kind], "cross_entropy", x, y, seed=2)
    return train(problem, optimizer, steps, batch_size=25, every=every, progress=False)


def test_a_linear_model_is_predicted_as_it_is_without_each_example():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator)
    y = x[:, :1] + torch.randn(24, 1, generator=generator)
    problem = Problem(nn.Linear, "squared", x, y, arguments={"in_features": 4, "out_features": 1})
    run = train(problem, partial(SGD, lr=0.02), 150, progress=False)
    found, expected = leverage(run, [150])[0], leave_one_out(run, renormalize=False).displacement

    def error(found):
        return float((found.excluded_outputs - found.outputs - expected).norm() / expected.norm())

    # The force on an example is followed from moment to moment: few of them are off by 6%, one every ten steps by 0.8%.
    assert error(found) < 0.07
    assert error(leverage(run, list(range(10, 151, 10)))[-1]) < 0.01
    assert abs(found.risk.value - found.losses.mean()) < 1e-6


@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.05, momentum=0.9), partial(AdamW, lr=3e-3)])
def test_a_relu_network_loses_what_real_deletions_lose(optimizer):
    run = trained("relu", 60, 60, optimizer=optimizer)
    found, real = leverage(run, [60])[0].risk, leave_one_out(run, renormalize=False).risk
    gap = float(real.value) - real.training_loss
    assert abs(found.training_loss - real.training_loss) < 1e-5
    assert abs(float(found.value) - float(real.value)) < 0.35 * gap


def test_statistics_of_the_batch_follow_the_weights():
    module, x = MODELS["batchnorm"]().double(), data(40)[0].double()
    names = [name for name, _ in module.named_parameters()]
    places, start = {}, 0
    for name, p in module.named_parameters():
        places[name] = slice(start, start + p.numel())
        start += p.numel()

    def jacobian(training: bool) -> torch.Tensor:
        for norm in module.modules():
            if isinstance(norm, nn.BatchNorm1d):
                norm.train(training).track_running_stats = not training
        found = jacrev(lambda p: functional_call(module, p, (x,)))(dict(module.named_parameters()))
        return torch.cat([found[name].flatten(2) for name in names], 2).flatten(0, 1).detach()

    module(x)
    norm = module[1]
    norm.momentum = 1.0
    module(x)  # the running statistics are those of this batch
    norm.running_var *= 39 / 40  # which torch stores unbiased
    module.eval()
    rows = without_statistics(jacobian(training=False), places, normalized_layers(module, (x,)))
    wanted = jacobian(training=True)
    torch.testing.assert_close(rows, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", list(MODELS))
def test_every_network_gets_an_answer_without_training_again(kind):
    run = trained(kind, n=40 if kind == "gru" else 100)
    risk = population_risk(run, "leverage")
    assert risk.method == "leverage"
    assert risk.valid, risk.reason
    assert risk.training_loss < risk.value < 1.5 * risk.training_loss
    assert risk.standard_error >= LEVERAGE_ERROR * risk.gap
    if kind not in ("relu", "bag"):
        assert population_risk(run).method == "leverage"


def test_memorized_noise_is_not_valid_and_says_why():
    x, y = data(60, noise=1.0)
    problem = Problem(MODELS["batchnorm"], "cross_entropy", x, y, seed=1)
    run = train(problem, partial(AdamW, lr=0.03), 300, progress=False)
    risk = population_risk(run, "leverage", controls=0)
    assert not risk.valid
    assert risk.standard_error > LARGEST_LEVERAGE_ERROR * risk.value
    assert "of the risk (limit 40%); 100% of it is a correction of the training loss" in risk.reason
    assert "retrain_budget=10" in risk.reason


def copied(repeats: int, rows: int, steps: int = 100):
    """A linear regression on rows that come several times, with a target of its own each time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 4, generator=generator).repeat(repeats, 1)
    y = x[:, :1] + torch.randn(len(x), 1, generator=generator)
    problem = Problem(nn.Linear, "squared", x, y, arguments={"in_features": 4, "out_features": 1})
    return train(problem, partial(SGD, lr=0.02), steps, progress=False)


def test_copies_are_left_out_together():
    run = copied(3, 16)
    groups = [torch.tensor([i, i + 16, i + 32]) for i in range(16)]
    weights = retrain(run, members_without(48, groups, renormalize=False), progress=False).weights
    real = member_outputs(run, weights, run.problem.inputs).squeeze(2)
    found = leverage(run, [100])[0]
    assert torch.equal(found.examples, torch.stack(groups).flatten())
    expected = real[found.examples % 16, found.examples] - found.outputs.squeeze(1)
    moved = (found.excluded_outputs - found.outputs).squeeze(1)
    assert float((moved - expected).norm() / expected.norm()) < 0.08
    assert found.distinct == 16
    assert population_risk(copied(2, 60, steps=20), "leverage").valid


def test_a_part_of_the_examples_is_whole_groups():
    found = leverage(copied(3, 16), [100], 20)[0]
    assert len(found.examples) == 18
    assert set(torch.bincount(found.examples % 16).tolist()) == {0, 3}


def test_mostly_repetitions_are_not_valid():
    risk = population_risk(copied(8, 12, steps=20), "leverage")
    assert not risk.valid
    assert "only 12 of the 96 inputs are different" in risk.reason


def test_a_part_of_the_examples_stands_for_all_of_them():
    run = trained("relu", 60, 160)
    every, part = (leverage(run, [60], m)[0] for m in (160, 80))
    assert int(part.half_losses.isfinite().sum()) == 40
    gap = every.risk.gap
    assert abs(part.risk.gap - gap) < 0.4 * gap


def test_a_large_jacobian_is_added_up_in_groups(monkeypatch):
    run = trained("relu")
    exact = Tangents(run, torch.arange(20)).at(30).kernel
    monkeypatch.setattr(tangents_module, "_HELD", 0)
    grouped = Tangents(run, torch.arange(20)).at(30).kernel
    assert 0 < float((grouped - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("optimizer", [partial(SGD, lr=0.05, momentum=0.9), partial(AdamW, lr=3e-3)])
def test_checkpoints_alone_give_the_same_pace(optimizer):
    dense, sparse = (trained("relu", 20, 60, every, optimizer) for every in (1, 10))
    one, other = pace_at(dense, 10), pace_at(sparse, 10)
    # The recorded step has the squares after its own gradient; the checkpoint those before.
    assert float((one.move / other.move).log().abs().median()) < 0.15
    assert one.inertia == other.inertia
    assert abs(one.decay - other.decay) < 1e-3 * max(one.decay, 1e-9)
    assert choose_steps(sparse, [7, 20]) == ([0, 10, 20], [10, 20])


def test_the_meter_has_a_curve_for_batch_normalization():
    meter = RiskMeter("leverage").read(trained("batchnorm"), [5, 10, 30])
    assert meter.curve()["method"] == ["leverage"] * 3
    alone = population_risk(trained("batchnorm"), "leverage")
    assert abs(meter.readings[-1].risk.value - alone.value) < 0.02 * alone.value


@pytest.mark.parametrize("kind", ["relu", "batchnorm"])
def test_probabilities_of_every_example_are_as_uncertain_as_the_risk(kind):
    run = trained(kind)
    found = out_of_sample_probabilities(run, "leverage")
    assert found.valid
    assert abs(found.log_loss - float(population_risk(run, "leverage").value)) < 1e-4


def test_too_many_outputs_are_refused():
    problem = Problem(
        nn.Linear, "squared", torch.eye(12), torch.ones(12, 101), arguments={"in_features": 12, "out_features": 101}
    )
    run = train(problem, partial(SGD, lr=0.1), 2, progress=False)
    with pytest.raises(RunError, match="at most 100 outputs"):
        population_risk(run, "leverage")


@pytest.mark.parametrize("gate", [Gate.paper(), Gate("hard", normalize=False)])
def test_a_gate_that_closes_counts_as_open_if_it_opens_nearby(gate):
    run = trained("relu", 40, 60, optimizer=partial(PopRiskAdamW, lr=0.03, gate=gate))
    now = torch.as_tensor(run.step(30).preconditioner)
    soon = pace_at(run, 30).move
    assert 0 < float((now > 0).double().mean()) < 0.6 * float((soon > 0).double().mean())
    found, real = leverage(run, [40])[0].risk, leave_one_out(run, renormalize=False).risk
    assert found.valid == (gate == Gate.paper())
    assert found.valid or "a gate that is hard and not normalized" in found.reason
    gap = float(real.value) - real.training_loss
    assert abs(float(found.value) - float(real.value)) < 2 * LEVERAGE_ERROR * max(gap, found.gap)


def test_a_loss_without_curvature_is_as_uncertain_as_its_correction():
    """Nothing brings a prediction back: the risk is somewhere between the training loss and the estimate."""
    x = data(60)[0]
    absolute = lambda u, y: (u - y).abs().sum()  # noqa: E731
    problem = Problem(nn.Linear, absolute, x, x[:, :1], arguments={"in_features": 12, "out_features": 1})
    early, late = (train(problem, partial(SGD, lr=0.01), steps, progress=False) for steps in (20, 400))
    risk, real = population_risk(early, "leverage"), leave_one_out(early, renormalize=False).risk
    assert risk.valid
    assert risk.training_loss < real.value < risk.value
    assert abs(float(risk.value) - float(real.value)) < 2 * risk.standard_error
    assert not population_risk(late, "leverage", controls=0).valid


def test_what_half_of_the_examples_say_otherwise_is_part_of_the_error():
    found = Found(1.0, 0.03, "leverage", "a model", 0.9, 0, 50, 200)
    assert judge_leverage(found, 1.0, 1.0, 200).standard_error == pytest.approx(math.hypot(0.03, 0.05))
    assert judge_leverage(found, 1.0, 1.2, 200).standard_error == pytest.approx(math.hypot(0.03, 0.05, 0.2))
    assert not judge_leverage(found, 1.0, 1.5, 200).valid
    apart = judge_leverage(found, 1.4, 1.0, 200)
    assert not apart.valid
    assert "differ by 40% of the risk (limit 30%)" in apart.reason


def test_single_predictions_need_more_than_their_mean():
    risk = judge_leverage(Found(1.0, 0.03, "leverage", "a model", 0.3, 0, 50, 50), 1.0, 1.0, 50)
    assert risk.valid
    assert not judge_single(risk).valid
    assert "70% of the mean of the predicted losses" in judge_single(risk).reason
    risk = judge_leverage(Found(1.0, 0.03, "leverage", "a model", 0.8, 0, 50, 50), 1.0, 1.0, 50)
    assert judge_single(risk).valid
    assert "hard or literal gate" in judge_single(risk, gate_closes=True).reason
