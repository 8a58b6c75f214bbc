"""Bad inputs, through Python and the command line: one line says what is expected, what came and what to do.

The quick tests draw the same inputs every time. Those marked slow draw new ones, by the seed in POPRISK_SEED if it is
set; hypothesis prints what failed.
"""

import os
import random
import tempfile
import warnings
from functools import partial
from pathlib import Path

import bad_inputs as bad
import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from poprisk import Problem, Run, train
from poprisk.errors import PopRiskError

SGD = partial(torch.optim.SGD, lr=0.1)
SCRIPT = """
import bad_inputs
def good(): return bad_inputs.problem({})
def drawn(): return bad_inputs.DRAWN[0]()
"""
CHECKS = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much]
OPTIONS = {"deadline": None, "database": None, "phases": [Phase.generate], "suppress_health_check": CHECKS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a script of tasks and a good run."""
    found = tmp_path_factory.mktemp("bad")
    (found / "tasks_of_test.py").write_text(SCRIPT)
    problem = Problem.build(f"{found}/tasks_of_test.py:good")
    train(problem, SGD, 4, path=found / "run", progress=False)
    return found


@pytest.fixture(autouse=True)
def _there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users have no such checks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def task_in_python(wrong):
    """An error of the library is judged; those of a person's own function come as they are."""
    with pytest.raises(Exception) as caught:
        train(bad.problem(wrong), SGD, 1, progress=False)
    if not isinstance(caught.value, PopRiskError):
        assert bad.is_theirs(caught.value), repr(caught.value)
        return
    complaint = bad.judged(str(caught.value))
    assert not complaint, f"{complaint}: {caught.value}"


def task_on_the_command_line(factory):
    bad.DRAWN[:] = [factory]
    with tempfile.TemporaryDirectory() as place:
        options = ["--steps", 1, "--lr", 0.1, "-o", f"{place}/run"]
        wrong = bad.judged_call(["train", "tasks_of_test.py:drawn", *options])
        assert not wrong, wrong
        assert not any(Path(place).rglob("*.safetensors")), "something was written"


def options(data):
    arguments = data.draw(bad.option_calls("run"))
    wrong = bad.judged_call(arguments)
    assert not wrong, f"{arguments}: {wrong}"


def files(data):
    with tempfile.TemporaryDirectory() as place:
        arguments = data.draw(bad.file_calls("run", Path(place)))
        wrong = bad.judged_call(arguments)
        assert not wrong, f"{arguments}: {wrong}"


def arguments_in_python(asked):
    name, wrong = asked
    with pytest.raises(PopRiskError) as caught:
        bad.asked("run", name, wrong)
    assert not bad.judged(str(caught.value)), f"{bad.judged(str(caught.value))}: {caught.value}"


def any_kind_in_python(asked):
    """It may work, or be an error of the library."""
    said = ""
    try:
        bad.asked_of(Run.load("run"), *asked)
    except PopRiskError as error:
        said = str(error)
    assert not said or not bad.judged(said), f"{asked}: {bad.judged(said)}: {said}"


KINDS = [
    (task_in_python, bad.tasks, 120),
    (task_on_the_command_line, bad.factories, 130),
    (options, st.data(), 110),
    (files, st.data(), 70),
    (arguments_in_python, bad.wrong_calls, 90),
    (any_kind_in_python, bad.doors, 120),
]


@pytest.mark.parametrize(("check", "strategy", "number"), KINDS, ids=[kind[0].__name__ for kind in KINDS])
def test_the_same_bad_inputs_every_time(check, strategy, number):
    settings(max_examples=number // 4, derandomize=True, **OPTIONS)(given(strategy)(check))()


@pytest.mark.slow
@pytest.mark.parametrize(("check", "strategy", "number"), KINDS, ids=[kind[0].__name__ for kind in KINDS])
def test_new_bad_inputs(check, strategy, number):
    drawn = int(os.environ.get("POPRISK_SEED") or random.SystemRandom().randrange(10**9))
    print(f"POPRISK_SEED={drawn}")
    seed(drawn)(settings(max_examples=number, **OPTIONS)(given(strategy)(check)))()
