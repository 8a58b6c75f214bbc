"""The authors' package setting on the page of verdicts: beside AdamW at the same settings, or said to be missing."""

from poprisk_lab.engine.package_setting import package_settings
from poprisk_lab.engine.study import Setting
from poprisk_lab.pages.package_table import NOT_MEASURED, package_slots

SHARED = {"lr": 1e-3, "weight_decay": 0.01, "beta2": 0.999}
METRIC = {"name": "accuracy", "higher_is_better": True, "target": None, "spec": ".2f"}


def _study(settings):
    rows = [
        {"label": s.label, "arm": s.arm, "hyper": dict(s.hyper), "chosen_for": [], "curves": {"accuracy": [[value]]}}
        for s, value in settings
    ]
    return {"task": {"metrics": [METRIC]}, "rows": rows}


def test_rows_are_beside_adamw_and_the_papers_rule_at_the_same_settings():
    element, tensor = package_settings(SHARED)
    other = Setting("other lr", "adamw", SHARED | {"lr": 1e-2})
    paper = Setting("paper", "soft", SHARED | {"alpha": 1.0, "strength": 1.0, "rho": 0.99})
    adamw = Setting("AdamW", "adamw", SHARED)
    given = package_slots([("one", _study([(other, 0.1), (adamw, 0.5), (paper, 0.6), (element, 0.7), (tensor, 0.8)]))])
    assert "| one | accuracy | 0.001 | 0.01 | 0.50 | 0.60 | 0.70 | 0.80 |" in given["table"]
    assert given["missing"] == []


def test_what_was_not_measured_is_said():
    element, _ = package_settings(SHARED)
    half = package_slots([("one", _study([(element, 0.7)])), ("two", _study([]))])
    assert f"| {NOT_MEASURED} | {NOT_MEASURED} | 0.70 | {NOT_MEASURED} |" in half["table"]
    assert half["missing"] == ["two"]
    assert package_slots([("two", _study([]))])["table"] == ""
