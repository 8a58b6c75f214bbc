"""Modular division: many transformers at once are each the plain one, the table is right, the smoke study is shown."""

import copy
import io
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch.func import functional_call
from torch.nn import functional as F
from torch.testing import assert_close

from poprisk._core.store.files import write_figure
from poprisk.errors import HyperparameterError
from poprisk_lab.pages.gate_choice import searched_gates
from poprisk_lab.paper.grokking.figure import draw as draw_grokking
from poprisk_lab.paper.grokking.numbers import best_gate
from poprisk_lab.paper.grokking.numbers import claims as claims_grokking
from poprisk_lab.paper.grokking.numbers import lines as grokking_lines
from poprisk_lab.paper.grokking.study import (
    ADAMW,
    PAPER_RULE,
    SHARED,
    SMOKE,
    TUNED,
    GrokkingConfig,
    shared_label,
    studies,
)
from poprisk_lab.paper.grokking.task import (
    TEST_ACCURACY,
    TEST_LOSS,
    TRAIN_ACCURACY,
    GrokkingTask,
    ModularTransformer,
    division_table,
)

CPU = torch.device("cpu")
SMALL = GrokkingTask(modulus=11, width=16, heads=4, hidden=24, layers=3, batch_size=9, steps=4, evaluations=2)
SEEDS = [5, 2, 5]


def stacked(task, seeds, nudge=0.0):
    """Weights of one member a seed; a nudge makes members with one seed differ."""
    members = [task.initial(seed) for seed in seeds]
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    return {name: w + nudge * torch.randn(w.shape, generator=generator) for name, w in weights.items()}


def batches(task, members):
    count, size = task.streams["train"]
    order = [torch.randperm(count, generator=torch.Generator().manual_seed(i))[:size] for i in range(members)]
    return {"train": torch.stack(order)}


def plain_logits(task, weights, member, pairs):
    """The member's network as plain modules in float64."""
    network = ModularTransformer(task.modulus, task.width, task.heads, task.hidden, task.layers).double()
    return functional_call(network, {name: w[member].double() for name, w in weights.items()}, (pairs,))


def test_every_member_is_the_plain_network_on_its_own_table():
    weights, batch = stacked(SMALL, SEEDS, nudge=0.1), batches(SMALL, len(SEEDS))
    cohort = SMALL.cohort(SEEDS, CPU)
    losses, measured = cohort.losses(weights, batch), cohort.measure(weights)
    assert set(measured) == {metric.name for metric in SMALL.metrics}
    for member, seed in enumerate(SEEDS):
        table = division_table(SMALL, seed)
        rows = table.train[batch["train"][member]]
        expected = F.cross_entropy(plain_logits(SMALL, weights, member, rows[:, :2]), rows[:, 2])
        assert_close(losses[member].double(), expected, rtol=1e-5, atol=1e-6)
        on_test = plain_logits(SMALL, weights, member, table.test[:, :2])
        on_train = plain_logits(SMALL, weights, member, table.train[:, :2])
        expected_loss = F.cross_entropy(on_test, table.test[:, 2])
        assert_close(measured[TEST_LOSS.name][member].double(), expected_loss, rtol=1e-5, atol=1e-6)
        accuracy = (on_test.argmax(dim=1) == table.test[:, 2]).float().mean()
        assert_close(measured[TEST_ACCURACY.name][member], accuracy)
        accuracy = (on_train.argmax(dim=1) == table.train[:, 2]).float().mean()
        assert_close(measured[TRAIN_ACCURACY.name][member], accuracy)


def test_gradients_are_the_plain_ones_and_members_do_not_mix():
    batch = batches(SMALL, len(SEEDS))
    weights = {name: w.requires_grad_() for name, w in stacked(SMALL, SEEDS, nudge=0.1).items()}
    losses = SMALL.cohort(SEEDS, CPU).losses(weights, batch)
    gradients = dict(zip(weights, torch.autograd.grad(losses[1], list(weights.values())), strict=True))
    rows = division_table(SMALL, SEEDS[1]).train[batch["train"][1]]
    double = {name: w.detach().double().requires_grad_() for name, w in weights.items()}
    loss = F.cross_entropy(plain_logits(SMALL, double, 1, rows[:, :2]), rows[:, 2])
    expected = dict(zip(double, torch.autograd.grad(loss, list(double.values())), strict=True))
    for name, gradient in gradients.items():
        assert_close(gradient.double(), expected[name], rtol=1e-4, atol=1e-6)
        assert gradient[[0, 2]].count_nonzero() == 0


