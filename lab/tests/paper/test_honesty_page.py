"""The page on population risk says what the stored settings say; rules for stopping are compared as they are."""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from poprisk._core.store.envelope import load_result
from poprisk_lab.pages.registry import chosen_pages
from poprisk_lab.pages.template import render
from poprisk_lab.paper.risk_honesty import judging, methods, numbers, stopping
from poprisk_lab.paper.risk_honesty.design import settings
from poprisk_lab.paper.risk_honesty.figure import draw

ROOT = Path(__file__).parents[2]


@cache
def stored():
    return load_result(ROOT / "results/risk_honesty.json", judging.KIND)


def test_the_page_is_what_the_result_says():
    [page] = chosen_pages(["docs/population_risk.md"])
    assert not page.is_stale(ROOT / "results")


def test_what_is_stored_are_whole_settings_of_the_design_and_the_page_says_which_lack():
    split, report = numbers.shown_split(stored())
    design = {s.name: s for s in settings(split)}
    names = [s["name"] for s in report["settings"]]
    assert len(set(names)) == len(names) == report["summary"]["settings"]
    for setting in report["settings"]:
        assert setting["factors"] == design[setting["name"]].factors
        assert {"auto", "auto10", "k_fold", "exclusion", "leverage", "holdout"} <= set(setting["answers"])
    page = (ROOT.parent / "docs/population_risk.md").read_text(encoding="utf-8")
    assert ("have not been run:" in " ".join(page.split())) == (len(names) < len(design))
    lacking = numbers.missing(report["settings"], split)
    assert sum(int(part.split()[0]) for part in lacking.split(", ") if part) == len(design) - len(names)


def test_the_stored_summary_is_that_of_the_stored_answers():
    _, report = numbers.shown_split(stored())
    again = judging.summarize(report["settings"])
    for name, found in report["summary"]["methods"].items():
        for key in ("asked", "valid", "wrong", "covered", "wrong_settings"):
            assert again["methods"][name][key] == found[key], (name, key)
    assert again["bars"] == report["summary"]["bars"]


def test_the_page_lists_every_answer_that_is_valid_and_wrong():
    _, report = numbers.shown_split(stored())
    wrong = {
        n for name, m in report["summary"]["methods"].items() if name in methods.JUDGED for n in m["wrong_settings"]
    }
    listed = numbers.slots(stored())["wrong"]
    assert len(listed) == len(wrong)
    assert all(any(n.partition(" ")[2] in line for line in listed) for n in wrong)
    page = (ROOT.parent / "docs/population_risk.md").read_text(encoding="utf-8")
    assert all(line.split(":")[0] + ":" in page for line in listed)


def test_the_figure_marks_valid_answers_and_wrong_ones():
    figure = draw(stored())
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    found = numbers.shown_split(stored())[1]["summary"]["methods"]
    assert f"exclusion, valid ({found['exclusion']['valid']})" in legend
    assert f"10-fold, valid ({found['k_fold']['valid']})" in legend
    assert figure.axes[1].get_title(loc="left") == f"B  Ten folds: {found['k_fold']['wrong']} valid and wrong"


def row(name, model, value, valid=True, truth=1.0):
    factors = next(s.factors for s in settings("report") if s.model == model)
    found = {"value": value, "standard_error": 0.01, "valid": valid, "reason": "", "seconds": 1.0, "by": "exclusion"}
    answers = dict.fromkeys(("auto", "auto10", "k_fold", "exclusion"), found)
    return {"name": name, "factors": factors, "truth": {"value": truth, "error": 0.0, "kept": None}, "answers": answers}


def made(*rows):
    report = {"commits": {"auto": {"abc": 1}}, "settings": list(rows), "summary": judging.summarize(rows)}
    return {"result": {"report": report}}


