"""The suggested learning rate is the one that the stored evidence gives, and its page says what was measured."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from poprisk import PopRiskAdamW
from poprisk._core.store.envelope import load_result
from poprisk.errors import DataError, HyperparameterError
from poprisk.optim._learning_rate import FACTOR, suggest_lr
from poprisk_lab.engine import reading
from poprisk_lab.paper.learning_rate import factors
from poprisk_lab.paper.learning_rate.study import DEFAULT, KIND, SETTINGS, GuideConfig

RESULTS = Path(__file__).resolve().parents[2] / "results"
NOISY, CLEAN, TEXT = (sweep.task for sweep in GuideConfig().sweeps)
WEAK = [name for name in SETTINGS if name != DEFAULT]
WEAK_FACTOR = 10
"""What the page and the docstring say of gates of strength 1."""
MEASURED = (10, 30, 60, 100)
"""Factors at which the defaults were trained on every task."""


@pytest.fixture(scope="module")
def rows():
    guide = load_result(RESULTS / "learning_rate_guide.json", KIND)
    assert guide["result"]["complete"]
    return factors.evidence(guide, load_result(RESULTS / "clean_lm.json", "clean_lm"))


@pytest.mark.parametrize("lr", [5e-5, 3e-4, 1e-3, 1, np.float32(0.25), Fraction(1, 8)])
def test_is_the_learning_rate_of_adamw_as_a_plain_number(lr):
    with pytest.warns(DeprecationWarning, match="is now AdamW's"):
        suggested = suggest_lr(lr)
    assert type(suggested) is float
    assert suggested == float(lr)
    weight = torch.zeros(1, requires_grad=True)
    assert PopRiskAdamW([weight], lr=suggested).param_groups[0]["lr"] == suggested


@pytest.mark.parametrize("lr", [0, -1e-3, math.nan, math.inf, "1e-3", None, True, 1j, torch.tensor(1e-3)])
def test_refuses_what_is_no_learning_rate(lr):
    with pytest.raises(HyperparameterError, match="positive finite number"):
        suggest_lr(lr)


def test_the_default_is_adamw_s():
    weight = torch.zeros(1, requires_grad=True)
    adamw = torch.optim.AdamW([weight]).defaults["lr"]
    assert PopRiskAdamW([weight]).defaults["lr"] == adamw


@pytest.mark.parametrize("setting", WEAK)
def test_factor_of_weak_gates_is_what_the_rule_gives_on_the_stored_evidence(rows, setting):
    assert factors.recommended_factor(rows, setting) == WEAK_FACTOR
    by_trainer = [row for row in rows if row["task"] != factors.CONSTANT_LR]
    assert factors.recommended_factor(by_trainer, setting) == WEAK_FACTOR


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_rule_written_out_again(rows, setting):
    """The mean regret by plain loops, from the runs rather than the summary."""
    saved = json.loads((RESULTS / "learning_rate_guide.json").read_text())["result"]
    regrets = dict.fromkeys((1, 3, 10, 30) if setting in WEAK else MEASURED, 0.0)
    for task in (NOISY, CLEAN, TEXT):
        last = {}
        for run in saved["runs"]:
            if run["task"] == task:
                last.setdefault((run["optimizer"], run["lr"]), []).append(run["last"])
        sign = -1 if task == TEXT else 1
        score = {cell: sign * sum(values) / len(values) for cell, values in last.items()}
        adamw = max((value, lr) for (name, lr), value in score.items() if name == "AdamW")
        start = sign * next(row["untrained"] for row in rows if row["task"] == task)
        best = max(value for (name, _), value in score.items() if name == setting)
        for factor in regrets:
            lr = min(
                (lr for name, lr in score if name == setting), key=lambda lr: abs(math.log(lr / factor / adamw[1]))
            )
            regrets[factor] += (best - score[setting, lr]) / (adamw[0] - start)
    without_constant = [row for row in rows if row["task"] != factors.CONSTANT_LR]
    found = factors.mean_regrets(without_constant, setting)
    assert set(regrets) <= set(found)
    for factor, total in regrets.items():
        assert found[factor] == pytest.approx(total / 3, abs=1e-12)


def test_factor_does_not_hang_on_a_near_tie_of_adamw(rows):
    """On clean data AdamW's two best learning rates are nearly even; with the other one the calibrated factor stays."""
    runner_up = {CLEAN: 3e-4, TEXT: 3e-3}
    for task, lr in runner_up.items():
        others = [r for r in rows if (r["task"], r["optimizer"]) != (task, "AdamW") or r["lr"] == lr]
        assert factors.reference_lr(others, task) == lr
        assert factors.recommended_factor(others, "calibrated") == WEAK_FACTOR


def test_docstring_claims_hold(rows):
    """Of the gates of strength 1, of the defaults, and of the two studies of fine-tuning."""
    adamw = factors.cell_at(rows, TEXT, "AdamW", 1)["last"]["value"]
    soft = [row["last"]["value"] for row in factors.cells_of(rows, TEXT, "soft").values()]
    assert min(soft) > adamw + 0.4  # no learning rate mends it
    calibrated = factors.cell_at(rows, TEXT, "calibrated", 10)["last"]["value"]
    assert calibrated < adamw + 0.1
    memorized = [row["memorized"]["value"] for row in factors.cells_of(rows, NOISY, "soft").values()]
    memorized += [row["memorized"]["value"] for row in factors.cells_of(rows, NOISY, DEFAULT).values()]
    assert max(memorized) < 0.1
    assert factors.cells_of(rows, NOISY, "calibrated")[1e-2]["memorized"]["value"] > 0.5
    for factor in (30, 100):
        assert factors.regret(rows, NOISY, "soft", factor) < factors.regret(rows, NOISY, "soft", 10)
    for kind, task, sign in (("dpo", "dpo_30_swapped", 1), ("sft", "sft_0_replaced", -1)):
        study = load_result(RESULTS / f"{kind}.json", kind)["result"]["studies"][task]
        labels = ("PopRiskAdamW, defaults", "PopRiskAdamW at the suggested lr")
        found = [reading.row(study, label) for label in labels]
        ends = [np.mean(reading.final(row, reading.primary(study)["name"])) for row in found]
        assert sign * ends[0] > sign * ends[1]
        shared = reading.row(study, "AdamW at the shared lr")["hyper"]["lr"]
        assert found[1]["hyper"]["lr"] == pytest.approx(FACTOR * shared)


def test_what_the_page_says_of_the_defaults_factor(rows):
    """The rule takes the largest that was tried on every task, for the wrong labels' sake; on clean data 60 will do."""
    assert factors.recommended_factor(rows, DEFAULT) == max(MEASURED) > FACTOR
    noisy, *clean = (factors.regret(rows, task, DEFAULT, FACTOR) for task in (NOISY, CLEAN, TEXT))
    assert noisy > 0.1
    for task, lost in zip((CLEAN, TEXT), clean, strict=True):
        assert lost - factors.regret(rows, task, DEFAULT, 100) < 0.02


def test_rule_needs_a_factor_measured_everywhere(rows):
    with pytest.raises(DataError, match="lengthen its grids"):
        factors.recommended_factor([row for row in rows if row["lr"] > 0.5 or row["optimizer"] == "AdamW"], "snr")


def test_results_of_two_texts_are_not_mixed():
    guide, other = ({"config": {"text_sha256": digest}} for digest in "ab")
    with pytest.raises(DataError, match="of one text"):
        factors.evidence(guide, other)
