"""The settings that hold ``population_risk`` to the truth, and the page made of them."""

import json
from pathlib import Path

import pytest

from poprisk._core.store.envelope import load_result
from poprisk.errors import DataError
from poprisk_lab.pages.registry import chosen_pages
from poprisk_lab.paper.risk_honesty import study as experiment
from poprisk_lab.paper.risk_honesty.figure import draw
from poprisk_lab.paper.risk_honesty.numbers import KIND

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("honesty")
    return folder, experiment.run(experiment.SMOKE, folder, progress=lambda _: None)


def test_every_setting_has_the_truth_and_every_estimator(smoke):
    _, rows = smoke
    assert len(rows) == 4
    for row in rows:
        assert {"exclusion", "first_order", "k_fold", "holdout", "takeuchi"} <= set(row["estimates"])
        assert row["truth"] > 0
        assert row["truth_error"] < 0.05 * row["truth"]
        assert row["estimates"]["k_fold"]["valid"]
    json.dumps(rows)


def test_what_was_stored_is_read_and_not_made_again(smoke, monkeypatch):
    folder, rows = smoke

    def never(*_):
        raise AssertionError("it was made already")

    monkeypatch.setattr(experiment, "run_setting", never)
    assert experiment.run(experiment.SMOKE, folder, progress=lambda _: None) == json.loads(json.dumps(rows))
    other = experiment.HonestyConfig(tasks=experiment.SMOKE.tasks, seeds=(0,), steps=(7,))
    with pytest.raises(DataError, match="another configuration"):
        experiment.run(other, folder, progress=lambda _: None)


def test_summary_counts_what_it_says():
    found = {"value": 1.0, "standard_error": 0.1, "valid": True, "reason": ""}
    far = {**found, "value": 2.0}
    rows = [
        {"task": "a", "seed": 0, "step": k, "truth": 1.1, "evidence": -1.0, "disparity": 1.0,
         "estimates": {"exclusion": e, "k_fold": found, "holdout": found}}
        for k, e in ((1, found), (2, {**far, "valid": False}), (3, far))
    ]  # fmt: skip
    columns = experiment.summarize(rows)["columns"]
    assert columns["exclusion"]["valid"] == 2
    assert columns["exclusion"]["covered"] == 1
    assert columns["exclusion"]["off by more than 20%"] == 2
    assert columns["exclusion"]["off by more than 20%, believed"] == 1
    assert columns["auto, 10 trainings"]["valid"] == 3


def test_the_page_is_what_the_result_says():
    saved = load_result(ROOT / "results/risk_honesty.json", KIND)
    [page] = chosen_pages(["docs/population_risk.md"])
    assert not page.is_stale(ROOT / "results")
    scatter, curve = draw(saved).axes
    assert len(scatter.get_lines()) >= 5
    assert scatter.get_xlabel()
    assert curve.get_ylabel()


def test_the_stored_settings_meet_what_is_promised():
    """The promise of the documentation: believed means covered, and first order is never believed when far off."""
    rows = load_result(ROOT / "results/risk_honesty.json", KIND)["result"]["rows"]
    summary = experiment.summarize(rows)
    columns = summary["columns"]
    assert summary["settings"] >= 60
    for name in ("exclusion", "first_order", "k_fold", "auto, 10 trainings"):
        assert columns[name]["coverage"] >= 0.9
    assert columns["first_order"]["off by more than 20%, believed"] == 0
    assert columns["auto, 10 trainings"]["valid"] == summary["settings"]
