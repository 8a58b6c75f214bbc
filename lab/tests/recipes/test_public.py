"""The small tasks by the library's public functions: data and weights of the study, and what the page says of them."""

import json
from statistics import mean

import pytest
import torch
from torch.testing import assert_close

from poprisk_lab.paper.teacher.task import TeacherTask
from poprisk_lab.recipes import public
from poprisk_lab.recipes.public_numbers import public_slots
from poprisk_lab.recipes.stored_tasks import StoredTask
from poprisk_lab.recipes.study_tasks import study_tasks


@pytest.mark.parametrize("family", ["digits", "teacher", "lorenz"])
def test_the_plain_network_is_that_of_the_study(family):
    """At the initial weights both measure the same test metric."""
    task = study_tasks("", small=True)[family][1].task
    one = public.plain(task, seed=1)
    cohort = task.cohort([1], torch.device("cpu"))
    weights = {name: each[None] for name, each in task.initial(1).items()}
    assert_close(one.measure(one.make()), cohort.measure_first(weights).item(), atol=1e-6, rtol=1e-5)


def test_batches_are_passes_over_shuffled_examples():
    x = torch.arange(10.0)[:, None]
    found = [a.flatten().tolist() for a, _ in public.batches((x, x), 5, 5, seed=0)]
    assert len(found) == 5
    assert sorted(found[0] + found[1]) == sorted(found[2] + found[3]) == x.flatten().tolist()
    assert found[0] != found[2]


def test_a_file_is_continued_and_judged(tmp_path):
    path = tmp_path / "recipe_public.json"
    options = ["--output", str(path), "--small", "--families", "teacher", "--only", "teacher_20"]
    public.main([*options, "--seeds", "1", "--no-swap"])
    first = json.loads(path.read_text())["tasks"]["teacher_20"]["rows"]
    public.main([*options, "--seeds", "2"])
    rows = json.loads(path.read_text())["tasks"]["teacher_20"]["rows"]
    assert rows["kept/0"] == first["kept/0"]
    assert len([name for name in rows if name.startswith("swap/")]) == 4 * 3 * 2
    values = [rows[f"kept/{seed}"]["kept"] for seed in range(2)]
    task = StoredTask("teacher_20", "test accuracy", True, False, (), dict(enumerate(values)), dict(enumerate(values)))
    slots = public_slots(tmp_path, [task])
    assert slots is not None
    assert f"**{100 * mean(values):.1f}%**" in slots["table"]
    assert slots["noisy"]["tasks"] == slots["noisy"]["kept_at_best"] == 1
    assert slots["swap"]["pairs"] == 9


def test_nothing_is_said_where_nothing_is_stored(tmp_path):
    assert public_slots(tmp_path, []) is None


def test_refit_trains_as_many_passes_as_were_chosen():
    one = public.plain(TeacherTask(train_size=100, test_size=50, width=8, batch_size=10, steps=30), seed=0)
    found = public.kept_and_refit(one, seed=0)
    assert found["refit_steps"] == round(found["step"] * 100 / 95)
