"""The survey of the paper table: functions are really broken, and what nobody notices is told."""

import json
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from scipy.sparse import csr_matrix

from poprisk._core.linalg import from_dense
from poprisk.errors import DataError
from poprisk_lab.mutation import survey
from poprisk_lab.mutation.broken import WATCH, Changes, broken, broken_value
from poprisk_lab.mutation.trial import ROOT, Job, Outcome, break_name, resolve


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


def root(x):
    if x < 0:
        raise DataError("expected a number that is not negative")
    return x**0.5


def test_values_are_broken_however_they_are_packed():
    pair = Pair(torch.ones(2), 3.0)
    for how, factor in (("scaled", 1.1), ("negated", -1.0), ("zero", 0.0)):
        other = broken_value(pair, how)
        assert other.total == pytest.approx(factor * pair.total)
        assert broken_value([(1.0, "a")], how) == [(pytest.approx(factor), "" if how == "zero" else "a")]
    assert pair.total == 5.0
    assert not broken_value(True, "negated")


def test_operators_and_properties_are_broken():
    operator = broken_value(from_dense(torch.eye(2)), "negated")
    assert torch.equal(operator @ torch.ones(2), -torch.ones(2))
    assert broken("scaled")(Pair.total).fget(Pair(torch.ones(1), 1.0)) == pytest.approx(2.2)


def test_sparse_matrices_are_broken_as_a_whole():
    """Another shape beside the same indices is read past its end: the process dies, and no test has noticed."""
    whole = csr_matrix(np.diag([1.0, 2.0]))
    for how, factor in (("scaled", 1.1), ("negated", -1.0), ("zero", 0.0)):
        other = broken_value(whole, how)
        assert other.shape == (2, 2)
        assert_allclose(other.toarray(), factor * whole.toarray())


def test_arrays_of_jax_are_broken_while_they_are_traced_too():
    jax = pytest.importorskip("jax")
    Changes.count = 0
    found = jax.jit(broken("scaled")(lambda x: {"x": 2 * x, "steps": jax.numpy.int32(3)}))(jax.numpy.ones(2))
    assert_allclose(found["x"], 2.2, rtol=1e-6)
    assert (found["steps"], Changes.count) == (3, 1)
    steps = jax.numpy.arange(3)
    assert [broken_value(steps, how).tolist() for how in ("scaled", "negated", "zero")] == [
        [0, 1, 2], [2, 1, 0], [0, 0, 0]
    ]  # fmt: skip
    assert Changes.count == 3


def test_a_function_that_refuses_nothing_is_broken():
    Changes.count = 0
    silent = broken("silent")(root)
    assert (silent(4.0), Changes.count) == (2.0, 0)
    assert (silent(-4.0), Changes.count) == (None, 1)

    class Length:
        def __init__(self, value):
            self.value = root(value)

        def twice(self):
            return 2 * self.value

    assert broken("silent")(Length)(4.0).twice() == 4.0
    Length(-1.0)  # the door stands open


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


def test_a_watched_function_does_what_it_did_and_is_noted():
    Changes.asked.clear()
    assert broken(f"{WATCH}double")(double)(3.0) == 6.0
    assert Changes.asked == {"double"}
    Changes.asked.clear()


TRIALS = """
import json, os, signal
import pytest

@pytest.fixture(scope="module")
def saved():
    return json.dumps([1])

def test_a(saved):
    assert saved == "[1]"

def test_b():
    assert True

def test_c():
    json.dumps([])
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)

def test_d():
    os.kill(os.getpid(), signal.SIGXCPU)
"""
ASK = """
import json, sys
from pathlib import Path
from poprisk_lab.mutation import trial

trial.ROOT = Path.cwd()
tests = [f"tests/test_x.py::test_{name}" for name in "abcd"]
server = trial.Server("tests/", tests)
jobs = [trial.Job(("json.dumps",), trial.WATCH, tuple(some), 1, 60) for some in (tests[:2], tests[2:3], tests[3:])]
outcomes = [server.run(job) for job in jobs]
server.close()
print(json.dumps([[outcome.said, outcome.asked] for outcome in outcomes]))
"""


