"""Labels of a teacher network: stacked members against one plain network each, the data, the study and its figure."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from poprisk.errors import HyperparameterError
from poprisk_lab.engine.arms import ALL_ARMS
from poprisk_lab.paper.teacher.numbers import claims as claims_teacher
from poprisk_lab.paper.teacher.numbers import lines as teacher_lines
from poprisk_lab.paper.teacher.study import SETTINGS, TeacherConfig
from poprisk_lab.paper.teacher.task import MEMORIZED, TEST_ACCURACY, TRAIN_ACCURACY, TeacherTask

CPU = torch.device("cpu")
TASK = TeacherTask(
    noise=0.25, dimension=6, teacher_width=5, classes=4, train_size=40, test_size=33, width=7, batch_size=8, steps=5
)
SEEDS = (3, 1, 3)


def _stacked() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    members = [TASK.initial(seed) for seed in SEEDS]
    stacked = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    return {name: x + 0.2 * torch.randn(x.shape, generator=generator) for name, x in stacked.items()}


def _student(weights: dict[str, torch.Tensor], member: int) -> nn.Sequential:
    """The same network as a module."""
    student = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 7), nn.ReLU(), nn.Linear(7, 4))
    with torch.no_grad():
        for i, layer in enumerate((layer for layer in student if isinstance(layer, nn.Linear)), start=1):
            layer.weight.copy_(weights[f"layer{i}.weight"][member])
            layer.bias.copy_(weights[f"layer{i}.bias"][member])
    return student


def _batch() -> dict[str, torch.Tensor]:
    return {"examples": torch.randint(40, (len(SEEDS), 8), generator=torch.Generator().manual_seed(2))}


def test_each_member_is_a_plain_network() -> None:
    weights, batch = _stacked(), _batch()
    losses = TASK.cohort(SEEDS, CPU).losses(weights, batch)
    for k, seed in enumerate(SEEDS):
        data, index = TASK.data(seed), batch["examples"][k]
        expected = F.cross_entropy(_student(weights, k)(data.inputs[index]), data.labels[index])
        assert_close(losses[k], expected, rtol=1e-6, atol=1e-6)


def test_members_do_not_mix() -> None:
    weights = {name: x.requires_grad_() for name, x in _stacked().items()}
    TASK.cohort(SEEDS, CPU).losses(weights, _batch())[1].backward()
    for x in weights.values():
        assert x.grad is not None
        assert x.grad[[0, 2]].count_nonzero() == 0
        assert x.grad[1].count_nonzero() > 0


def test_measures(monkeypatch) -> None:
    """Test points with the teacher's labels, training points with those given; in one piece or several."""
    weights, cohort = _stacked(), TASK.cohort(SEEDS, CPU)
    measured = cohort.measure(weights)
    for k, seed in enumerate(SEEDS):
        data, student = TASK.data(seed), _student(weights, k)
        fitted = student(data.inputs).argmax(1) == data.labels
        right = student(data.test_inputs).argmax(1) == data.test_labels
        assert_close(measured[TEST_ACCURACY][k], right.float().mean())
        assert_close(measured[TRAIN_ACCURACY][k], fitted.float().mean())
        assert_close(measured[MEMORIZED][k], fitted[data.wrong].float().mean())
    monkeypatch.setattr("poprisk_lab.paper.teacher.task._EXAMPLES_AT_ONCE", 30)
    for name, values in cohort.measure(weights).items():
        assert torch.equal(values, measured[name])


def test_data_of_a_seed() -> None:
    """The share of wrong labels is exact, noise moves nothing else, and no class takes most of the inputs."""
    noisy, clean = TeacherTask(noise=0.4).data(0), TeacherTask(noise=0.0).data(0)
    assert noisy.wrong.sum() == 800
    assert torch.equal(noisy.labels != clean.labels, noisy.wrong)
    assert torch.equal(noisy.inputs, clean.inputs)
    assert torch.equal(noisy.test_labels, clean.test_labels)
    assert clean.labels.bincount(minlength=10).max() < 0.25 * len(clean.labels)
    assert not torch.equal(noisy.inputs, TeacherTask(noise=0.4).data(1).inputs)


def test_a_clean_task_has_nothing_to_memorize() -> None:
    clean = replace(TASK, noise=0.0)
    assert [metric.name for metric in clean.metrics] == [TEST_ACCURACY, TRAIN_ACCURACY]
    assert set(clean.cohort(SEEDS, CPU).measure(_stacked())) == {TEST_ACCURACY, TRAIN_ACCURACY}
    assert (clean.name, TASK.name, TeacherTask(noise=0.2).name) == ("teacher_clean", "teacher_25", "teacher_20")


@pytest.mark.parametrize(
    ("wrong", "message"), [({"noise": -0.1}, "noise must lie"), ({"classes": 1}, "classes"), ({"width": 0}, "sizes")]
)
def test_bad_sizes_are_refused(wrong, message) -> None:
    with pytest.raises(HyperparameterError, match=message):
        TeacherTask(**wrong)


def test_the_smoke_study_runs_and_is_shown(smoke_result) -> None:
    """Every arm and setting on every share of wrong labels, stored, read back, with a verdict each."""
    saved = smoke_result("teacher")
    studies = saved["result"]["studies"]
    assert list(studies) == ["teacher_clean", "teacher_40"]
    for study in studies.values():
        labels = {row["label"] for row in study["rows"]}
        assert {setting.label for setting in SETTINGS} <= labels
        assert set(study["arms"]) == set(ALL_ARMS)
    assert len(claims_teacher(saved)) == len(studies)
    assert len(list(teacher_lines(saved))) == 2 * len(studies) + 1
    for study in studies.values():  # a page without any search: the given AdamW is compared with, and it is said
        study["arms"], study["rows"] = {}, [row for row in study["rows"] if not row["chosen_for"]]
    assert all("chosen in its favour" in claim.verdict for claim in claims_teacher(saved))
    assert len(list(teacher_lines(saved))) == 2 * len(studies) + 1


def test_seeds_must_be_fresh() -> None:
    with pytest.raises(HyperparameterError, match="must not meet, got 3"):
        TeacherConfig(tuning_seeds=(3,), report_seeds=(3, 4))
    with pytest.raises(HyperparameterError, match="one entry each"):
        TeacherConfig(noises=())
