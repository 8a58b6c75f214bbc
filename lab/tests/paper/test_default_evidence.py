"""The literal gate that the pages call the defaults of version 0.1 is the one that the stored study takes."""

from functools import cache
from pathlib import Path

import pytest

from poprisk._core.store.envelope import load_result
from poprisk_lab.engine import reading
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.paper.default_choice.study import KIND, is_noisy, rank

RESULTS = Path(__file__).resolve().parents[2] / "results"
LITERAL = {"gate": "snr", **ARMS["defaults"].fixed}


@cache
def studies(kind):
    return load_result(RESULTS / f"{kind}.json", kind)["result"]["studies"]


def test_the_literal_gate_is_the_rule_s_first_choice():
    found = rank(studies(KIND))
    assert len(found) == 156
    hyper = found[0].hyper
    chosen = {"gate": found[0].arm, **{name: hyper[name] for name in ("lr", "weight_decay", "strength", "rho")}}
    assert chosen == {name: LITERAL[name] for name in chosen}
    noisy = [study for study in studies(KIND).values() if is_noisy(study)]
    assert sum("noise" in study["task"]["config"] for study in noisy) == len(noisy) - 1 == 9  # and CIFAR-10N's
    assert (LITERAL["lr"], LITERAL["weight_decay"], LITERAL["strength"]) == (0.06, 5e-3, 100.0)


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("cifar", "cifar10-worse"), ("labels", "fashion-40"), ("labels", "digits-40"), ("labels", "digits-60"),
        ("cifar", "cifar10-clean"), ("labels", "fashion-0"), ("labels", "digits-0"),
    ],
)  # fmt: skip
def test_stored_results_are_of_the_literal_gate(kind, task):
    hyper = reading.row(studies(kind)[task], "PopRiskAdamW, defaults")["hyper"]
    assert (hyper["strength"], hyper["lr"]) == (LITERAL["strength"], LITERAL["lr"])
