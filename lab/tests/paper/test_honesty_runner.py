"""The honesty study at small size: what is asked, stored and taken up again, and how answers are judged."""

import json
import math
import time
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch

from poprisk import cluster, population_risk
from poprisk._core.store.envelope import load_result
from poprisk.errors import JobError
from poprisk_lab.paper.risk_honesty import judging, methods
from poprisk_lab.paper.risk_honesty import study as runner
from poprisk_lab.paper.risk_honesty.design import settings
from poprisk_lab.paper.risk_honesty.judging import KIND, judge, summarize
from poprisk_lab.paper.risk_honesty.on_cluster import settings_on_cluster

QUICK = ("tune 004", "tune 025", "tune 051", "tune 070", "tune 108")
"""Settings that take little time: linear models and small networks, one of them with a held-back block."""


def one(name):
    [setting] = [s for s in settings("tune") if s.name.startswith(name)]
    return setting


@cache
def stored(folder):
    for name in QUICK:
        runner.run_setting(one(name), runner.chosen_methods(()), Path(folder))
    return runner.lines_of(Path(folder), "tune")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("honesty")


def answer(value: float | None = 1.0, error: float | None = 0.1, valid=True, **more):
    return {"value": value, "standard_error": error, "valid": valid, "reason": "", **more}


def judged(*answers, truth=1.0, error=0.0, kept=None, model="relu", method="auto"):
    return [
        {
            "name": f"s{i}",
            "factors": {"model": model},
            "truth": {"value": truth, "error": error, "kept": kept},
            "answers": {method: each},
        }
        for i, each in enumerate(answers)
    ]


def test_every_answer_is_a_line_and_no_quick_setting_is_valid_and_wrong(folder):
    rows = stored(folder)
    assert all({"setting", "method", "seconds", "commit"} <= set(row) for row in rows)
    by_setting = {name: {r["method"] for r in rows if r["setting"].startswith(name)} for name in QUICK}
    for name, found in by_setting.items():
        assert {"truth", "auto", "auto10", "k_fold", "exclusion", "first_order", "holdout"} <= found, name
        assert ("held_back" in found) == (name == "tune 108")
    result = runner.condensed(Path(folder))["tune"]
    assert len(result["settings"]) == len(QUICK)
    for name, found in result["summary"]["methods"].items():
        if name in methods.JUDGED:
            assert found["wrong_settings"] == [], name
    assert result["summary"]["methods"]["auto"]["valid"] >= 2


def test_what_is_stored_is_not_made_again_and_a_broken_line_is(folder, tmp_path, monkeypatch):
    lines = [row for row in stored(folder) if row["setting"].startswith("tune 004")]
    text = [json.dumps(row) for row in lines]
    (tmp_path / "tune.jsonl").write_text("\n".join([*text[:-1], text[-1][:20]]) + "\n")
    made = []
    real = runner._store
    monkeypatch.setattr(runner, "_store", lambda path, about, *a: made.append(about["method"]) or real(path, about, *a))
    assert runner.run_setting(one("tune 004"), runner.chosen_methods(()), tmp_path) == 1
    assert made == [lines[-1]["method"]]
    monkeypatch.setattr(type(one("tune 004")), "run", lambda _: pytest.fail("it was made already"))
    assert runner.run_setting(one("tune 004"), runner.chosen_methods(()), tmp_path) == 0


def test_estimates_that_methods_share_are_those_of_single_calls(folder):
    rows = {r["method"]: r for r in stored(folder) if r["setting"].startswith("tune 025")}
    run = one("tune 025").run()
    for name, call in {
        "exclusion": lambda: population_risk(run, "exclusion"),
        "first_order": lambda: population_risk(run, "first_order"),
        "auto10": lambda: population_risk(run, retrain_budget=10),
        "k_fold": lambda: population_risk(run, "k_fold", retrain_budget=10),
    }.items():
        found = call()
        if rows[name]["value"] is not None:  # first order is not computed where exclusion is not valid
            assert math.isclose(rows[name]["value"], found.value, rel_tol=1e-6), name
        assert rows[name]["valid"] == found.valid


