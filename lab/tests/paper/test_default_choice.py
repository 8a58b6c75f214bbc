"""Which setting becomes the default: scores and costs by hand, the rule, and what its page and figure say."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from poprisk_lab.paper.default_choice import numbers as page
from poprisk_lab.paper.default_choice import study as default_choice
from poprisk_lab.paper.default_choice.figure import draw as draw_default_choice
from poprisk_lab.paper.default_choice.numbers import lines as default_choice_lines
from poprisk_lab.paper.default_choice.study import (
    ADAMW_RATES,
    ALLOWED_COST,
    SMOKE,
    Candidate,
    candidates,
    cost,
    rank,
    score,
    studies,
)

LABELS = {
    "good": "snr strength=3 lr=0.01",
    "costly": "soft α=0.25 strength=1 lr=0.01",
    "library": "soft α=1 strength=1 lr=0.01",
}
HYPER = {
    "good": ("snr", {"lr": 0.01, "strength": 3.0}),
    "costly": ("soft", {"lr": 0.01, "alpha": 0.25, "strength": 1.0}),
    "library": ("soft", {"lr": 0.01, "alpha": 1.0, "strength": 1.0}),
}
USUAL = {"weight_decay": 0.01, "beta2": 0.999, "rho": 0.99}


def study(metric, noise, adamw, ends):
    """A stored study: AdamW's curves by learning rate (the others repeat the usual), one end for each candidate."""
    curves = {f"adamw lr={lr:g}": adamw.get(lr, adamw[1e-3]) for lr in ADAMW_RATES}
    rows = [
        {"label": label, "arm": "adamw", "hyper": {}, "chosen_for": [], "curves": {metric: [curve]}}
        for label, curve in curves.items()
    ]
    for name, end in ends.items():
        arm, hyper = HYPER[name]
        curve = {metric: [[end, end]]}
        rows.append({"label": LABELS[name], "arm": arm, "hyper": hyper | USUAL, "chosen_for": [], "curves": curve})
    higher = metric != "error"
    described = {"name": metric, "higher_is_better": higher, "target": None, "spec": ".3f"}
    return {"task": {"config": {"noise": noise}, "metrics": [described]}, "evaluation_steps": [1, 2], "rows": rows}


def stored(costs, scores=(0.8, 0.6, 0.4)):
    """One noisy classification and a noisy error, a clean of each; AdamW's best is 0.9 on the clean classification."""
    names = list(LABELS)
    noisy = {1e-3: [0.7, 0.5], 1e-4: [0.9, 0.6]}  # from 0.5 to the best checkpoint at 0.9
    return {
        "noisy-40": study("accuracy", 0.4, noisy, {n: 0.5 + 0.4 * s for n, s in zip(names, scores, strict=True)}),
        "error_0.1": study("error", 0.1, {1e-3: [0.5, 0.6], 3e-5: [0.2, 0.3]}, dict.fromkeys(names, 0.4)),
        "clean-0": study("accuracy", 0.0, {1e-3: [0.8, 0.8], 3e-3: [0.95, 0.9]}, dict(zip(names, costs, strict=True))),
        "error_0": study("error", 0.0, {1e-3: [0.2, 0.2]}, dict.fromkeys(names, 0.3)),
    }


def text_of(saved, width=140):
    console = Console(width=width, record=True, file=io.StringIO())
    for line in default_choice_lines(saved):
        console.print(line)
    return console.export_text()


def test_scores_and_costs_by_hand():
    found = stored((0.895, 0.7, 0.85))
    assert score(found["noisy-40"], LABELS["good"]) == pytest.approx(0.8)
    assert score(found["error_0.1"], LABELS["good"]) == pytest.approx((0.6 - 0.4) / (0.6 - 0.2))
    assert cost(found["clean-0"], LABELS["good"]) == pytest.approx(0.005)
    assert cost(found["error_0"], LABELS["good"]) == pytest.approx(0.5)
    bounded = stored((0.9, 0.9, 0.9), scores=(9.0, -9.0, 1.0))
    ends = [score(bounded["noisy-40"], label) for label in LABELS.values()]
    assert ends == pytest.approx([1.5, -1.0, 1.0])


def test_the_rule_takes_the_best_of_the_cheap_ones():
    first, *others = rank(stored((0.895, 0.7, 0.893), scores=(0.3, 1.0, 0.2)))
    assert first.label == LABELS["good"]  # not the costly one with score 1
    assert [candidate.label for candidate in others] == [LABELS["library"], LABELS["costly"]]
    assert first.score == pytest.approx((0.3 + 0.5) / 2)
    assert first.cost == pytest.approx(0.005)  # the error's cost of one half does not decide


def test_the_front_leaves_out_what_another_beats():
    found = rank(stored((0.895, 0.7, 0.85), scores=(0.3, 1.0, 0.2)))
    assert [candidate.label for candidate in page.front(found)] == [LABELS["good"], LABELS["costly"]]
    alike = rank(stored((0.895, 0.895, 0.895), scores=(0.3, 0.3, 0.3)))
    assert len(page.front(alike)) == 1


def library_is(monkeypatch, name):
    arm, hyper = HYPER[name]
    library = page.ARMS[arm]
    monkeypatch.setitem(page.ARMS, "defaults", type(library)("defaults", "as it comes", library.rule, hyper))