def test_a_page_with_a_wrong_answer_says_so_and_names_the_missed_bars():
    page = render("poprisk_lab.paper.risk_honesty", **numbers.slots(made(row("report 1: x", "relu", 2.0))))
    assert "- 1: x: exclusion 2 ± 0.01 (truth 1); k_fold 2 ± 0.01 (truth 1)" in page
    assert "| exclusion | valid and wrong | at most 1% | 1 of 1 (100%) | **no** |" in page
    good = render("poprisk_lab.paper.risk_honesty", **numbers.slots(made(row("report 1: x", "relu", 1.0))))
    assert "valid and wrong:" not in good
    assert "all of it does" in good


def test_what_is_wrong_in_settings_that_were_reported_before_is_named_beside_the_fresh_ones():
    saved, before = made(row("fresh 1: x", "relu", 1.0)), row("report 1: x", "relu", 2.0)
    saved["result"]["fresh"] = saved["result"].pop("report")
    saved["result"]["report"] = {**made(before)["result"]["report"], "commits": {"auto": {"1234567890": 1}}}
    page = " ".join(render("poprisk_lab.paper.risk_honesty", **numbers.slots(saved)).split())
    assert "The 1 settings that this page showed before are no longer fresh" in page
    assert "On commit 123456789, the automatic choice is valid in 1 of them and wrong in 1 of these" in page
    assert "- 1: x: exclusion 2 ± 0.01 (truth 1)" in page.partition("By all methods, valid and wrong:")[2]


def test_levels_of_each_factor_are_in_order_and_add_up():
    rows = [row(f"report {i}", model, 1.0) for i, model in enumerate(("gru", "linear", "relu"))]
    table = numbers.factor_rows(rows)
    models = [line for line in table if line[1] in numbers.MODELS.values()]
    assert [line[1] for line in models] == ["linear regression", "ReLU", "GRU"]
    assert [line[0] for line in models] == ["**model**", "", ""]
    total = sum(int(line[2]) for line in table)
    assert total == len(rows) * len(numbers.FACTORS)


def test_estimates_far_off_are_drawn_at_the_edge():
    figure = draw(made(row("report 1: x", "relu", 1e30), row("report 2: y", "relu", 1.0, valid=False)))
    drawn = [line.get_xydata() for line in figure.axes[0].get_lines()]
    heights = [float(points[0, 1]) for points in map(np.asarray, drawn) if len(points) == 1]
    assert heights
    assert max(heights) < 100


SEEN = {
    "truth": [3.0, 1.0, 2.0, 4.0],
    "evidence": [-1.0, -1.0, 0.5, 1.0],
    "disparity": [2.0, 1.0, 1.5, 3.0],
    "changed": [0.0, 5.0, 1.0, 9.0],
    "held_out": [4.0, 2.0, 3.0, 5.0],
}


def test_stopping_rules_are_held_against_the_best_moment():
    found = stopping.excess([SEEN])
    assert found["no stopping"]["mean"] == 3.0
    assert found["evidence criterion"]["mean"] == 1.0  # the third moment
    assert found["gradient disparity"]["mean"] == 0.0  # before it rises
    assert found["a held-out fifth"]["mean"] == 0.0
    assert "Label Wave" not in stopping.excess([{**SEEN, "changed": []}])
    assert stopping.excess([SEEN, SEEN])["no stopping"]["runs"] == 2


def test_a_run_is_watched_along_its_way():
    setting = next(s for s in settings("tune") if stopping.is_watched(s) and s.model == "softmax")
    setting = replace(setting, steps=24)
    run = setting.run()
    seen = methods.available()[methods.STOPPING].estimate(setting, run)
    assert isinstance(seen, dict)
    assert len(seen["steps"]) == len(seen["truth"]) == len(seen["changed"]) == stopping.MOMENTS
    assert seen["steps"][-1] == run.num_steps
    assert math.isclose(seen["truth"][-1], setting.truth(run).value, rel_tol=1e-6)
    assert not any(stopping.is_watched(s) for s in settings("tune") if s.model == "batchnorm")


@pytest.mark.parametrize("name", methods.JUDGED)
def test_every_judged_method_has_a_name_on_the_page(name):
    assert numbers.NAMES[name]