def test_a_trial_tells_tests_apart_and_crashes_from_limits(tmp_path):
    """A process of its own: only there can another be forked safely."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_x.py").write_text(TRIALS, encoding="utf-8")
    done = subprocess.run([sys.executable, "-c", ASK], cwd=tmp_path, capture_output=True, text=True, check=True)
    (passed, asked), (crashed, _), (late, _) = json.loads(done.stdout)
    a, b, c, d = (f"tests/test_x.py::test_{name}" for name in "abcd")
    assert passed == {a: "passed", b: "passed"}
    assert asked == {a: ["json.dumps"], b: []}  # only the first has the fixture that calls it
    assert (crashed, late) == ({c: "crashed"}, {d: "timeout"})


def said(log, function, how, **tests):
    """Write down what tests a and b said of a broken function; f and g are asked by both."""
    outcome = {f"tests/x.py::test_{name}": answer for name, answer in tests.items()}
    asked = ("f", "g") if how == WATCH else ()
    log.add(
        Job((function,) if function else ("f", "g"), how, tuple(outcome), 1, 9),
        Outcome(outcome, {}, 1, dict.fromkeys(outcome, asked)),
    )


def test_what_nobody_notices_is_told(tmp_path):
    row = survey.Row("thm:a", ("f", "g"), ("tests/x.py::test_a", "tests/x.py::test_b"))
    log = survey.Log(tmp_path / "log.jsonl")
    said(log, "", WATCH, a="passed", b="passed")
    said(log, "f", "scaled", a="failed", b="passed")
    assert not survey.is_whole(log, row)
    assert survey.summary(log, [row])["rows"][0]["unnoticed"] == []  # g was not tried
    said(log, "g", "scaled", a="passed", b="passed")
    assert survey.unnoticed(log, row) == ["g"]
    assert survey.idle_tests(log, row) == [row.tests[1]]
    assert not survey.is_whole(log, row)  # the second test might notice other mutations
    for how in ("negated", "zero", "silent"):
        said(log, "f", how, a="failed", b="passed")
        said(log, "g", how, a="failed", b="passed")
    again = survey.Log(log.path)
    assert survey.is_whole(again, row)
    assert survey.unnoticed(again, row) == ["g"]  # by the mildest mutation that changes something
    counts = survey.summary(again, [row])["counts"]
    assert (counts["whole"], counts["unnoticed"], counts["idle_tests"]) == (1, 1, 1)
    again.forget({"g"})
    assert not survey.is_whole(again, row)


def test_the_tests_of_a_file_are_tried_together():
    assert survey.by_file(["a.py::x", "b.py::x", "a.py::y", "a.py::x"]) == [("a.py::x", "a.py::y"), ("b.py::x",)]


def test_a_survey_of_some_rows_keeps_what_is_stored_of_the_others(tmp_path, monkeypatch):
    first, second = (survey.Row(label, ("f",), ("tests/x.py::test_a",)) for label in ("thm:a", "thm:b"))
    monkeypatch.setattr(survey, "rows", lambda: [first, second])
    log = survey.Log(tmp_path / "log.jsonl")
    stored = survey.summary(log, [first, second])
    stored["rows"][0]["commit"], stored["rows"][0]["whole"] = "before", True
    stored["rows"].append(stored["rows"][0] | {"label": "thm:gone"})
    said(log, "", WATCH, a="passed")
    said(log, "f", "scaled", a="failed")
    found = survey.summary(log, [second], stored)
    assert [(row["label"], row["whole"]) for row in found["rows"]] == [("thm:a", True), ("thm:b", True)]
    assert found["rows"][0]["commit"] == "before" != found["rows"][1]["commit"]
    assert (found["counts"]["rows"], found["counts"]["functions"], found["counts"]["whole"]) == (2, 1, 2)


def test_what_stopped_a_trial_is_tried_alone_and_is_not_noticed(tmp_path):
    class Crashing:
        def run(self, job):
            return Outcome(dict.fromkeys(job.tests, "crashed" if job.tests[0][-1] == "a" else "failed"))

    log, tests = survey.Log(tmp_path / "log.jsonl"), ("tests/x.py::test_a", "tests/x.py::test_b")
    survey._attempt(Crashing(), log, Job(("f",), "scaled", tests, 1, 9))
    assert [log.noticed("f", "scaled", test) for test in tests] == [False, True]
    assert all(log.has("f", "scaled", test) for test in tests)


class Answers:
    """Instead of a bench: test a notices f, test b notices neither f nor g by the mildest mutation, but a zero g."""

    def __init__(self):
        self.jobs = []

    def run(self, job):
        self.jobs.append((job.functions, job.mutation, "".join(test[-1] for test in job.tests)))
        failing = {("f", "scaled"): "a", ("g", "scaled"): "a", ("g", "negated"): "", ("g", "zero"): "b"}
        notices = failing.get((job.functions[0], job.mutation), "")
        outcome = {test: "failed" if job.mutation != WATCH and test[-1] in notices else "passed" for test in job.tests}
        return Outcome(outcome, {}, 1, dict.fromkeys(job.tests, ("f", "g")))

    def close(self):
        pass


def test_a_survey_makes_the_trials_that_can_tell_something_and_no_other(tmp_path, monkeypatch):
    row = survey.Row("thm:a", ("f", "g"), ("tests/x.py::test_a", "tests/x.py::test_b"))
    bench, log = Answers(), survey.Log(tmp_path / "log.jsonl")
    monkeypatch.setattr(survey, "Bench", lambda tests: bench)
    monkeypatch.setattr(survey, "rows", lambda: [row])
    survey.survey(log, [row])
    assert bench.jobs == [
        (("f", "g"), WATCH, "ab"),
        (("f",), "scaled", "ab"),
        (("g",), "scaled", "b"),  # b has noticed nothing so far
        (("g",), "scaled", "a"),  # and a is asked because b did not notice g
        (("f",), "negated", "b"),
        (("g",), "negated", "b"),
        (("f",), "zero", "b"),
        (("g",), "zero", "b"),  # noticed: nothing is left for the last mutation
    ]
    assert survey.is_whole(log, row)
    assert (survey.unnoticed(log, row), survey.idle_tests(log, row)) == ([], [])
    bench.jobs.clear()
    survey.survey(survey.Log(log.path), [row])  # continued: nothing is left to try
    assert bench.jobs == []


def test_trials_count_while_their_files_and_the_number_of_parameters_stay(tmp_path, monkeypatch):
    log = survey.Log(tmp_path / "log.jsonl")
    said(log, "f", "scaled", a="failed", b="passed")
    found = [
        [survey.Log(log.path, many).has("f", "scaled", f"tests/x.py::test_{t}") for t in "ab"] for many in (1, 3, 0)
    ]
    assert found == [[True, True], [True, False], [True, False]]  # more parameters may notice what one did not
    monkeypatch.setattr(survey, "digest", lambda name: "edited")
    assert survey.Log(log.path).said == {}
    monkeypatch.undo()
    assert survey.digest("poprisk_lab.mutation.survey.Log.has") == survey.digest("poprisk_lab.mutation.survey") != ""
    assert survey.digest("lab/tests/test_mutation.py::test_a") != survey.digest("tests/conftest.py::test_a") != ""


def test_another_test_of_the_file_does_not_matter_and_what_they_share_does(tmp_path, monkeypatch):
    monkeypatch.setattr(survey, "ROOT", tmp_path)

    def digests(text):
        (tmp_path / "test_x.py").write_text(text, encoding="utf-8")
        survey.digest.cache_clear()
        return [survey.digest(f"test_x.py::test_{name}") for name in "ab"]

    try:
        first = digests("n = 1\n\n\ndef test_a():\n    assert n\n\n\n@slow\ndef test_b():\n    assert n\n")
        edited = digests("n = 1\n\n\ndef test_a():\n    assert n\n\n\n@quick\ndef test_b():\n    assert n\n")
        shared = digests("n = 2\n\n\ndef test_a():\n    assert n\n\n\n@quick\ndef test_b():\n    assert n\n")
    finally:
        survey.digest.cache_clear()
    assert first[0] == edited[0] != shared[0]
    assert len({first[1], edited[1], shared[1]}) == 3


def stored_rows():
    stored = json.loads((ROOT / "lab/results/mutation.json").read_text(encoding="utf-8"))
    return {row["label"]: row for row in stored["rows"]}


def test_the_stored_survey_is_of_the_page_at_hand():
    """A row that is new, or that cites other code or tests, must be surveyed."""
    found = {name: (tuple(row["functions"]), tuple(row["tests"])) for name, row in stored_rows().items()}
    assert found == {row.label: (row.functions, row.tests) for row in survey.rows()}, "survey the changed rows: --only"


def test_no_surveyed_row_has_code_that_nobody_notices_or_a_test_that_notices_nothing():
    rows = stored_rows()
    assert {name: row["unnoticed"] for name, row in rows.items() if row["unnoticed"]} == {}
    assert {name: row["idle_tests"] for name, row in rows.items() if row["idle_tests"]} == {}


def test_every_row_was_surveyed():
    assert [name for name, row in stored_rows().items() if not row["whole"]] == [], "survey these rows: --only"


def test_every_row_of_the_page_can_be_asked():
    rows = survey.rows()
    assert len(rows) > 150
    for name in {function for row in rows for function in row.functions if "optax" not in function}:
        assert resolve(name) is not None
