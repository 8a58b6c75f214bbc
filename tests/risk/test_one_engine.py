"""The same run and folds give the same risk, the same standard error and the same verdict by every public road."""

import html
import json
import math
from functools import partial

import pytest
import torch
from torch import nn

from poprisk import PopRiskAdamW, RiskMeter, cli, k_fold, population_risk
from poprisk._core.seeds import shuffled
from poprisk.errors import RunError
from poprisk.jobs import JobPlan, open_resampled
from poprisk.report import analyze
from poprisk.report._analysis.kept import KeptAnalysis
from poprisk.report._drawing.page import report_page
from poprisk.risk import cross_validation_risk, exclusion, exclusion_risk, first_order_risk, leave_one_out
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._k_fold import k_fold_curve
from poprisk.runs import Problem, train

N, STEPS, SEED = 22, 8, 3
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1),
    "poprisk": partial(PopRiskAdamW, lr=0.05, weight_decay=0.01, gate="snr"),
}


def network(outputs):
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, outputs))


def noisy(loss="squared", n=N):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator)
    y = x[:, :1] + 0.5 * torch.randn(n, 1, generator=generator)
    targets = y if loss == "squared" else (y[:, 0] > 0).long()
    return Problem(network, loss, x, targets, arguments={"outputs": 1 if loss == "squared" else 2})


@pytest.fixture(scope="module", params=["squared", "cross_entropy"])
def loss(request):
    return request.param


