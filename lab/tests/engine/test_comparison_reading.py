"""Reading a stored study, on one small enough to check by eye."""

import math
from typing import Any

import pytest

from poprisk.errors import DataError
from poprisk_lab.engine import reading


def _row(label: str, arm: str, chosen_for: list[str], curves: list[list[float | None]], failures: int = 0) -> Any:
    stored = {"loss": curves, "accuracy": [[1.0] * len(values) for values in curves]}
    return {"label": label, "arm": arm, "chosen_for": chosen_for, "curves": stored, "failures": failures}


STUDY: dict[str, Any] = {
    "task": {
        "metrics": [
            {"name": "loss", "higher_is_better": False, "target": 0.5, "spec": ".2f"},
            {"name": "accuracy", "higher_is_better": True, "target": None, "spec": ".3f"},
        ]
    },
    "evaluation_steps": [10, 20, 30],
    "arms": {"adamw": {"trials": [{"curve": [[1.0, 0.5, 0.4], [1.0, None, None]]}, {"curve": [[0.9, 0.8, 0.7]]}]}},
    "rows": [
        _row("AdamW, lr 1e-3", "adamw", [], [[0.9, 0.8, 0.7]]),
        _row("AdamW", "adamw", ["last"], [[0.8, 0.3, 0.5], [0.5, 0.5, 0.6]]),
        _row("AdamW", "adamw", ["best", "target"], [[0.4, 0.6, None], [None, None, None]], failures=2),
    ],
}


def test_a_searched_row_is_found_by_arm_or_label_and_question() -> None:
    """The arm's name means what its search chose, not the setting that uses the arm and comes first."""
    assert reading.row(STUDY, "adamw") is STUDY["rows"][1]
    assert reading.row(STUDY, "AdamW") is STUDY["rows"][1]
    assert reading.row(STUDY, "adamw", "best") is STUDY["rows"][2]
    assert reading.row(STUDY, "AdamW, lr 1e-3", "target") is STUDY["rows"][0]
    assert reading.rows(STUDY) == STUDY["rows"]


def test_a_missing_row_is_refused_with_the_rows_there_are() -> None:
    with pytest.raises(DataError, match=r"no row 'soft' chosen for 'last'.*'AdamW, lr 1e-3' \(given\), 'AdamW' \(last"):
        reading.row(STUDY, "soft")
    assert reading.find_row(STUDY, "soft") is None


def test_last_and_best_of_each_seed() -> None:
    tuned = reading.row(STUDY, "adamw")
    assert reading.final(tuned, "loss") == [0.5, 0.6]
    assert reading.best(tuned, "loss", higher_is_better=False) == [0.3, 0.5]
    assert reading.best(tuned, "loss", higher_is_better=True) == [0.8, 0.6]
    assert reading.best_step(STUDY, tuned, "loss") == [20, 10]


def test_a_diverged_member_has_no_last_value_but_the_best_it_had() -> None:
    diverged = reading.row(STUDY, "adamw", "best")
    assert all(math.isnan(value) for value in reading.final(diverged, "loss"))
    first, second = reading.best(diverged, "loss", higher_is_better=False)
    assert first == 0.4
    assert math.isnan(second)
    assert reading.best_step(STUDY, diverged, "loss") == [10, None]
    assert reading.failed(diverged) == 2


def test_the_oracle_stops_the_trial_chosen_for_its_best() -> None:
    first, second = reading.oracle(STUDY)
    assert first == 0.4
    assert math.isnan(second)
    without = STUDY | {"rows": STUDY["rows"][:2]}
    assert reading.oracle(without) == [0.3, 0.5]
    assert reading.oracle(without, metric="accuracy") == [1.0, 1.0]


def test_time_to_target() -> None:
    """At the target counts as reached; a seed that never is has no time."""
    assert reading.steps_to(STUDY, reading.row(STUDY, "adamw"), "loss") == [20, 10]
    assert reading.reached(STUDY, reading.row(STUDY, "adamw", "best"), "loss") == "1 of 2"
    assert reading.reached(STUDY, reading.row(STUDY, "AdamW, lr 1e-3"), "loss") == "0 of 1"
    with pytest.raises(DataError, match="'accuracy' has no target"):
        reading.steps_to(STUDY, reading.row(STUDY, "adamw"), "accuracy")


def test_trials_and_metrics() -> None:
    finals = reading.trial_finals(STUDY, "adamw")
    assert finals[0][0] == 0.4
    assert math.isnan(finals[0][1])
    assert finals[1] == [0.7]
    assert reading.primary(STUDY)["name"] == "loss"
    for refused in (
        lambda: reading.trial_finals(STUDY, "soft"),
        lambda: reading.curve(STUDY["rows"][0], "error"),
        lambda: reading.metric_named(STUDY, "error"),
    ):
        with pytest.raises(DataError, match=r"it (searched|has|measured)"):
            refused()
