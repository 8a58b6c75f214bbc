"""The defaults are those that the stored study takes, and the class's docstring says what the stored results say."""

from functools import cache
from pathlib import Path

import pytest

from poprisk import PopRiskAdamW
from poprisk._core.statistics import mean_over_seeds
from poprisk._core.store.envelope import load_result
from poprisk.optim._defaults import DEFAULTS
from poprisk_lab.engine import reading
from poprisk_lab.paper.default_choice.study import KIND, is_noisy, rank

RESULTS = Path(__file__).resolve().parents[2] / "results"
SAID = " ".join((PopRiskAdamW.__doc__ or "").split())
USUAL = {"labels": "AdamW, defaults lr 1e-3", "cifar": "AdamW, defaults lr 1e-3", "char_language": "AdamW, lr 1e-3"}


@cache
def studies(kind):
    return load_result(RESULTS / f"{kind}.json", kind)["result"]["studies"]


def last(kind, task, label):
    study = studies(kind)[task]
    return mean_over_seeds(reading.final(reading.row(study, label), reading.primary(study)["name"])).value


def percents(kind, task):
    """The defaults' last step, the usual AdamW's, the tuned one's, and its best checkpoint's, as written there."""
    from poprisk_lab.pages.comparison import adamw_checkpoints

    labels = ("PopRiskAdamW, defaults", USUAL[kind], "adamw")
    checkpoints = adamw_checkpoints(studies(kind)[task])
    values = [*(last(kind, task, label) for label in labels), mean_over_seeds(checkpoints).value]
    return [f"{100 * value:.1f}%" for value in values]


def test_defaults_are_the_rule_s_first_choice():
    found = rank(studies(KIND))
    assert f"of {len(found)} candidates" in SAID
    hyper = found[0].hyper
    chosen = {"gate": found[0].arm, **{name: hyper[name] for name in ("lr", "weight_decay", "strength", "rho")}}
    assert chosen == {name: getattr(DEFAULTS, name) for name in chosen}
    noisy = [study for study in studies(KIND).values() if is_noisy(study)]
    assert sum("noise" in study["task"]["config"] for study in noisy) == len(noisy) - 1 == 9  # and CIFAR-10N's
    for words in ("SNR gate of strength 100", "lr 0.06", "weight decay 5e-3", "nine small noisy tasks"):
        assert words in SAID
    assert (DEFAULTS.lr, DEFAULTS.weight_decay, DEFAULTS.strength) == (0.06, 5e-3, 100.0)


@pytest.mark.parametrize(
    ("kind", "task", "words"),
    [
        ("cifar", "cifar10-worse", "CIFAR-10N, 40% of the labels wrong: {0} test accuracy. AdamW at its usual lr 1e-3:"
         " {1}; tuned: {2}; its best checkpoint, picked with the test set: {3}."),
        ("labels", "fashion-40", "Fashion-MNIST, 40% wrong: {0}. AdamW: {1}; tuned: {2}; its best checkpoint: {3}."),
        ("labels", "digits-40", "Digits, 40% wrong: {0}. AdamW: {1}; tuned: {2}; its best checkpoint: {3}."),
        ("labels", "digits-60", "With 60% wrong the tuned AdamW is far ahead, {2} against {0}."),
        ("cifar", "cifar10-clean", "CIFAR-10 {0} and {2},"),
        ("labels", "fashion-0", "Fashion-MNIST {0} and {2},"),
        ("labels", "digits-0", "digits {0} and {2}."),
    ],
)  # fmt: skip
def test_docstring_has_the_measured_accuracies(kind, task, words):
    assert words.format(*percents(kind, task)) in SAID
    assert reading.row(studies(kind)[task], "PopRiskAdamW, defaults")["hyper"]["strength"] == DEFAULTS.strength


def test_docstring_has_the_measured_costs_on_other_clean_tasks():
    text = [last("char_language", "char_clean", label) for label in ("PopRiskAdamW, defaults", "adamw")]
    assert "clean text {:.2f} nats, the tuned AdamW {:.2f};".format(*text) in SAID
    pinn = studies("pinn")["pinn_clean"]
    given = [row["label"] for row in reading.rows(pinn) if row["arm"] == "adamw"]
    errors = [last("pinn", "pinn_clean", "PopRiskAdamW, defaults"), min(last("pinn", "pinn_clean", x) for x in given)]
    assert "a relative error of {:.2f}, AdamW at its best given lr {:.2f};".format(*errors) in SAID
