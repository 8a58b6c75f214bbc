# type: ignore  # the project checks the types of src and lab/src
"""What calls announce and what limits them: measured on a clock that the tests move."""

from functools import partial

import pytest
import torch
from torch import nn

from poprisk import Problem, population_risk, train
from poprisk._core import costs, progress_faces
from poprisk._core.costs import in_bytes, working_memory
from poprisk._core.progress import Progress, limits, tracked
from poprisk.errors import HyperparameterError, LimitError
from poprisk.risk._influence import exclusion_sweep


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def work(self, items, seconds):
        for item in items:
            yield item
            self.now += seconds


@pytest.fixture
def clock():
    return Clock()


def done(clock, count, seconds, name="parts"):
    for _ in clock.work(tracked(range(count), name), seconds):
        pass


def test_long_work_is_announced_once_its_speed_is_known(clock, capsys):
    with limits("call", keeps="half", clock=clock):
        done(clock, 40, 1.0)
    first, *rest = capsys.readouterr().err.splitlines()
    assert first.startswith("parts: about 38 s and ")
    assert first.endswith(" GB; Ctrl-C keeps half")
    assert len(rest) >= 9
    assert all(line.startswith("parts: ") for line in rest)


def test_the_first_part_may_be_slow(clock, capsys):
    with limits("call", clock=clock), Progress("parts", 100, patient=True) as progress:
        clock.now += 9.0
        progress.advance()
        for _ in range(99):
            clock.now += 1.0
            progress.advance()
    assert "parts: about 98 s and" in capsys.readouterr().err


def test_short_work_and_silent_calls_say_nothing(clock, capsys):
    with limits("call", clock=clock):
        done(clock, 9, 1.0)
    with limits("call", progress=False, clock=clock):
        done(clock, 400, 1.0)
    assert capsys.readouterr().err == ""


def test_work_over_the_budget_is_refused_when_its_speed_is_known(clock):
    with limits("call", budget=30, progress=False, clock=clock):
        done(clock, 20, 1.0)
        with pytest.raises(
            LimitError, match=r"^others would take about 58 s more, over the budget of 30 s: use budget="
        ):
            done(clock, 60, 1.0, "others")
    assert clock.now == 122.0


def test_inner_calls_have_the_limits_of_the_outer_one(clock):
    with limits("outer", budget=5, progress=False, clock=clock), limits("inner", budget=9e9, clock=clock) as found:
        assert (found.name, found.budget, found.shown) == ("outer", 5, False)
    with limits("next", clock=clock) as found:
        assert found.budget is None


def test_a_beat_says_what_is_under_way(clock, capsys, monkeypatch):
    monkeypatch.setattr(progress_faces, "BEAT", 4.0)
    with (
        Progress("call", 0, patient=True, clock=clock) as call,
        Progress("part", 10, patient=True, clock=clock) as part,
    ):
        part.advance(3)
        clock.now += 3.0
        call._innermost.beat()
        assert capsys.readouterr().err == ""
        clock.now += 1.0
        call._innermost.beat()
        assert capsys.readouterr().err == "part: 4 s so far, 3 of 10\n"
        call._innermost.beat()
        assert capsys.readouterr().err == ""


def test_memory(monkeypatch):
    monkeypatch.setattr(costs, "memory_used", lambda: 10**9)
    assert working_memory(2**31) == 2**31
    with limits("call", memory="1.6 GB", progress=False):
        assert working_memory(2**31) == 300_000_000
        assert working_memory(10**6) == 10**6
    with (
        limits("call", memory=10**9, progress=False),
        pytest.raises(LimitError, match=r"memory=1 GB is too little for call.* holds 1.00 GB .*allow 1.3 GB or more"),
    ):
        working_memory(2**31)
    for wrong in ("2 XB", "", 0, -1, float("nan"), True, "GB"):
        with pytest.raises(HyperparameterError, match="memory must be None, a number of bytes, or words"):
            in_bytes(wrong)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"), torch.OutOfMemoryError("CUDA")]
)
def test_out_of_memory_is_one_line_that_says_what_to_lower(error):
    said = r"^call ran out of memory \(.*\): set a limit with memory=…, or use fewer parts$"
    with pytest.raises(LimitError, match=said), limits("call", progress=False, lower="fewer parts"):
        raise error


@pytest.fixture(scope="module")
def run():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(100, 3, generator=generator)
    y = x[:, :1] + 0.5 * torch.randn(100, 1, generator=generator)
    problem = Problem(partial(nn.Linear, 3, 1), "squared", x, y)
    return train(problem, partial(torch.optim.SGD, lr=0.1), 12, progress=False)


@pytest.mark.parametrize("enough", [True, False])
def test_ctrl_c_keeps_the_examples_followed_so_far(run, monkeypatch, enough):
    monkeypatch.setattr(exclusion_sweep, "FEWEST", 32 if enough else 60)
    monkeypatch.setattr("poprisk.risk._influence.linearized_run.LinearizedRun.columns_at_a_time", lambda _: 20)
    sweep, calls = exclusion_sweep.ExclusionSweep._advance, []

    def interrupted(self, step):
        calls.append(step)
        if len(calls) == 12 * 2 + 5:  # in the third turn of 20 examples
            raise KeyboardInterrupt
        sweep(self, step)

    monkeypatch.setattr(exclusion_sweep.ExclusionSweep, "_advance", interrupted)
    if not enough:
        with pytest.raises(KeyboardInterrupt):
            population_risk(run, "exclusion", progress=False)
        return
    risk = population_risk(run, "exclusion", progress=False)
    assert "40 of 100 examples were followed" in risk.reason
    assert risk.valid


def test_a_method_over_the_budget_is_left_out(run, monkeypatch):
    def refused(self, work, seconds):
        raise LimitError(f"{work} would take too long")

    monkeypatch.setattr(costs.Limits, "check", refused)
    monkeypatch.setattr("poprisk._core.progress._MEASURED", 0.0)
    with pytest.raises(LimitError, match="would take too long"):
        population_risk(run, "exclusion", budget=1, progress=False)