def test_the_library_is_found_among_the_candidates(monkeypatch):
    library = page.ARMS["defaults"]
    alike = [name for name in page.GATE_WORDS if page.ARMS[name].rule == library.rule]
    (arm,) = [name for name in alike if page.ARMS[name].calibrated == library.calibrated]
    itself = Candidate("as it comes", arm, library.hyper({}), {}, {}, frozenset())
    other = replace(itself, hyper={"lr": 2 * library.fixed["lr"]})
    assert page.library_default([other, itself]) is itself
    assert page.library_default([other]) is None
    for name, label in LABELS.items():
        library_is(monkeypatch, name)
        now = page.library_default(rank(stored((0.895, 0.7, 0.85))))
        assert now is not None
        assert now.label == label


def test_the_sentence_follows_the_numbers(monkeypatch):
    library_is(monkeypatch, "library")
    chosen = page.choice_sentence(rank(stored((0.895, 0.7, 0.85))))
    assert "chooses SNR strength=3 lr=0.01: mean score 0.65 on 2 noisy tasks, worst cost 0.5 points" in chosen
    assert "present default, soft α=1 strength=1 lr=0.01: mean score 0.45" in chosen
    assert "worst cost 5 points" in chosen
    none = page.choice_sentence(rank(stored((0.85, 0.7, 0.8))))
    assert "chooses none: the cheapest, SNR strength=3 lr=0.01, costs 5 points" in none
    library_is(monkeypatch, "good")
    assert "It is PopRiskAdamW's present default." in page.choice_sentence(rank(stored((0.895, 0.7, 0.85))))
    library = page.ARMS["defaults"]
    monkeypatch.setitem(page.ARMS, "defaults", type(library)("defaults", "as it comes", "snr", {"lr": 0.5}))
    assert "not among the candidates" in page.choice_sentence(rank(stored((0.895, 0.7, 0.85))))


def test_tables_have_the_numbers_of_every_task(monkeypatch):
    library_is(monkeypatch, "library")
    text = text_of({"result": {"studies": stored((0.895, 0.7, 0.85))}})
    assert "Best candidates that cost at most 1 point" in text
    rows = [line.split() for line in text.splitlines() if line.startswith(" SNR strength=3 lr=0.01")]
    assert [row[3:] for row in rows] == [
        ["0.65", "0.50", "0.80", "0.50%"],
        ["0.65", "0.50", "0.80", "0.50%"],
        ["0.50%", "50%"],
    ]
    assert "Best candidates that cost" not in text_of({"result": {"studies": stored((0.85, 0.7, 0.8))}})


def test_the_figure_shows_candidates_choice_and_default(monkeypatch):
    library_is(monkeypatch, "library")
    figure = draw_default_choice({"result": {"studies": stored((0.895, 0.7, 0.85), scores=(0.3, 1.0, 0.2))}})
    trade, tasks = figure.axes
    assert trade.get_title(loc="left").startswith("A  3 candidates")
    assert sorted(text.get_text() for text in trade.texts) == ["a", "b", "c"]
    labels = [label.get_text() for label in tasks.get_yticklabels()]
    assert labels == [f"{LABELS['good'].replace('snr', 'SNR')}  a", f"{LABELS['costly']}  b", f"{LABELS['library']}  c"]
    legend = trade.get_legend()
    assert legend is not None
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["soft", "SNR", "chosen by the rule", "default of version 0.1", "allowed cost"]
    rings = [line for line in trade.lines if line.get_markerfacecolor() == "none" and line.get_marker() == "o"]
    assert [np.asarray(ring.get_xydata()).tolist() for ring in rings] == [[pytest.approx([0.005, 0.4])]]


def test_a_diverged_run_is_said_and_drawn():
    found = stored((0.895, 0.7, 0.85))
    for each in ("clean-0", "noisy-40"):
        row = next(row for row in found[each]["rows"] if row["label"] == LABELS["costly"])
        row["curves"]["accuracy"] = [[0.5, None]]
    saved = {"result": {"studies": found}}
    assert rank(found)[-1].cost == math.inf
    assert "diverged" in text_of(saved)
    draw_default_choice(saved).canvas.draw()
    for row in found["clean-0"]["rows"][len(ADAMW_RATES) :]:
        row["curves"]["accuracy"] = [[0.5, None]]
    assert page.front(rank(found)) == []
    assert "chooses none" in text_of(saved)
    draw_default_choice(saved).canvas.draw()


@pytest.fixture(scope="module")
def smoke(smoke_result):
    return smoke_result("default_choice")


def test_the_smoke_study_runs_and_is_shown(smoke):
    kept = smoke["result"]["studies"]
    finals = ["cifar10-clean", "cifar10-worse"]
    assert list(kept) == [*(each.task.name for each in studies(SMOKE)), *finals]
    assert {default_choice.is_noisy(each) for each in kept.values()} == {True, False}
    found = rank(kept)
    wanted = {setting.label for setting in candidates(SMOKE) if setting.arm != "adamw"}
    assert {candidate.label for candidate in found} == wanted
    assert all(-1 <= value <= 1.5 for candidate in found for value in candidate.scores.values())
    assert found[0].classified == {"digits-0", "teacher_clean"}
    assert [set(finals) <= {*each.scores, *each.costs} for each in found] == [True, False]  # one goes on, and is first
    assert page.chosen(found) is (found[0] if found[0].cost <= ALLOWED_COST else None)
    draw_default_choice(smoke).canvas.draw()
    assert "The rule, the highest mean score" in " ".join(text_of(smoke).split())
