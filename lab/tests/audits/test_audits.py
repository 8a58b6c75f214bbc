"""The study of label audits: its settings, its rows, and the bars that the stored result must pass."""

import json

import pytest
import torch

from poprisk._core.store import load_result
from poprisk_lab.audits import study
from poprisk_lab.audits.numbers import slots
from poprisk_lab.audits.task import KINDS, SOURCES, Setting, draw_settings, labelled
from poprisk_lab.results import RESULTS

WINE = Setting("wine", 178, "uniform", 0.2, "mlp", 32, "sgd", 0.03, 10, 7)


@pytest.fixture(scope="module")
def saved():
    return load_result(RESULTS / "audits.json", study.KIND)


def test_the_stored_audits_pass(saved):
    """93% of the valid counts are covered, and 90% of the rankings are at or above last loss and AUM."""
    free = [row for row in saved["result"]["rows"] if not row["budget"]]
    found = study.summarize(free)
    assert found == saved["result"]["free"]
    assert found["audits"] >= 100
    assert found["covered"] >= 0.93 * found["valid"]
    assert found["confidently_wrong"] <= 0.01 * found["valid"]
    assert found["at_or_above"] >= 0.9 * found["ranked"]
    assert {row["setting"]["kind"] for row in free} == set(KINDS)
    assert {row["setting"]["source"] for row in free} == set(SOURCES)


def test_no_reported_setting_set_a_limit(saved):
    tuned = {setting.seed for setting in draw_settings(50, 1)}
    assert not tuned & {row["setting"]["seed"] for row in saved["result"]["rows"]}
    drawn = {setting.seed for setting, _ in study.planned(study.AuditConfig())}
    assert drawn == {row["setting"]["seed"] for row in saved["result"]["rows"]}


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_wrong_as_they_are_said_to_be(kind):
    data = labelled(Setting("digits", 600, kind, 0.2, "mlp", 32, "sgd", 0.1, 10, 7), "nowhere")
    wrong, classes = data.wrong, data.given[data.wrong]
    assert len(data.test_true) == 1797 - 600
    if kind == "one class":
        assert len(data.true[wrong].unique()) == len(classes.unique()) == 1
    else:
        assert abs(float(wrong.double().mean()) - 0.2) < 0.05
    if kind == "class-dependent":
        torch.testing.assert_close(classes, (data.true[wrong] + 1) % 10)


def test_a_row_and_its_resumption(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "planned", lambda config: iter([(WINE, {"folds": True})]))
    rows = study.run_study(study.SMOKE, "nowhere", tmp_path / "rows")
    assert rows == [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert rows[0]["wrong"] > 20
    assert rows[0]["auc"]["suspicion"] > 0.9
    monkeypatch.setattr(study, "audit_row", None)
    assert study.run_study(study.SMOKE, "nowhere", tmp_path / "rows") == rows
    page = slots({"config": {}, "result": {"rows": rows}})
    assert page["total"]["audits"] == 1
    assert page["folds"]["number"] == 1


def test_areas():
    assert study.area(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, False, False])) == 0.75
    assert study.area(torch.ones(3), torch.zeros(3, dtype=torch.bool)) is None
    assert study.covered({"value": 5.0, "standard_error": 2.0}, 9)
    assert not study.covered({"value": None, "standard_error": None}, 9)
