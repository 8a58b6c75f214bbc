"""The survey of the paper table: functions are really broken, and what nobody notices is told."""

import json
from dataclasses import dataclass

import pytest
import torch

from poprisk._core.linalg import from_dense
from poprisk_lab.mutation import survey
from poprisk_lab.mutation.broken import broken, broken_value
from poprisk_lab.mutation.trial import Job, Outcome, break_name, resolve


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: float

    @property
    def total(self):
        return self.left.sum().item() + self.right


def double(x, *, times=2.0):
    return times * x


imported_elsewhere = double


def test_values_are_broken_however_they_are_packed():
    pair = Pair(torch.ones(2), 3.0)
    for how, factor in (("scaled", 1.1), ("negated", -1.0), ("zero", 0.0)):
        other = broken_value(pair, how)
        assert other.total == pytest.approx(factor * pair.total)
        assert broken_value([(1.0, "a")], how) == [(pytest.approx(factor), "a")]
    assert pair.total == 5.0
    assert not broken_value(True, "negated")


def test_operators_and_properties_are_broken():
    operator = broken_value(from_dense(torch.eye(2)), "negated")
    assert torch.equal(operator @ torch.ones(2), -torch.ones(2))
    assert broken("scaled")(Pair.total).fget(Pair(torch.ones(1), 1.0)) == pytest.approx(2.2)


def test_an_optimizer_s_step_is_broken():
    kind = broken("negated")(type("Descent", (torch.optim.SGD,), {"step": torch.optim.SGD.step}))
    w = torch.nn.Parameter(torch.ones(1))
    optimizer = kind([w], lr=0.5)
    w.grad = torch.ones(1)
    optimizer.step()
    assert w.item() == 1.5


def test_a_name_is_broken_wherever_it_was_imported():
    name = f"{__name__}.double"
    code, defaults = double.__code__, double.__kwdefaults__
    assert resolve(name) is double
    break_name(name, "negated")
    try:
        assert imported_elsewhere(3.0) == -6.0
        assert imported_elsewhere(3.0, times=1.0) == -3.0
    finally:
        double.__code__, double.__kwdefaults__ = code, defaults
    assert double(3.0) == 6.0


def test_what_nobody_notices_is_told(tmp_path):
    row = survey.Row("thm:a", ("f", "g"), ("tests/a.py::test_1", "tests/a.py::test_2"))
    log = survey.Log(tmp_path / "log.jsonl")
    for function, how, test, said in [
        ("f", "scaled", row.tests[0], "failed"),
        ("f", "scaled", row.tests[1], "passed"),
        ("g", "scaled", row.tests[0], "passed"),
        ("g", "scaled", row.tests[1], "passed"),
    ]:
        log.add(Job(function, how, test, 1), Outcome(said, 0.1, 1))
    again = survey.Log(log.path)
    assert survey.unnoticed(again, row) == [("g", "scaled")]
    assert survey.idle_tests(again, row) == [row.tests[1]]
    counts = survey.summary(again, [row])["counts"]
    assert (counts["unnoticed"], counts["idle_tests"], counts["trials"]) == (1, 1, 4)
    again.forget({"g"})
    assert survey.unnoticed(again, row) == []
    assert len(json.loads(log.path.read_text().splitlines()[0])) == 6


def test_every_row_of_the_page_can_be_asked():
    rows = survey.rows()
    assert len(rows) > 150
    for name in {function for row in rows for function in row.functions if "optax" not in function}:
        assert resolve(name) is not None