def test_measuring_in_pieces_changes_nothing(monkeypatch):
    weights, cohort = stacked(SMALL, SEEDS), SMALL.cohort(SEEDS, CPU)
    whole = cohort.measure(weights)
    monkeypatch.setattr("poprisk_lab.paper.grokking.task._PAIRS_AT_ONCE", 21)
    for name, value in cohort.measure(weights).items():
        assert_close(value, whole[name])


def test_order_of_a_and_b_counts_and_weights_may_be_views_of_one_matrix():
    weights, cohort = stacked(SMALL, [0]), SMALL.cohort([0], CPU)
    pairs = torch.tensor([[[3, 4], [4, 3]]])
    logits = cohort.logits(weights, pairs)
    assert (logits[0, 0] - logits[0, 1]).abs().max() > 1e-3
    matrix = torch.cat([w.flatten(1) for w in weights.values()], dim=1).repeat(2, 1)
    parts = matrix[1:].split([w[0].numel() for w in weights.values()], dim=1)
    views = {name: part.view_as(w) for (name, w), part in zip(weights.items(), parts, strict=True)}
    assert_close(cohort.logits(views, pairs), logits)


def test_the_table_divides_and_is_split_by_the_seed():
    table = division_table(SMALL, seed=0)
    both = torch.cat([table.train, table.test])
    assert len(table.train) == SMALL.train_size == round(0.25 * 11 * 10)
    assert ((both[:, 2] * both[:, 1] - both[:, 0]) % 11 == 0).all()
    assert len({tuple(pair) for pair in both[:, :2].tolist()}) == 11 * 10
    assert int(both[:, 1].min()) == 1
    assert torch.equal(table.train, division_table(SMALL, seed=0).train)
    assert not torch.equal(table.train, division_table(SMALL, seed=1).train)


def test_wrong_labels_are_as_many_as_asked_and_only_in_training():
    noisy = GrokkingTask(modulus=11, wrong_share=0.25, batch_size=9)
    clean, spoiled = division_table(SMALL, seed=3), division_table(noisy, seed=3)
    assert torch.equal(clean.test, spoiled.test)
    assert torch.equal(clean.train[:, :2], spoiled.train[:, :2])
    assert int((clean.train[:, 2] != spoiled.train[:, 2]).sum()) == round(0.25 * SMALL.train_size)


def test_the_same_seed_starts_the_same_and_leaves_the_global_generator_alone():
    state = torch.random.get_rng_state()
    first, again, other = SMALL.initial(0), SMALL.initial(0), SMALL.initial(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["token.weight"], other["token.weight"])


def test_the_paper_size_is_two_layers_of_width_128():
    shapes = {name: tuple(w.shape) for name, w in GrokkingTask().initial(0).items()}
    assert shapes["token.weight"] == (98, 128)
    assert shapes["layers.1.linear1.weight"] == (512, 128)
    assert shapes["head.weight"] == (97, 128)
    assert "layers.2.linear1.weight" not in shapes
    assert GrokkingTask().streams == {"train": (2328, 512)}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"modulus": 15}, "modulus must be a prime"),
        ({"train_share": 1.0}, "train_share must lie between 0 and 1"),
        ({"wrong_share": -0.1}, "wrong_share must lie in"),
        ({"width": 10}, "multiple of heads"),
        ({"modulus": 11, "batch_size": 512}, "at most the 28 training pairs"),
    ],
)
def test_a_task_that_cannot_be_is_refused_in_one_line(wrong, words):
    with pytest.raises(HyperparameterError, match=words) as caught:
        GrokkingTask(**wrong)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def saved(smoke_result):
    """The smoke study, as it is read from disk."""
    return smoke_result("grokking")