def test_answers_that_were_made_before_are_not_made_again_for_the_automatic_choice(folder, tmp_path, monkeypatch):
    rows = {r["method"]: r for r in stored(folder) if r["setting"].startswith("tune 025")}
    rows["leverage_alone"] = {**rows["exclusion"], "method": "leverage_alone", "by": "leverage"}
    known = ("exclusion", "leverage_alone", "k_fold")
    lines = [json.dumps({**rows[name], "valid": name == "k_fold"}) for name in known]
    (tmp_path / "tune.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("k_fold_curve", "exclusion_risk"):
        monkeypatch.setattr(f"poprisk.risk._risk.{name}", lambda *_, **__: pytest.fail("it is known"))
    runner.run_setting(one("tune 025"), runner.chosen_methods(["auto10"]), tmp_path)
    [found] = [r for r in runner.lines_of(tmp_path, "tune") if r["method"] == "auto10"]
    assert found["by"] == "k_fold"
    assert (found["value"], found["standard_error"]) == (rows["k_fold"]["value"], rows["k_fold"]["standard_error"])


def test_a_method_that_fails_or_takes_too_long_has_no_answer(tmp_path):
    def fail(*_):
        raise ValueError("cannot")

    def slow(*_):
        while True:
            torch.ones(100).sum()

    some = {name: methods.Method(name, call) for name, call in {"fails": fail, "slow": slow}.items()}
    runner.run_setting(one("tune 025"), some, tmp_path, seconds=0.3)
    rows = {row["method"]: row for row in runner.lines_of(tmp_path, "tune")}
    assert not rows["fails"]["valid"]
    assert rows["fails"]["reason"] == "ValueError: cannot"
    assert rows["slow"]["reason"] == "no answer within 0.3 s"
    assert rows["slow"]["seconds"] < 5


def test_what_is_not_done_when_the_time_is_over_is_left_for_the_next_call(tmp_path):
    def slow(*_):
        while True:
            torch.ones(100).sum()

    some = {"slow": methods.Method("slow", slow)}
    assert runner.run_setting(one("tune 025"), some, tmp_path, end=time.time() + 3, commit="abc") <= 1
    assert {row["method"] for row in runner.lines_of(tmp_path, "tune")} <= {"truth"}
    assert runner.run_setting(one("tune 025"), some, tmp_path, end=time.time() - 1) == 0


def test_the_command_runs_a_few_settings_and_writes_the_result(folder, tmp_path, monkeypatch, capsys):
    stored(folder)
    output = tmp_path / "result.json"
    monkeypatch.setattr("sys.argv", ["runner", "--folder", str(folder), "--output", str(output)])
    runner.main()
    saved = load_result(output, KIND)
    assert set(saved["result"]) == {"tune"}
    assert saved["result"]["tune"]["summary"]["settings"] == len(QUICK)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.argv", ["runner", "--folder", str(tmp_path / "empty"), "--output", str(output)])
    runner.main()  # a split whose lines are not there stays as it is
    assert load_result(output, KIND)["result"] == saved["result"]


def test_settings_are_tasks_of_a_cluster(tmp_path, monkeypatch, capsys):
    """Each in a process of its own, which limits its time; what is stored is not asked again, and failures are said."""
    command = ["runner", "--split", "tune", "--settings", "4", "--methods", "first_order"]
    for name in ("here", "there"):
        monkeypatch.setattr("sys.argv", [*command, "--commit", "some", "--folder", str(tmp_path / name)])
        for made in (2, 0) if name == "there" else (2,):
            with cluster("in-process") if name == "there" else nullcontext():
                runner.main()
            assert capsys.readouterr().out.count(f": {made} answers") == 1
    rows = [runner.lines_of(tmp_path / name, "tune") for name in ("here", "there")]
    here, there = ([{k: v for k, v in row.items() if k != "seconds"} for row in each] for each in rows)
    assert sorted(here, key=str) == sorted(there, key=str)
    monkeypatch.setattr("sys.argv", [*command, "--folder", str(tmp_path / "over"), "--minutes", "0"])
    with cluster("threads"):
        runner.main()
    assert not (tmp_path / "over").exists()
    with pytest.raises(JobError, match="setting 999 of 'tune' failed: IndexError"):
        list(settings_on_cluster("tune", [(999, [])], [], math.inf, None))
    monkeypatch.setattr("sys.argv", [*command, "--scheduler", "nonsense"])
    with pytest.raises(JobError, match="no scheduler at 'nonsense'"):
        runner.main()


def test_methods_that_the_library_does_not_have_are_left_out(monkeypatch):
    assert {"auto", "auto10", "k_fold", "exclusion", "holdout"} <= set(methods.available())
    monkeypatch.setattr(methods, "get_args", lambda _: ("auto", "k_fold"))
    assert not {"exclusion", "leverage", "held_back"} & set(methods.available())
    assert set(runner.chosen_methods(["auto", "leverage"])) == {"auto"}


@pytest.mark.parametrize(
    ("found", "truth", "error", "wrong", "covered"),
    [
        (answer(1.3, 0.11), 1.0, 0.0, True, False),  # 30% and 2.7 errors
        (answer(1.3, 0.13), 1.0, 0.0, False, False),  # 30%, but within 2.5 errors
        (answer(1.3, 0.16), 1.0, 0.0, False, True),
        (answer(1.15, 0.01), 1.0, 0.0, False, False),  # within 20%
        (answer(1.3, 0.05), 1.0, 0.11, False, False),  # the truth itself is not known better
        (answer(None, 0.1), 1.0, 0.0, True, False),
        (answer(1.3, None), 1.0, 0.0, True, False),
        (answer(1.0, 0.1), None, 0.0, True, False),  # no finite truth
    ],
)
def test_an_answer_is_judged_by_the_rule(found, truth, error, wrong, covered):
    [setting] = judged(found, truth=truth, error=error)
    assert judging.is_wrong(setting, found) is wrong
    assert judging.is_covered(setting, found) is covered


def test_an_answer_is_held_against_the_weights_it_is_about():
    kept = {"value": 2.0, "error": 0.0}
    about = (
        "the kept weights, step 3 of 5, of a model trained on 9 of the 10 examples",
        "the weights at the last step",
    )
    made = judged(*(answer(2.0, target=target) for target in about), kept=kept)
    assert [judging.distance(s, s["answers"]["auto"])[0] for s in made] == [0.0, 1.0]


def test_only_valid_answers_count_as_wrong():
    found = judge(judged(answer(5.0), answer(5.0, valid=False), answer(1.0)), "auto")
    assert (found["asked"], found["valid"], found["wrong"], found["covered"]) == (3, 2, 1, 1)
    assert found["wrong_settings"] == ["s0"]
    assert found["wrong_if_believed"] == 2
    low, high = found["wrong_interval"]
    assert low < 0.5 < high


def test_the_bars_are_those_of_the_rule():
    good, bad = answer(), answer(valid=False)
    bars = {(b["what"], b["method"]): b for b in summarize(judged(*[good] * 6, *[bad] * 4))["bars"]}
    assert bars["valid, all settings", "auto"]["met"]
    assert bars["valid, ReLU", "auto"]["bar"] == 0.5
    assert bars["wrong", "auto"]["met"]
    assert bars["covered", "auto"]["met"]
    assert ("valid, CNN", "auto") not in bars
    few = {(b["what"], b["method"]): b["met"] for b in summarize(judged(*[good] * 5, *[bad] * 5))["bars"]}
    assert not few["valid, all settings", "auto"]
    assert few["valid, ReLU", "auto"]
    off = summarize(judged(*[good] * 98, answer(3.0), answer(3.0)))["bars"]
    assert not next(b for b in off if b["what"] == "wrong")["met"]
    trained = summarize(judged(*[good] * 96, *[bad] * 4, method="auto10"))["bars"]
    assert not next(b for b in trained if b["what"] == "valid, all settings")["met"]


def test_levels_of_a_factor_are_counted_apart():
    both = judged(answer(), model="cnn") + judged(answer(valid=False), answer(), model="gru")
    found = judging.by_factor(both, lambda factors: factors["model"], ["auto"])
    assert {key: (level["settings"], level["auto"]["valid"]) for key, level in found.items()} == {
        "cnn": (1, 1),
        "gru": (2, 1),
    }
