"""The audit finds what was done to the labels, on any kind of run, and says what it could not do."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from audit_problems import CLASSES, clustered, clusters, make_mlp, regression
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.optim import SGD, Adam

from poprisk.errors import DataError, HyperparameterError, PopRiskWarning, RunError
from poprisk.risk._audit.run_audit import audit
from poprisk.risk._audit.table import DESCRIPTIONS
from poprisk.risk._moments import choose_moments
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._run import Run
from poprisk.runs._training import train

FAST = partial(SGD, lr=0.1, momentum=0.9)
WRONG = torch.arange(120) < 12


def auc(scores, wrong):
    return float(roc_auc_score(wrong, scores))


@pytest.fixture(scope="module")
def run():
    return train(clustered(), FAST, 120, batch_size=20, progress=False)


@pytest.fixture(scope="module")
def table(run):
    return audit(run, tier="any", progress=False)


def outputs_of(run, k):
    """The network's outputs before step k, by its own parameters."""
    module = run.problem.module()
    nn.utils.vector_to_parameters(run.weights(k), module.parameters())
    with torch.no_grad():
        return module(run.problem.inputs)


def test_it_finds_the_wrong_labels_and_what_they_were(table):
    _, _, true = clusters()
    assert auc(table["suspicion"], WRONG) > 0.98
    assert (table["suggested_label"][WRONG] == true[WRONG]).double().mean() > 0.9
    found, truth = table.wrong_labels, 12
    assert found.valid
    assert abs(found.value - truth) <= 2 * found.standard_error
    assert int(table.is_suspect.sum()) == round(found.value)
    cleaned = table.cleaned_targets()
    assert (cleaned != true).sum() < 6
    assert set(table.columns) <= set(DESCRIPTIONS)


def test_replacing_all_suspects_unreviewed_is_warned_of_where_their_number_is_not_known(table):
    unsure = replace(table, wrong_labels=replace(table.wrong_labels, valid=False, reason="not known"))
    with pytest.warns(PopRiskWarning, match="many suspects may be right: review them, or choose some"):
        cleaned = unsure.cleaned_targets()
    assert torch.equal(cleaned, table.cleaned_targets())
    assert torch.equal(cleaned, unsure.cleaned_targets(unsure.is_suspect))


def test_columns_of_another_shape_are_refused(table):
    for damaged in (table["suspicion"].unsqueeze(1), table["suspicion"][:-1]):
        with pytest.raises(DataError, match="one entry for each example"):
            replace(table, columns=table.columns | {"suspicion": damaged})