def arriving(saved, shared, tuned):
    """The saved result with curves that jump to 1 at given steps, one a seed: by rule at decay .2, by tuned arm."""
    changed = copy.deepcopy(saved)
    steps = {name: study["evaluation_steps"] for name, study in changed["result"]["studies"].items()}

    def jump(study, at):
        return [0.0 if step < at else 1.0 for step in steps[study]]

    for each in changed["result"]["studies"][SHARED]["rows"]:
        rule = next((rule for rule in shared if each["label"] == shared_label(rule, 0.2)), None)
        if rule is not None:
            each["curves"][TEST_ACCURACY.name] = [jump(SHARED, at) for at in shared[rule]]
    study = changed["result"]["studies"][TUNED]
    for name, times in tuned.items():
        first = next(each for each in study["rows"] if each["arm"] == name and each["chosen_for"])
        study["rows"] = [each for each in study["rows"] if each is first or each["arm"] != name]
        first["chosen_for"] = ["last", "best", "target"]
        first["curves"][TEST_ACCURACY.name] = [jump(TUNED, at) for at in times]
        study["arms"][name]["chosen"] = {"last": 0, "best": 0, "target": 0}
        study["arms"][name]["trials"][0]["curve"] = [jump(TUNED, times[0])]
    return changed


def test_the_smoke_study_holds_every_rule_and_every_arm(saved):
    shared, tuned = saved["result"]["studies"][SHARED], saved["result"]["studies"][TUNED]
    assert {each["label"] for each in shared["rows"]} >= {shared_label(ADAMW, 1.0), shared_label(PAPER_RULE, 0.2)}
    adamw = next(each for each in shared["rows"] if each["label"] == shared_label(ADAMW, 0.2))
    assert (adamw["hyper"]["lr"], adamw["hyper"]["beta2"], adamw["hyper"]["lr_warmup"]) == (1e-3, 0.98, 10.0)
    assert adamw["hyper"]["weight_decay"] == 0.2
    assert set(tuned["arms"]) == set(SMOKE.arms)
    assert tuned["task"]["steps"] == SMOKE.tuned_steps
    assert shared["evaluation_steps"][-1] == SMOKE.shared_steps
    assert len(adamw["curves"][TRAIN_ACCURACY.name]) == len(SMOKE.report_seeds)


