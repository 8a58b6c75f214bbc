"""The held-back risk is the first choice of ``population_risk``, with its target said, checked against the others."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from poprisk import Problem, RiskEstimate, RiskMeter, TailAverage, population_risk, train
from poprisk.errors import HyperparameterError, RunError
from poprisk.risk import Unrolled
from poprisk.risk._influence.linearized_run import LinearizedRun
from poprisk.risk._kept_folds import averaged_steps, kept_folds
from poprisk.risk._verdict import narrower, trained_on
from poprisk.runs import MODULE_BUFFER


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def normed():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def trained(make_model=mlp, n=120, hold_back=0.25, steps=40, tail=0.2, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=generator)
    y = (x + 0.7 * torch.randn(n, 4, generator=generator))[:, :3].argmax(1)
    problem = Problem(make_model, "cross_entropy", x, y)
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    return train(problem, optimizer, steps, batch_size=10, hold_back=hold_back, tail=tail, dtype=dtype, progress=False)


@pytest.fixture(scope="module", params=[mlp, normed])
def run(request):
    return trained(request.param)


def loss_of(run, weights, rows):
    module = run.module()
    module.load_state_dict(weights)
    inputs, targets = run.problem.batch(rows)
    with torch.no_grad():
        return nn.functional.cross_entropy(module.eval()(inputs), targets, reduction="none").double()


def test_it_is_the_estimate_that_the_run_stores(run):
    found, kept = population_risk(run), run.kept
    assert found.method == "held_back"
    assert (found.value, found.standard_error, found.valid) == (
        kept.risk.value,
        kept.risk.standard_error,
        True,
    )
    average = "averaged over about the last 20% of the steps up to it"
    assert found.target == f"the kept weights, step {kept.risk.step} of 40, {average}"
    rest = torch.ones(120, dtype=torch.bool)
    rest[kept.held] = False
    assert found.training_loss == pytest.approx(
        float(loss_of(run, kept.weights, rest.nonzero()[:, 0]).mean()), rel=1e-5
    )


def test_the_last_weights_are_measured_on_the_same_examples(run):
    found = population_risk(run, "held_back", weights="last")
    last = dict(run.module().state_dict())
    names = [name for name, p in run.module().named_parameters() if p.requires_grad]
    last |= dict(zip(names, run.layout.split(run.weights(40)), strict=True))
    end = run.checkpoint(40).items()
    last |= {key.removeprefix(MODULE_BUFFER): x for key, x in end if key.startswith(MODULE_BUFFER)}
    losses = loss_of(run, last, run.kept.held)
    assert found.target == "the weights at the last step"
    assert_close(found.value, float(losses.mean()), rtol=1e-5, atol=1e-6)
    assert found.standard_error >= float(losses.std()) / len(losses) ** 0.5
    assert found.valid


def test_the_narrower_of_two_that_agree():
    run = trained()
    excluded, held = population_risk(run, "exclusion"), population_risk(run, "held_back", weights="last")
    found = population_risk(run, weights="last")
    assert (found.method, found.value, found.standard_error) == ("exclusion", excluded.value, excluded.standard_error)
    assert excluded.standard_error < held.standard_error
    assert "the held-back examples agree" in found.reason


def test_held_back_examples_that_contradict_another_estimate_win():
    about = {"target": "this model", "training_loss": 0.1}
    held = RiskEstimate(1.0, 0.2, reason="30 examples", method="held_back", **about)
    other = RiskEstimate(0.3, 0.05, reason="agree", method="exclusion", **about)
    found = narrower(held, other)
    assert (found.method, found.value, found.standard_error) == ("held_back", 1.0, 0.2)
    assert "exclusion gives 0.3 ± 0.05, which the held-back examples contradict" in found.reason
    wide = RiskEstimate(0.9, 0.3, reason="agree", method="exclusion", **about)
    assert narrower(held, wide).method == "held_back"


def test_exclusion_counts_the_examples_that_were_trained_on():
    assert population_risk(trained(), "exclusion").target == "a model trained on 89 of the 120 examples"


@pytest.mark.parametrize("budget", [0, 4])
def test_the_meter_reads_the_same_at_the_end(run, budget):
    meter = RiskMeter(retrain_budget=budget).read(run, [20, 40])
    expected = population_risk(run, weights="last", retrain_budget=budget)
    found = meter.readings[-1].risk
    assert (found.to_dict(), found.method, found.target) == (expected.to_dict(), expected.method, expected.target)
    before = population_risk(run, "held_back", weights="last")
    earlier = RiskMeter("held_back").read(run, [20]).readings[0].risk
    assert earlier.target == "the weights before step 20"
    assert earlier.valid
    assert earlier.value != before.value


def test_the_meter_reads_the_same_where_memory_holds_only_some_examples_at_a_time(monkeypatch):
    run = trained(n=30, hold_back=None, steps=10)
    expected = population_risk(run)
    monkeypatch.setattr(LinearizedRun, "columns_at_a_time", lambda self: 7)
    found = RiskMeter().read(run, [5, 10]).readings[-1].risk
    assert found.cost == expected.cost == 30 + 16
    assert_close(found.value, expected.value)


def test_nothing_is_trained_where_held_back_examples_are_enough():
    run = trained(normed, n=1200, hold_back=0.5, steps=15)
    assert run.kept.risk.standard_error < 0.1 * run.kept.risk.value
    assert population_risk(run, retrain_budget=10).cost == run.kept.risk.cost
    assert population_risk(run, weights="last", retrain_budget=10).method != "k_fold"


@pytest.mark.parametrize("make_model", [mlp, normed])
def test_folds_are_trained_where_held_back_examples_leave_much_open(make_model):
    run = trained(make_model, hold_back=0.1)
    held, found = population_risk(run), population_risk(run, retrain_budget=10)
    assert held.standard_error > 0.1 * held.value
    assert (found.method, found.valid) == ("k_fold", True)
    assert found.standard_error < held.standard_error
    assert "the held-back examples agree" in found.reason
    assert found.value == population_risk(run, "k_fold", 10, weights="kept").value
    assert found.target == f"the kept weights, step {run.kept.risk.step} of 40, of {trained_on((96, 100), 120)}"


def test_folds_answer_where_too_few_examples_are_held_back():
    run = trained(hold_back=0.05)
    assert not population_risk(run).valid
    found = population_risk(run, retrain_budget=10)
    assert (found.method, found.valid) == ("k_fold", True)
    assert found.target.startswith("the kept weights")


def plain_normed():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def moments_without(run, fold, points):
    """The recorded training without a fold, by a loop of its own: state dicts after these numbers of steps."""
    module, n = run.problem.module(torch.float64), run.num_examples
    with torch.no_grad():
        for p, first in zip(module.parameters(), run.layout.split(run.weights(0)), strict=True):
            p.copy_(first)
    optimizer, found = torch.optim.AdamW(module.parameters(), lr=1e-2), []
    out = set(fold.tolist())
    for k in range(max(points)):
        batch = run.batch(k).tolist()
        rows = torch.tensor([i for i in batch if i not in out])
        inputs, targets = run.problem.batch(rows, dtype=torch.float64)
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(module.train()(inputs), targets, reduction="sum")
        (losses / len(batch) * n / (n - len(out))).backward()
        optimizer.step()
        if k + 1 in points:
            found.append({name: x.clone() for name, x in module.state_dict().items()})
    return found


@pytest.mark.parametrize("make_model", [mlp, plain_normed])
def test_folds_of_the_kept_weights_are_trainings_of_their_own_averaged_to_the_same_step(make_model):
    run = trained(make_model, n=60, steps=20, dtype=torch.float64)
    folds = kept_folds(run, 5, seed=3)
    assert sorted(torch.cat(folds).tolist()) == sorted(set(range(60)) - set(run.kept.held.tolist()))
    points, losses = averaged_steps(run.kept.risk.step, 0.2), []
    for fold in folds:
        moments = moments_without(run, fold, points)
        mean = {
            name: torch.stack([each[name] for each in moments]).mean(0) if last.is_floating_point() else last
            for name, last in moments[-1].items()
        }
        module = run.problem.module(torch.float64).eval()
        module.load_state_dict(mean)
        inputs, targets = run.problem.batch(fold, dtype=torch.float64)
        losses.append(nn.functional.cross_entropy(module(inputs), targets, reduction="none"))
    found = population_risk(run, "k_fold", 5, weights="kept", seed=3)
    assert_close(
        torch.tensor(float(found.value), dtype=torch.float64), torch.cat(losses).mean().detach(), rtol=1e-9, atol=0
    )


def test_a_few_steps_stand_for_the_average_over_all():
    model = nn.Linear(1, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = TailAverage(model, optimizer, tail=0.2)
    path = []
    for k in range(300):
        with torch.no_grad():
            model.weight.fill_(math.sin(k / 40))
        model.weight.grad = torch.zeros(1, 1, dtype=torch.float64)
        optimizer.step()
        path.append(model.weight.item())
    with average.swapped():
        exact = model.weight.item()
    few = [path[k - 1] for k in averaged_steps(300, 0.2)]
    assert abs(sum(few) / len(few) - exact) < 0.02 < abs(path[-1] - exact) / 10


def test_a_copy_that_was_held_back_is_no_example_that_was_trained_on():
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    y = (x[:, :1] > 0).long().squeeze(1)
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    problem = Problem(mlp, "cross_entropy", x, y)
    run = train(problem, optimizer, 10, batch_size=10, hold_back=0.25, progress=False)
    assert len(set(run.kept.held.tolist()) & {(int(i) + 40) % 80 for i in run.kept.held}) < len(run.kept.held)
    assert "were also trained on" not in population_risk(run, "k_fold", 10, weights="kept").reason


def test_too_few_held_back_examples_say_what_to_do():
    run = trained(hold_back=0.05)
    found = population_risk(run)
    assert not found.valid
    assert 'population_risk(run, retrain_budget=10), or population_risk(run, weights="last")' in found.reason
    assert population_risk(run, weights="last").method == "exclusion"


def test_errors_say_which_weights_a_method_knows():
    run = trained()
    with pytest.raises(HyperparameterError, match="exclusion estimates the risk of the weights at the last step, got"):
        population_risk(run, "exclusion", weights="kept")
    with pytest.raises(HyperparameterError, match='weights must be "kept" or "last"'):
        population_risk(run, weights="best")
    with pytest.raises(HyperparameterError, match='weights="kept" needs the run itself'):
        population_risk(Unrolled(run, stop=20), weights="kept")
    plain = trained(hold_back=None)
    with pytest.raises(RunError, match="no held-back examples: train with hold_back"):
        population_risk(plain, "held_back")
    assert population_risk(plain).method == "exclusion"
