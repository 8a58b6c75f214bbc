"""Completing a stored comparison: what it has is kept as it is, what it lacks is trained, and nothing else."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from poprisk_lab.engine.ledger import RowLedger
from poprisk_lab.engine.package_setting import PACKAGE, PACKAGE_PER_TENSOR, package_rows, package_settings
from poprisk_lab.engine.study import Setting, Study, run_study
from poprisk_lab.missing_rows import COMPARISONS, StoredRows, complete, is_same_task, main, missing
from poprisk_lab.paper.teacher.task import TeacherTask

TASK = TeacherTask(dimension=4, train_size=20, test_size=20, width=4, batch_size=5, steps=4, evaluations=2)
OLD = Study(
    TASK,
    arms=("adamw", "msvag"),
    settings=(Setting("AdamW, lr 1e-3", "adamw", {"lr": 1e-3}),),
    trials=2,
    tuning_seeds=(100,),
    report_seeds=(0, 1),
)
NEW = replace(OLD, settings=(*OLD.settings, *package_settings({"lr": 1e-3})), trials=4)
CPU = torch.device("cpu")
MARK = 0.123
"""A value that no training gives: where it is found, the row was taken from the stored result."""


def _run(study: Study):
    return json.loads(json.dumps(run_study(study, CPU, lambda words: None, RowLedger(None))))


@pytest.fixture(scope="module")
def saved():
    return {
        "kind": "teacher",
        "created": "then",
        "config": {"tuning_seeds": [100]},
        "environment": {"gpu": None},
        "result": {"studies": {TASK.name: _run(OLD)}},
    }


def _marked(saved):
    found = copy.deepcopy(saved)
    study = found["result"]["studies"][TASK.name]
    metric = study["task"]["metrics"][0]["name"]
    next(row for row in study["rows"] if not row["chosen_for"])["curves"][metric][0][-1] = MARK
    study["arms"]["msvag"]["trials"][1]["curve"][0][0] = MARK
    return found


def test_what_a_result_lacks_is_counted(saved):
    studies = saved["result"]["studies"]
    assert missing(studies, [OLD], (100,)) == []
    (found,) = missing(studies, [NEW], (100,))
    assert found.trials == 2 * 2
    assert list(found.settings) == [setting.label for setting in package_settings({"lr": 1e-3})]
    assert "4 trials" in found.words


def test_what_is_stored_is_kept_and_the_rest_is_that_of_a_whole_run(saved):
    marked = _marked(saved)
    lacking = missing(marked["result"]["studies"], [NEW], (100,))
    made = complete(marked, lacking, CPU, None)["studies"][TASK.name]
    whole = _run(NEW)
    metric = made["task"]["metrics"][0]["name"]
    assert next(row for row in made["rows"] if row["label"] == "AdamW, lr 1e-3")["curves"][metric][0][-1] == MARK
    assert made["arms"]["msvag"]["trials"][1]["curve"][0][0] == MARK
    assert [row["label"] for row in made["rows"]][:4] == [row["label"] for row in whole["rows"]][:4]
    for label in (PACKAGE, PACKAGE_PER_TENSOR):
        (ours,), (theirs,) = package_rows(made, label), package_rows(whole, label)
        for a, b in zip(ours["curves"][metric], theirs["curves"][metric], strict=True):
            assert a == pytest.approx(b)
    for name, arm in whole["arms"].items():
        assert [t["hyper"] for t in arm["trials"]] == [t["hyper"] for t in made["arms"][name]["trials"]]


def test_rows_of_another_device_or_task_are_not_used(saved):
    marked = _marked(saved)
    marked["environment"]["gpu"] = "some GPU"
    made = complete(marked, missing(marked["result"]["studies"], [NEW], (100,)), CPU, None)["studies"][TASK.name]
    assert str(MARK) not in json.dumps(made)
    longer = replace(NEW, task=replace(TASK, steps=6))
    assert not is_same_task(longer, saved["result"]["studies"][TASK.name])
    (found,) = missing(saved["result"]["studies"], [longer], (100,))
    assert found.stored is None
    assert found.trials == 8


def test_a_control_needs_the_stored_defaults_it_followed(saved):
    stored = copy.deepcopy(saved["result"]["studies"][TASK.name])
    asked = {"hyper": {}, "seeds": [0], "rule": {"rule": "adamw"}, "device": "cpu"}
    ledger = StoredRows(stored, "cpu", (100,))
    assert ledger.find({**asked, "followed": {"hyper": {"lr": 5.0}}}) is None


def test_the_package_setting_is_missing_where_it_was_not_measured(saved):
    assert package_rows(saved["result"]["studies"][TASK.name], PACKAGE) == []


def test_the_command_names_what_it_knows(tmp_path, capsys):
    assert main(["nothing", "--results", str(tmp_path)]) == 1
    assert ", ".join(COMPARISONS) in capsys.readouterr().err
    assert main(["teacher", "--results", str(tmp_path)]) == 1
    assert "poprisk_lab.results teacher" in capsys.readouterr().err


def test_the_plan_of_the_stored_results_is_read_without_training(capsys):
    assert main(["lorenz", "--plan"]) == 0
    assert "lorenz" in capsys.readouterr().out


def test_a_stored_file_is_completed_in_place_and_can_be_completed_once(tmp_path, monkeypatch, capsys):
    from poprisk._core.store import load_result
    from poprisk_lab import missing_rows
    from poprisk_lab.paper.teacher import study as teacher

    config = replace(teacher.SMOKE, student=TASK, noises=(0.0,), arms=("adamw",), report_seeds=(0, 1))
    monkeypatch.setattr(missing_rows, "_configured", lambda module, data: config)
    before = teacher.run(config, None)
    studies = json.loads(json.dumps(before.studies))
    for study in studies.values():
        study["rows"] = [row for row in study["rows"] if row not in package_rows(study, PACKAGE)]
    replace(before, studies=studies).save(tmp_path / "teacher.json")
    assert main(["teacher", "--results", str(tmp_path)]) == 0
    made = load_result(tmp_path / "teacher.json", "teacher")["result"]
    ((name, study),) = made["studies"].items()
    assert [row["label"] for row in study["rows"]] == [row["label"] for row in before.studies[name]["rows"]]
    assert made["earlier"][0]["studies"] == [name]
    capsys.readouterr()
    assert main(["teacher", "--results", str(tmp_path)]) == 0
    assert "complete" in capsys.readouterr().out