def test_training_fits_the_training_pairs():
    """A few hundred steps of plain Adam on the stacked losses memorize: the training accuracy rises, the test's not."""
    task = GrokkingTask(modulus=11, width=32, heads=4, hidden=64, batch_size=28)
    cohort = task.cohort([0], CPU)
    weights = {name: w.requires_grad_() for name, w in stacked(task, [0]).items()}
    optimizer = torch.optim.Adam(list(weights.values()), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        cohort.losses(weights, {"train": torch.arange(28)[None]}).sum().backward()
        optimizer.step()
    measured = cohort.measure(weights)
    assert measured[TRAIN_ACCURACY.name].item() > 0.95
    assert measured[TEST_ACCURACY.name].item() < 0.5


def test_wrong_labels_are_a_study_only_if_asked_for():
    assert [study.task.name for study in studies(SMOKE)] == [SHARED, TUNED]
    noisy = studies(replace(SMOKE, noisy=True))[-1]
    assert noisy.task.name == "grokking_noisy"
    assert noisy.task.wrong_share == SMOKE.wrong_share
    assert GrokkingConfig().task.wrong_share == 0


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"weight_decays": ()}, "weight_decays needs at least one"),
        ({"arms": ("soft",)}, "arms must hold 'adamw'"),
        ({"wrong_share": 1.0}, "wrong_share must lie between"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(wrong, words):
    with pytest.raises(HyperparameterError, match=words):
        GrokkingConfig(**wrong)


def test_figure_and_lines_come_from_the_result(saved, tmp_path):
    figure = draw_grokking(saved)
    titles = [axes.get_title(loc="left") for axes in figure.get_axes()]
    assert [title[0] for title in titles] == ["A", "B", "C", "D"]
    assert write_figure(tmp_path / "grokking.png", figure, dpi=50).stat().st_size > 1000
    console = Console(file=io.StringIO(), width=140)
    for line in grokking_lines(saved):
        console.print(line)
    text = console.file.getvalue()
    assert "AdamW, weight decay 0.2" in text
    assert "GrokFast" in text


def test_bars_of_missed_targets_are_hatched(saved):
    shown = arriving(saved, {}, {"adamw": (10, 15), "soft": (10, math.inf)})
    bars = draw_grokking(shown).get_axes()[-1]
    labels = [label.get_text() for label in bars.get_yticklabels()]
    by_label = dict(zip(labels, bars.patches, strict=True))
    assert by_label["AdamW"].get_hatch() is None
    assert by_label["AdamW"].get_width() == 12.5
    assert by_label["soft gate, α = 1"].get_hatch() == "////"
    assert by_label["soft gate, α = 1"].get_width() == 15  # the seed that missed counts as all 20 steps
    assert "1 of 2" in [text.get_text() for text in bars.texts]


def test_an_arm_that_never_arrives_stays_visible(saved):
    """No trial met the target, and the arm's best checkpoint was not asked for: the row of its last step is shown."""
    shown = arriving(saved, {}, {"adamw": (10, 15), "grokfast": (math.inf, math.inf)})
    study = shown["result"]["studies"][TUNED]
    row = next(each for each in study["rows"] if each["arm"] == "grokfast")
    row["chosen_for"] = ["last"]
    study["arms"]["grokfast"]["chosen"] |= {"best": None, "target": None}
    bars = draw_grokking(shown).get_axes()[-1]
    assert "GrokFast" in [label.get_text() for label in bars.get_yticklabels()]
    assert "not reached, 0 of 2" in [text.get_text() for text in bars.texts]
    console = Console(file=io.StringIO(), width=140)
    for line in grokking_lines(shown):
        console.print(line)
    (words,) = [line for line in console.file.getvalue().splitlines() if "GrokFast" in line and "decay" not in line]
    assert "not reached" in words


@pytest.mark.parametrize("kept", [("adamw", "grokfast"), ("adamw",)])
def test_the_page_works_without_a_searched_gate(saved, kept):
    shown = arriving(saved, {}, {"adamw": (10, 15)})
    study = shown["result"]["studies"][TUNED]
    study["arms"] = {name: arm for name, arm in study["arms"].items() if name in kept}
    study["rows"] = [each for each in study["rows"] if not each["chosen_for"] or each["arm"] in kept]
    assert draw_grokking(shown) is not None
    assert len(list(grokking_lines(shown))) == 4
    assert "no gate was searched" in claims_grokking(shown)[0].equal_tuning


def three_seeds(saved):
    """The saved result with a third seed in the rows with shared hyper-parameters, since two decide nothing."""
    changed = copy.deepcopy(saved)
    for each in changed["result"]["studies"][SHARED]["rows"]:
        each["seeds"] = [0, 1, 2]
        each["curves"] = {name: [*curves, curves[0]] for name, curves in each["curves"].items()}
    return changed


INF = math.inf


@pytest.mark.parametrize(
    ("adamw", "rule", "verdict"),
    [
        ((40, 40, 40), (10, 10, 10), "Held at weight decay 0.2, where the paper's rule needs 4.0× [3.5, 8.0] fewer"),
        (
            (25, 25, 25),
            (20, 20, 20),
            "Not held at weight decay 0.2, where the paper's rule needs 1.2× [1.0, 1.7] fewer",
        ),
        ((30, 30, 30), (10, 10, 10), "Held at weight decay 0.2"),
        ((20, 20, 20), (10, 10, 10), "Undecided at weight decay 0.2"),
        ((10, 10), (5, 5), "Undecided at weight decay 0.2"),
        ((40, 10, 40), (5, 10, 10), "Undecided at weight decay 0.2"),
        ((10, 10, 10), (20, 20, 20), "Not held at weight decay 0.2, where the paper's rule needs 2.0× [1.5, 4.0] more"),
        (
            (40, 40, 40),
            (INF, INF, INF),
            "Not held at weight decay 0.2, where the paper's rule reaches the target in 0 of 3",
        ),
        (
            (INF, INF, 40),
            (INF, 5, 5),
            "Undecided at weight decay 0.2, where the paper's rule reaches the target in 2 of 3",
        ),
        (
            (INF, INF, INF),
            (INF, INF, INF),
            "Undecided at weight decay 0.2, where neither reached the target in 40 steps",
        ),
        (
            (INF, INF, INF),
            (10, 10, 10),
            "Held at weight decay 0.2, where the paper's rule needs at least 4.0× [4.0, ∞]",
        ),
        ((INF, INF, INF), (30, 30, 30), "Undecided at weight decay 0.2, where the paper's rule needs at least 1.3×"),
    ],
)
def test_the_verdict_follows_the_interval_of_the_steps(saved, adamw, rule, verdict):
    """At half the paper's speed-up; two seeds, and an evaluation's width, leave more open than the mean shows."""
    shown = arriving(three_seeds(saved) if len(adamw) == 3 else saved, {ADAMW: adamw, PAPER_RULE: rule}, {})
    (claim,) = claims_grokking(shown)
    assert verdict in claim.verdict
    assert (
        "the claim holds if the whole interval is at 2.5× fewer steps or above, half of the paper's 4.9×"
        in claim.verdict
    )
    assert ("a lower bound" in claim.verdict) == ("at least" in claim.verdict)
    assert "4.9×" in claim.paper


def test_each_weight_decay_is_judged_on_its_own(saved):
    shown = arriving(three_seeds(saved), {ADAMW: (40, 40, 40), PAPER_RULE: (10, 10, 10)}, {})
    for each in shown["result"]["studies"][SHARED]["rows"]:
        if each["label"] in (shared_label(ADAMW, 1.0), shared_label(PAPER_RULE, 1.0)):
            each["curves"][TEST_ACCURACY.name] = [[0.0] * 8] * 3
    (claim,) = claims_grokking(shown)
    assert "Held at weight decay 0.2" in claim.verdict
    assert "Undecided at weight decay 1, where neither reached the target" in claim.verdict


def test_the_tuned_claim_takes_the_gate_that_was_best_in_tuning(saved):
    shown = arriving(saved, {}, {"adamw": (5, 5), "soft": (20, 10), "snr": (15, 20)})
    assert best_gate(shown["result"]["studies"][TUNED]) == "snr"
    (claim,) = claims_grokking(shown)
    assert "AdamW 5 steps (2 of 2)" in claim.equal_tuning
    count = len(searched_gates(shown["result"]["studies"][TUNED]))
    assert f"SNR gate (best of {count} gates, {count} times the trials" in claim.equal_tuning
    assert "18 steps (2 of 2)" in claim.equal_tuning
    assert "fixed in advance" in claim.equal_tuning
    assert "3.5× " in claim.equal_tuning
    assert "more steps" in claim.equal_tuning


def test_the_quick_adamw_stops_at_the_target_and_measures_the_test_pairs():
    from dataclasses import replace

    from poprisk_lab.paper.grokking import quick_adamw as quick

    (run,) = quick.run(quick.SMOKE)["runs"]
    assert [step for step, _ in run["curve"]] == [3, 6]
    assert run["reached"] is None
    table = quick.division_table(quick.SMOKE.task, 0)
    network = quick.ModularTransformer(7, 8, 2, 16, 2)
    right = sum(int(network(row[None, :2]).argmax()) == int(row[2]) for row in table.test)
    assert quick.accuracy(network, table.test) == pytest.approx(right / len(table.test))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quick, "accuracy", lambda network, rows: 0.96)
        assert quick.train(replace(quick.SMOKE, every=2), 0)["reached"] == 2


def test_the_page_says_what_a_sparse_search_missed(tmp_path):
    from poprisk._core.store import save_result
    from poprisk_lab.paper.grokking import numbers
    from poprisk_lab.paper.grokking import quick_adamw as quick

    arm = {"chosen": {"target": None}, "search": {"lr": [3e-6, 1e-2]}, "trials": [{}] * 8}
    study = {"arms": {"adamw": arm}, "task": {"metrics": [{"target": 0.95}]}}
    saved = {"result": {"studies": {numbers.TUNED: study}}}
    assert numbers.section_note(saved, tmp_path) is None
    config = {"lr": 0.01, "weight_decay": 1.0, "beta2": 0.98}
    runs = [{"reached": 1150}, {"reached": None}]
    save_result(tmp_path / "grokking_adamw.json", quick.KIND, config, {"runs": runs})
    words = numbers.section_note(saved, tmp_path)
    assert words is not None
    assert "none of its 8 trials" in words
    assert "reaches 95% after 1,150 steps (1 of 2 seeds" in words
    arm["chosen"]["target"] = 3
    assert numbers.section_note(saved, tmp_path) is None