def test_columns_are_what_they_say(run, table):
    """Every column again, from the outputs at all moments kept at once."""
    steps = table.moments
    u = torch.stack([outputs_of(run, k) for k in steps]).double()
    weights = torch.tensor([k - before for before, k in zip((0, *steps), steps, strict=False)]).double() / steps[-1]
    labels = table["given_label"]
    rows = torch.arange(len(labels))
    p = u.softmax(-1)
    own = p[:, rows, labels]
    others = u.clone()
    others[:, rows, labels] = -torch.inf
    margins = u[:, rows, labels] - others.max(-1).values
    losses = nn.functional.cross_entropy(u.flatten(0, 1), labels.repeat(len(steps)), reduction="none").view(-1, 120)
    right = u.argmax(-1) == labels

    def mean(values):
        return (weights[:, None] * values).sum(0)

    expected = {
        "loss": losses[-1],
        "mean_loss": mean(losses),
        "margin": margins[-1],
        "aum": mean(margins),
        "confidence": mean(own),
        "variability": (mean(own**2) - mean(own) ** 2).sqrt(),
        "correctness": mean(right.double()),
        "forgetting_events": (right[:-1] & ~right[1:]).sum(0),
        "predicted_label": u[-1].argmax(-1),
    }
    for name, value in expected.items():
        torch.testing.assert_close(table[name].double(), value.double(), rtol=1e-4, atol=1e-5, msg=name)
    average, unseen = (weights[:, None, None] * p).sum(0), table.probabilities.double()
    assert (unseen.argmax(1) != labels)[WRONG].double().mean() > 0.9
    mixed = (average + unseen) / 2
    others = mixed.scatter(1, labels[:, None], -1).max(1)
    quality = (1 + mixed[rows, labels] - others.values) / 2
    torch.testing.assert_close(table["label_quality"].double(), quality, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(table["suggested_label"], others.indices)
    torch.testing.assert_close(table.losses, losses, rtol=1e-5, atol=1e-6)
    assert steps[-1] == run.num_steps


def test_averages_do_not_memorize(run):
    """Trained until most wrong labels are reproduced, the last loss is the worse guide."""
    long = train(clustered(), FAST, 900, batch_size=20, every=10, progress=False)
    found = audit(long, tier="any", progress=False)
    reproduced = (found["predicted_label"] == found["given_label"])[WRONG].double().mean()
    assert reproduced > 0.5
    by_loss = auc(found["loss"], WRONG)
    assert auc(found["suspicion"], WRONG) > max(0.95, by_loss)
    assert abs(found.wrong_labels.value - 12) <= 2 * found.wrong_labels.standard_error + 2


@pytest.mark.parametrize("every", [1, 30], ids=["dense", "sparse"])
def test_batch_normalization_dropout_and_augmentation(every):
    made = train(
        clustered("normed", augmented=True), partial(Adam, lr=3e-3), 120, batch_size=20, every=every, progress=False
    )
    found = audit(made, moments=8, progress=False)
    assert auc(found["suspicion"], WRONG) > 0.95
    text = " ".join(found.notes)
    assert "augmented" in text
    assert "no exact columns" in text
    assert ("they are estimated" in text) == (every == 1)
    assert set(found.moments) <= (set(range(121)) if every == 1 else set(made.checkpoints))
    with pytest.raises(RunError, match="exact tier is not possible"):
        audit(made, tier="exact", progress=False)


def test_recorded_statistics_are_used_at_checkpoints():
    made = train(clustered("normed"), Adam, 60, batch_size=20, every=30, progress=False)
    found = audit(made, moments=2, progress=False)
    module = made.problem.module()
    nn.utils.vector_to_parameters(made.weights(60), module.parameters())
    kept = made.checkpoint(60)
    for name, buffer in module.named_buffers():
        buffer.copy_(kept[f"checkpoint.module.{name}"])
    with torch.no_grad():
        u = module.eval()(made.problem.inputs)
    expected = nn.functional.cross_entropy(u, made.problem.targets, reduction="none")
    torch.testing.assert_close(found["loss"].float(), expected)


def test_clean_labels_have_few_suspects():
    clean = train(clustered(wrong=0), FAST, 120, batch_size=20, progress=False)
    found = audit(clean, tier="any", progress=False)
    assert found.wrong_labels.value <= 2


def test_out_of_fold_probabilities_take_the_place_of_a_regression(run, table):
    _, _, true = clusters()
    known = torch.full((120, CLASSES), 0.02)
    known[torch.arange(120), true] = 1 - 0.02 * (CLASSES - 1)
    found = audit(run, tier="any", out_of_fold=known, progress=False)
    torch.testing.assert_close(found.probabilities, known)
    assert found.wrong_labels.value == pytest.approx(12, abs=2)
    torch.testing.assert_close(found["suggested_label"][WRONG], true[WRONG])
    torch.testing.assert_close(found.cleaned_targets(WRONG), true)
    torch.testing.assert_close(found["aum"], table["aum"])
    for bad, message in ((known[:5], "shape"), (2 * known, "sums"), (-known, "smallest")):
        with pytest.raises(DataError, match=message):
            audit(run, tier="any", out_of_fold=bad, progress=False)


def test_one_hot_targets_and_one_logit_are_classes():
    inputs, given, true = clusters()
    hot = nn.functional.one_hot(given, CLASSES).float()
    squared = Problem(make_mlp, "squared", inputs, hot)
    one_hot_run = train(squared, partial(SGD, lr=0.02, momentum=0.9), 120, batch_size=20, progress=False)
    found = audit(one_hot_run, tier="any", progress=False)
    assert found.kind == "classes"
    assert auc(found["suspicion"], WRONG) > 0.95
    cleaned = found.cleaned_targets(WRONG)
    assert cleaned.shape == hot.shape
    assert (cleaned.argmax(1) == true)[WRONG].double().mean() > 0.8
    binary = (true % 2).float()
    binary[:6] = 1 - binary[:6]
    logistic = Problem(nn.Linear, "logistic", nn.functional.one_hot(true, CLASSES).float(), binary.reshape(-1, 1),
                       arguments={"in_features": CLASSES, "out_features": 1})  # fmt: skip
    found = audit(train(logistic, partial(SGD, lr=1.0), 60, batch_size=20, progress=False), tier="any", progress=False)
    assert auc(found["suspicion"], torch.arange(120) < 6) > 0.95
    assert found.cleaned_targets(range(6)).shape == (120, 1)
    torch.testing.assert_close(found.cleaned_targets(range(6))[:6, 0], 1 - binary[:6])


def test_a_regression_by_its_residuals():
    found = audit(train(regression(), partial(SGD, lr=0.3), 100, progress=False), tier="any", progress=False)
    assert found.kind == "regression"
    assert found.is_suspect.nonzero().flatten().tolist() == [0, 1, 2]
    assert sorted(row["example"] for row in found.worst(3)) == [0, 1, 2]
    cleaned = found.cleaned_targets()
    assert bool(((found.targets - cleaned)[:3] > 2).all())
    torch.testing.assert_close(cleaned[3:], found.targets[3:])
    assert not found.wrong_labels.valid


def test_targets_of_another_kind_are_ranked_by_loss():
    def distance(u, y):
        return (u - y).abs().sum()

    problem = regression()
    other = Problem(problem.make_model, distance, problem.inputs, problem.targets)
    found = audit(train(other, partial(SGD, lr=0.3), 100, progress=False), tier="any", progress=False)
    assert found.kind == "loss"
    assert {row["example"] for row in found.worst(3)} == {0, 1, 2}
    assert not found.is_suspect.any()
    with pytest.raises(DataError, match="no suggested targets"):
        found.cleaned_targets()


def test_examples_without_finite_outputs_come_first():
    inputs, given, _ = clusters()
    inputs[50] = math.inf
    with pytest.warns(PopRiskWarning, match="the first is example 50; they are used"):
        problem = Problem(make_mlp, "cross_entropy", inputs, given, allow_nonfinite=True)
    module = problem.module()
    optimizer = SGD(module.parameters(), lr=0.1)
    recorder = Recorder(None, module, optimizer, problem=problem, verify_steps=0)
    for index in torch.arange(40).split(20):
        with recorder.step(index) as step:
            optimizer.zero_grad()
            step.loss = nn.functional.cross_entropy(module(inputs[index]), given[index])
            step.loss.backward()
            optimizer.step()
    found = audit(recorder.close(), tier="any", progress=False)
    assert int(found.order()[0]) == 50
    assert "1 examples with non-finite outputs" in " ".join(found.notes)


def test_what_cannot_be_audited_is_refused(run, tmp_path):
    with pytest.raises(HyperparameterError, match="tier"):
        audit(run, tier="quick", progress=False)
    with pytest.raises(HyperparameterError, match="moments"):
        audit(run, moments=0, progress=False)
    two = Problem(make_mlp, "cross_entropy", torch.ones(2, 6), torch.tensor([0, 1]))
    with pytest.raises(DataError, match="at least 3"):
        audit(train(two, FAST, 2, progress=False), progress=False)
    run.save(tmp_path / "run")
    with pytest.raises(RunError, match=r"problem=…"):
        audit(Run.load(tmp_path / "run"), progress=False)
    inputs, given, _ = clusters()
    wide = Problem(lambda: nn.Sequential(nn.Linear(6, 25), nn.ReLU(), nn.Linear(25, CLASSES)), "cross_entropy",
                   inputs, given)  # fmt: skip
    with pytest.raises(RunError, match="a model that differs"):
        audit(Run.load(tmp_path / "run", problem=wide), progress=False)


def test_moments_are_spread_and_begin_early(run):
    chosen = choose_moments(run, 10)
    assert chosen[-1] == 120
    assert set(range(12, 121, 12)) <= set(chosen)
    assert chosen[0] <= 2
    sparse = train(clustered(), FAST, 60, batch_size=20, every=25, progress=False)
    assert choose_moments(sparse, 10) == [25, 50, 60]


def test_progress_goes_to_stderr(run, capsys):
    audit(run, tier="any", moments=3)
    out, err = capsys.readouterr()
    assert out == ""
    assert "audit: step" in err
