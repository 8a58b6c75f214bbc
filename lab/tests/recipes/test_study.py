"""The study of recipes: what is held back, which means are kept, what is measured, and how it is stored."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional

from poprisk.errors import DataError, HyperparameterError
from poprisk.optim import TailAverage
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.held_block import HALF, HELD_ERROR, HELD_LOSS, HeldBlock
from poprisk_lab.engine.stack import Member, Stack
from poprisk_lab.paper.cifar.task import CifarTask
from poprisk_lab.paper.labels.task import LabelTask
from poprisk_lab.paper.pinn.task import PinnTask
from poprisk_lab.paper.teacher.task import TeacherTask
from poprisk_lab.recipes import study
from poprisk_lab.recipes.study_rows import DECAYS, MAIN, ROWS, TAILS, StudyRow
from poprisk_lab.recipes.study_tasks import ManyPassesTask, study_tasks

CPU = torch.device("cpu")
TEACHER = TeacherTask(width=8, steps=30, evaluations=3, train_size=60, test_size=40, batch_size=10)
CIFAR = CifarTask(None, width=2, batch_size=16, epochs=1, evaluations=2, train_size=160)
PINN = PinnTask(
    width=8,
    layers=2,
    interior=160,  # 10% are two batches: this task evaluates its residual on whole batches only
    interior_batch=8,
    sensors=20,
    sensor_batch=4,
    boundary=30,
    boundary_batch=6,
    grid=5,
    steps=4,
    evaluations=2,
)


def member(arm="adamw", seed=0, share=0.0, **given):
    return Member(ARMS[arm], ARMS[arm].hyper(given), seed, share)


def stacked(task, seed=0, scale=1.0):
    """Two members of one seed with different weights."""
    start = task.initial(seed)
    return {name: torch.stack([value, scale * value.roll(1)]) for name, value in start.items()}


def test_the_means_are_those_of_the_library_on_the_same_trajectory():
    stack = Stack(TEACHER, [member(lr=0.05), member(seed=1, lr=0.05)], CPU, tails=TAILS, decays=DECAYS)
    model = nn.ParameterList([nn.Parameter(stack.weights.detach().clone())])
    average = TailAverage(model, torch.optim.SGD(model.parameters(), lr=0.0), tail=TAILS)
    biased = torch.zeros_like(model[0])
    for step in range(1, 31):
        stack._advance()
        with torch.no_grad():
            model[0].copy_(stack.weights)
            biased.mul_(0.999).add_(model[0], alpha=1 - 0.999)
        average.update()
        for i in range(len(TAILS)):
            with average.swapped(i):
                torch.testing.assert_close(stack.means.values[i], model[0].detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(stack.means.values[-1], biased / (1 - 0.999**step), rtol=1e-4, atol=1e-5)
    assert stack.means.names == ("weights", *(f"tail {tail:g}" for tail in TAILS), "ema 0.999")
    assert not torch.allclose(stack.means.values[0], stack.means.values[-2], atol=1e-3)


def test_means_do_not_change_a_training():
    rows = [member(lr=0.01), member("relative", lr=0.01)]
    with_means = Stack(TEACHER, rows, CPU, tails=TAILS, decays=DECAYS).train()
    without = Stack(TEACHER, rows, CPU).train()
    assert torch.equal(with_means.weights, without.weights)
    assert torch.equal(with_means.every["test accuracy"][:, 0], without.metrics["test accuracy"])
    assert with_means.every["test accuracy"].shape == (2, 8, 3)


@pytest.mark.parametrize("task", [TEACHER, CIFAR], ids=["teacher", "mirrored images"])
def test_held_examples_never_appear_in_a_batch(task):
    ((name, (count, size)),) = task.streams.items()
    distinct = count // getattr(task, "copies", 1)
    stack = Stack(task, [member(seed=seed, share=0.2) for seed in (0, 1)] + [member(seed=0)], CPU)
    drawn = [set(), set(), set()]
    for _ in range(3 * (count // size)):
        batch = stack._next_batch(name)[stack._batch_index]
        for seen, row in zip(drawn, batch.tolist(), strict=True):
            seen.update(i % distinct for i in row)
    held = [set(row) for row in stack.held.held[name].tolist()]
    assert [len(block) for block in held] == [round(0.2 * distinct)] * 2
    assert held[0] != held[1]
    for seen, block in zip(drawn, held, strict=False):
        assert not seen & block
        assert seen | block == set(range(distinct))
    assert drawn[2] & held[0]  # a member that holds nothing back trains on them


def test_a_member_without_held_examples_trains_as_it_does_alone():
    together = Stack(TEACHER, [member(lr=0.01), member(lr=0.01, share=0.1)], CPU).train()
    alone = Stack(TEACHER, [member(lr=0.01)], CPU).train()
    torch.testing.assert_close(together.weights[0], alone.weights[0])
    assert not torch.allclose(together.weights[0], together.weights[1])
    assert together.every[HELD_LOSS][0].isnan().all()
    assert together.every[HELD_LOSS][1].isfinite().all()


def test_held_loss_and_error_are_those_of_exactly_the_held_examples():
    stack = Stack(TEACHER, [member(seed=seed, share=0.1, lr=0.01) for seed in (0, 1)], CPU, tails=(0.5,))
    curves = stack.train()
    for place, seed in enumerate((0, 1)):
        data, index = TEACHER.data(seed), stack.held.held["examples"][place]
        for average, matrix in enumerate((stack.weights.detach(), stack.means.values[0])):
            weights = stack.layout.member(matrix[place])
            x = data.inputs[index]
            for i in (1, 2, 3):
                x = functional.linear(x if i == 1 else x.relu(), weights[f"layer{i}.weight"], weights[f"layer{i}.bias"])
            for part, prefix in ((slice(None), ""), (slice(None, None, 2), HALF)):
                loss = functional.cross_entropy(x[part], data.labels[index][part])
                error = (x[part].argmax(1) != data.labels[index][part]).double().mean()
                found = {name: curves.every[prefix + name][place, average, -1] for name in (HELD_LOSS, HELD_ERROR)}
                torch.testing.assert_close(found[HELD_LOSS], loss.double(), rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(found[HELD_ERROR], error, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("task", [TEACHER, LabelTask(noise=0.2, train_size=100, width=8), CIFAR])
def test_errors_on_all_training_examples_are_one_minus_the_training_accuracy(task):
    ((name, (count, _)),) = task.streams.items()
    weights, cohort = stacked(task), task.cohort([0, 0], CPU)
    index = torch.arange(count // getattr(task, "copies", 1)).expand(2, -1)
    torch.testing.assert_close(
        1 - cohort.errors(weights, {name: index}), cohort.measure(weights)["train accuracy"].float()
    )


def test_errors_of_a_language_model_are_counted_per_character():
    task = ManyPassesTask(windows=12, width=8, heads=2, layers=1, context=8, batch_size=4, steps=6, noise=0.3)
    weights = {name: value.unsqueeze(0) for name, value in task.initial(0).items()}
    said = task.network(0)(task.train_windows()[:, :-1]).argmax(-1)
    expected = (said != task.given_targets(0)).float().mean()
    found = task.cohort([0], CPU).errors(weights, {"windows": torch.arange(12).unsqueeze(0)})
    torch.testing.assert_close(found[0], expected)
    assert task.streams == {"windows": (12, 4)}
    assert len({tuple(row) for row in task.train_windows().tolist()}) == 12


@pytest.mark.parametrize("family", study_tasks("", small=True))
def test_the_first_metric_alone_is_the_first_of_all(family):
    task = study_tasks("", small=True)[family][0].task
    weights, cohort = stacked(task), task.cohort([0, 0], CPU)
    name = task.metrics[0].name
    torch.testing.assert_close(cohort.measure_first(weights), cohort.measure(weights)[name])


def test_a_control_follows_the_gate_that_holds_back_the_same_examples():
    given = {name: ARMS["defaults"].hyper({})[name] for name in ("lr", "weight_decay")}
    rows = [member("defaults"), member("defaults", share=0.1), member("gate_schedule", share=0.1, **given)]
    together = Stack(TEACHER, rows, CPU).train()
    alone = Stack(TEACHER, rows[1:], CPU).train()
    torch.testing.assert_close(together.weights[1:], alone.weights)
    with pytest.raises(HyperparameterError, match=r"no such member for seeds \[0\]"):
        Stack(TEACHER, [rows[0], rows[2]], CPU)


def test_a_task_with_several_streams_holds_back_a_share_of_each():
    stack = Stack(PINN, [member(share=0.1, lr=1e-3)], CPU, tails=(0.5,))
    batch = {name: held[:1] for name, held in stack.held.held.items()}
    assert {name: index.shape[1] for name, index in batch.items()} == {
        name: max(2, round(0.1 * count)) for name, (count, _) in PINN.streams.items()
    }
    for name, (count, _) in PINN.streams.items():
        assert sorted([*stack.held.kept[name][0].tolist(), *batch[name][0].tolist()]) == list(range(count))
    curves = stack.train()
    expected = stack.cohort.losses(
        stack.layout.views(stack.weights.detach()), {name: index[:, ::2] for name, index in batch.items()}
    )
    torch.testing.assert_close(curves.every[HALF + HELD_LOSS][0, 0, -1], expected[0].double().detach())
    assert HELD_ERROR not in curves.every


def test_shares_that_cannot_be_held_back_are_refused():
    with pytest.raises(HyperparameterError, match="between 0 and 1"):
        HeldBlock(TEACHER, [0], 1.0, CPU)
    with pytest.raises(HyperparameterError, match="less than a batch"):
        HeldBlock(TEACHER, [0], 0.9, CPU)
    with pytest.raises(HyperparameterError, match="one share"):
        Stack(TEACHER, [member(share=0.1), member(share=0.2)], CPU)


def test_every_row_can_be_trained_and_is_named_once():
    for rows in ROWS.values():
        keys = [json.dumps(study._key(row, [0])) for row in rows]
        assert len(set(keys)) == len(keys)
        assert {("adamw", 1e-3, 0.05), ("adamw", 1e-3, 0.0)} <= {(r.name, r.hyper["lr"], r.share) for r in rows}
        for row in rows:
            assert row.shown.items() <= row.hyper.items()
    assert StudyRow("literal").shown == {"lr": 0.06, "weight_decay": 5e-3, "strength": 100.0}


def test_the_tasks_have_the_sizes_of_the_stored_results():
    families = study_tasks("data")
    steps = {one.task.name: one.task.steps for own in families.values() for one in own}
    sizes = {"digits-20": 1500, "fashion-0": 3000, "teacher_40": 2000, "lorenz_noise0.1": 10_000, "char_noisy": 2000}
    assert sizes.items() <= steps.items()
    assert {"inr_astronaut": 3000, "cifar10-worse": 4680, "char_25_passes": 3125}.items() <= steps.items()
    clean = {one.task.name for own in families.values() for one in own if one.clean}
    assert {"digits-0", "teacher_clean", "lorenz_noise0", "inr_astronaut_clean", "cifar10-clean"} <= clean
    assert not clean & {"digits-20", "teacher_20", "lorenz_noise0.1", "inr_astronaut", "char_noisy", "cifar10-worse"}


def test_a_study_is_stored_and_continues(tmp_path, capsys):
    path, wanted = (
        tmp_path / "study.json.gz",
        ["--smoke", "--tasks", "teacher_20", "cifar10-worse", "--seeds", "3", "4"],
    )
    study.main([*wanted, "--output", str(path)])
    found = study.load(path)
    task = found["tasks"]["teacher_20"]
    assert (task["metric"], task["higher_is_better"], task["clean"]) == ("test accuracy", True, False)
    assert len(task["rows"]) == len(ROWS["all"])
    assert {"rm3", "sam", "shuffled_gate", "schedule_free", "literal", "half_open"} <= {r["arm"] for r in task["rows"]}
    for row in task["rows"]:
        shape = (2, len(row["averages"]), len(task["evaluation_steps"]))
        held = ("held_loss", "held_error", "half_held_loss", "half_held_error")
        for values in (row["curves"]["test accuracy"], *(row[name] for name in held if row["share"])):
            assert torch.tensor(values).shape == shape
        assert row["share"] or not set(held) & set(row)
    assert "in" in capsys.readouterr().out
    study.main([*wanted, "--output", str(path)])
    assert not capsys.readouterr().out  # nothing is trained again
    assert study.load(path)["tasks"] == found["tasks"]
    merged = tmp_path / "merged.json"
    study.main(["--merge", str(path), "--output", str(merged)])
    assert study.load(merged)["tasks"] == found["tasks"]


def test_a_stack_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    def train(one, rows, seeds, device, ours=study.train_stack):
        if rows[0].stack != MAIN:
            raise RuntimeError("the graph cannot be captured")
        return ours(one, rows[:2], seeds, device)

    monkeypatch.setattr(study, "train_stack", train)
    study.main(["--smoke", "--tasks", "teacher_20", "--seeds", "0", "--output", str(tmp_path / "study.json")])
    assert len(study.load(tmp_path / "study.json")["tasks"]["teacher_20"]["rows"]) == 2
    assert "'peers' are missing" in capsys.readouterr().out


def test_what_is_not_a_study_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"kind": "labels"}', encoding="utf-8")
    with pytest.raises(DataError, match="recipe_study"):
        study.load(tmp_path / "other.json")
    with pytest.raises(HyperparameterError, match="there is no task 'weather'"):
        study.chosen_tasks(["weather"], "data")


def test_the_relative_gate_moves_at_adamws_pace():
    """Its literal twin hardly moves at that learning rate."""
    rows = [member("adamw", lr=1e-3), member("relative", lr=1e-3), member("snr", lr=1e-3, strength=100.0)]
    rows.sort(key=lambda row: list(ARMS).index(row.arm.name))
    stack = Stack(TEACHER, rows, CPU)
    before = stack.weights.detach().clone()
    curves = stack.train()
    moved = dict(zip((row.arm.name for row in rows), (curves.weights - before).norm(dim=1), strict=True))
    assert moved["relative"] > 0.1 * moved["adamw"]
    assert moved["snr"] < 0.1 * moved["relative"]


@pytest.mark.gpu
@pytest.mark.timeout(400)  # the rules are compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler itself
def test_means_and_held_examples_are_the_same_on_a_gpu():
    rows = [member(seed=seed, share=share, lr=0.01) for seed in (0, 1) for share in (0.0, 0.1)]
    rows += [member("relative", share=0.1, lr=0.01)]
    on_cpu, on_gpu = (
        Stack(TEACHER, rows, torch.device(device), tails=TAILS, decays=DECAYS, first_only=True).train()
        for device in ("cpu", "cuda")
    )
    torch.testing.assert_close(on_gpu.weights.cpu(), on_cpu.weights, atol=2e-3, rtol=2e-3)
    for name in (HELD_LOSS, HALF + HELD_LOSS):
        torch.testing.assert_close(on_gpu.every[name], on_cpu.every[name], atol=5e-3, rtol=5e-3, equal_nan=True)