@pytest.fixture(scope="module", params=OPTIMIZERS)
def run(request, loss, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "recorded"
    problem = Problem.build(noisy, loss=loss)
    return train(
        problem, OPTIMIZERS[request.param], STEPS, batch_size=11, dtype=torch.float64, path=path, progress=False
    )


def same(*risks):
    """To the last bit, words included."""
    first, *others = [(r.to_dict(), r.method, r.target, r.training_loss) for r in risks]
    for other in others:
        assert other == first


@pytest.mark.parametrize("folds", [4, 10])  # neither divides 22: the folds are of unequal sizes
def test_k_fold(run, folds, tmp_path):
    expected = k_fold(run, folds, SEED, progress=False)
    assert len(set(expected.member.bincount().tolist())) == 2
    pytest.importorskip("zarr")
    plan = JobPlan(tmp_path)
    name = plan.k_fold(run, folds=folds, seed=SEED, members_per_job=folds)
    plan.run(client="in-process")
    same(
        expected.risk,
        population_risk(run, "k_fold", folds, seed=SEED),
        RiskMeter("k_fold", retrain_budget=folds, seed=SEED).read(run, [STEPS]).readings[-1].risk,
        k_fold_curve(run, [STEPS], folds, seed=SEED)[0],
        open_resampled(tmp_path, name).risk,
    )
    assert expected.risk.method == "k_fold"
    assert expected.target == expected.risk.target
    along = RiskMeter("k_fold", retrain_budget=folds, seed=SEED).read(run, [3, STEPS]).readings[-1].risk
    assert along.to_dict() == pytest.approx(expected.risk.to_dict())


def lag(run, found):
    """How much worse the first ten of the fold models fit what they were trained on than the run's model does."""
    model, every = run.model(torch.float64), (run.weights(STEPS), *found.weights[:10])
    x, y = run.problem.inputs.double(), run.problem.targets
    y = y.double() if y.is_floating_point() else y
    own, *others = (torch.func.vmap(model.loss)(model.batch_outputs(w.double(), x), y) for w in every)
    return max(0.0, torch.cat([(losses - own)[found.member != k] for k, losses in enumerate(others)]).mean().item())


def test_folds_that_divide_and_leave_one_out(run):
    same(cross_validation_risk(run, 2, seed=SEED), k_fold(run, N // 2, SEED).risk)
    alone = leave_one_out(run).risk
    same(cross_validation_risk(run, 1), alone)
    found = k_fold(run, N, SEED)
    folds = found.risk
    assert folds.value == pytest.approx(alone.value, rel=1e-6)
    assert folds.standard_error == pytest.approx(math.hypot(alone.standard_error, lag(run, found)), rel=1e-6)
    assert (folds.valid, folds.target, folds.reason) == (alone.valid, alone.target, alone.reason)


def test_nested_folds_have_the_risk_and_the_verdict_of_plain_ones(run, loss):
    plain, nested = (k_fold(run, 4, SEED, nested=r).risk for r in (0, 1))
    assert nested.value == pytest.approx(plain.value, rel=1e-12)
    assert (nested.valid, nested.target, nested.method) == (plain.valid, plain.target, plain.method)
    # Both contain the unseen mistake: nothing in 22 examples rules it out.
    if loss == "cross_entropy":
        outputs = k_fold(run, 4, SEED).outputs
        mistake = nn.functional.cross_entropy(outputs, outputs.topk(2).indices[:, 1]).item() / N
        assert min(plain.standard_error, nested.standard_error) > mistake


@pytest.mark.parametrize("examples", [None, 12])
def test_exclusion(run, examples):
    chosen = shuffled(N, SEED, "examples")[:examples] if examples else None
    roads = (
        exclusion_risk(run, examples, seed=SEED),
        exclusion_risk(run, chosen, seed=SEED),
        exclusion(run, examples, seed=SEED).risk,
        population_risk(run, "exclusion", examples=examples, seed=SEED),
        population_risk(Unrolled(run), "exclusion", examples=chosen, seed=SEED),
        RiskMeter("exclusion", examples=examples, seed=SEED).read(run, [STEPS]).readings[-1].risk,
    )
    same(*roads)
    assert roads[0].valid
    same(roads[0], population_risk(run, examples=examples, seed=SEED))
    along = RiskMeter("exclusion", examples=examples, seed=SEED).read(run, [3, STEPS]).readings[-1].risk
    same(along, roads[0])


@pytest.mark.parametrize("examples", [None, 12])
def test_first_order(run, examples):
    found = first_order_risk(run, examples=examples, seed=SEED)
    same(found, population_risk(run, "first_order", examples=examples, seed=SEED))
    excluded = exclusion_risk(run, examples, seed=SEED)
    assert found.standard_error == excluded.standard_error


def test_too_few_examples_have_one_verdict():
    small = train(noisy(n=8), OPTIMIZERS["sgd"], STEPS, progress=False)
    risks = (k_fold(small, 4).risk, population_risk(small, "k_fold", 4), population_risk(small), exclusion_risk(small))
    assert {risk.reason for risk in risks} == {
        "8 examples are too few for a standard error (limit 10). Use more training data."
    }
    assert not any(risk.valid for risk in risks)
    same(*risks[:2])
    same(*risks[2:])


def test_a_diverged_training_has_one_verdict():
    given = noisy()
    assert isinstance(given.inputs, torch.Tensor)
    x = given.inputs.clone()
    x[3] *= 1e3
    problem = Problem(nn.Linear, "squared", x, given.targets, arguments={"in_features": 3, "out_features": 1})
    run = train(problem, partial(torch.optim.SGD, lr=1.0), 70, progress=False)
    risk = k_fold(run, 4).risk
    assert "diverged" in risk.reason
    assert not risk.valid
    for ask in (lambda: population_risk(run, "k_fold", 4), lambda: analyze(run)):
        with pytest.raises(RunError, match=r"the loss is not finite from step \d+ of 70 on"):
            ask()


def test_the_report_has_the_same_numbers():
    run = train(noisy("cross_entropy"), OPTIMIZERS["adamw"], STEPS, batch_size=11, progress=False)
    same(analyze(run, budget=1e-9, retrain=4).risk, k_fold(run, 4).risk)
    same(analyze(run).risk, population_risk(run, "exclusion"))


@pytest.mark.parametrize("hold_back", [None, 0.25])
def test_one_population_risk_on_the_command_line_in_the_report_and_in_python(hold_back, tmp_path, capsys):
    """The same number, error, verdict and target; of the kept weights where there are any, and of the last step."""
    problem, path = Problem.build(noisy, loss="cross_entropy", n=150), tmp_path / "run"
    options = {"batch_size": 32, "hold_back": hold_back, "path": path, "progress": False}
    run = train(problem, OPTIMIZERS["adamw"], STEPS, **options)
    found, last = population_risk(run), population_risk(run, weights="last")
    analysis = analyze(run, budget=0.3, progress=False)
    assert analysis.risk is not None
    assert analysis.readings is not None
    same(found, analysis.risk)
    same(last, analysis.readings[-1].risk, RiskMeter().read(run).readings[-1].risk)
    with pytest.raises(SystemExit, match="0"):
        cli.main(["analyze", str(path), "--budget", "0.3", "--json"])
    told = json.loads(capsys.readouterr().out)
    for name, risk in (("risk", found), ("risk_at_the_last_step", last)):
        assert {key: told[name][key] for key in ("value", "standard_error", "valid", "reason")} == {
            key: value for key, value in risk.to_dict().items() if key != "cost"
        }
        assert (told[name]["target"], told[name]["method"]) == (risk.target, risk.method)
    size = str(found).partition(" (")[0]
    page = html.unescape(report_page(analysis))
    assert f"{size} (valid), for {found.target}" in told["summary"][1]
    assert f"{size} (valid), for {found.target}" in page
    if hold_back:
        assert found.method == "held_back"
        assert run.kept is not None
        assert (run.kept.risk.value, run.kept.risk.standard_error) == (found.value, found.standard_error)
        assert f"label noise is {size}, corrected" in page
        assert told["summary"][2].startswith(f"The same at the last step: {str(last).partition(' (')[0]} (valid), for ")


@pytest.mark.parametrize(("n", "lr"), [(260, 0.01), (40, 0.1)])  # by leverage alone, and with real deletions
def test_leverage_is_the_same_everywhere(n, lr):
    given = noisy("cross_entropy", n=n)
    model = lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))  # noqa: E731
    problem = Problem(model, "cross_entropy", given.inputs, given.targets)
    run = train(problem, partial(torch.optim.AdamW, lr=lr), STEPS, batch_size=20, progress=False)
    found = population_risk(run)
    assert found.method == "leverage"
    assert ("real deletions" in found.reason) == (n == 40)
    same(found, RiskMeter().read(run, [3, STEPS]).readings[-1].risk)
    alone = RiskMeter("leverage").read(run, [STEPS]).readings[-1].risk
    same(alone, analyze(run, progress=False).risk)  # where exclusion is not tried, either
    assert (alone.value, alone.standard_error, alone.target) == (found.value, found.standard_error, found.target)


def test_batch_statistics_with_held_back_examples_have_a_risk():
    """Exclusion is not possible for them; the held-back risk is shown instead of nothing."""
    given = noisy("cross_entropy", n=80)
    model = lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))  # noqa: E731
    problem = Problem(model, "cross_entropy", given.inputs, given.targets)
    run = train(problem, OPTIMIZERS["adamw"], STEPS, batch_size=10, hold_back=0.25, progress=False)
    analysis = analyze(run, progress=False)
    assert analysis.risk is not None
    assert analysis.memorization is not None
    assert analysis.risk.valid
    same(population_risk(run), analysis.risk)
    same(population_risk(run, weights="last"), analysis.last_risk)
    assert analysis.memorization.source == "estimated population risk"


def test_kept_weights_by_folds(tmp_path):
    optimizer = partial(torch.optim.AdamW, lr=0.02)
    problem = Problem.build(noisy, loss="cross_entropy", n=100)
    run = train(problem, optimizer, 40, batch_size=10, hold_back=0.1, path=tmp_path / "run", progress=False)
    expected = population_risk(run, retrain_budget=10, progress=False)
    assert (expected.method, expected.valid) == ("k_fold", True)
    assert expected.target.startswith("the kept weights")
    found = analyze(run, retrain=10, parts=["risk"], progress=False)
    with_files = analyze(run, kept=KeptAnalysis(run, retrain=10), parts=["risk"], progress=False)
    again = analyze(run, kept=KeptAnalysis(run), parts=[], progress=False)
    same(expected, found.risk, with_files.risk, again.risk)
    assert analyze(run, parts=["risk"], progress=False).risk.method == "held_back"
