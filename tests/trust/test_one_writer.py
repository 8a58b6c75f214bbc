"""One process writes a run, the others are told who; what was written survives kills, signals and damage."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from cli_calls import call, start
from sent_runs import manifest_of, problem, recorded, sent

from poprisk import Problem, Recorder, Run, train
from poprisk.errors import DataError, RunError

SGD = partial(torch.optim.SGD, lr=0.1)
HOLDER = """
import sys
from poprisk._core.store import WriterLock
with WriterLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""
SLOW = """
import time
import sent_runs
from poprisk import Problem
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        time.sleep(0.02)
        return self.linear(x)

def make():
    made = sent_runs.problem()
    return Problem(Slow, "cross_entropy", made.inputs, made.targets, name="slow")
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("recorded") / "run")


def holder(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_says_who_writes_and_leaves(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with holder(tmp_path / "run") as other:
        try:
            with pytest.raises(RunError, match=rf"is being written by process {other.pid} on \S+ since"):
                train(problem(), SGD, 4, path=tmp_path / "run", progress=False)
            words = ("train", "sent_runs:problem", "--steps", 4, "-o", tmp_path / "run")
            code, out, err = call(capsys, *words)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert f"process {other.pid}" in err
        finally:
            other.kill()
    run = train(problem(), SGD, 4, path=tmp_path / "run", progress=False)  # the dead hold nothing
    assert run.num_steps == 4
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == [
        "manifest.json", "segment-00000000.safetensors", "start.safetensors",
    ]  # fmt: skip


def test_a_recorder_that_was_left_behind_in_this_process_gives_way(tmp_path):
    model = problem().module()
    optimizer = SGD(model.parameters())
    recorder = Recorder(tmp_path / "run", model, optimizer, problem=problem(), segment_steps=2)

    def step(recorder, model, optimizer):
        with recorder.step(torch.arange(4)):
            optimizer.zero_grad()
            recorder.problem.batch_loss(model(recorder.problem.inputs[:4]), recorder.problem.targets[:4]).backward()
            optimizer.step()

    for _ in range(4):
        step(recorder, model, optimizer)
    recorder.writer.wait()
    model = problem().module()
    other = SGD(model.parameters())
    again = Recorder(tmp_path / "run", model, other, problem=problem(), segment_steps=2, resume=True)
    assert again.num_steps == 4
    step(recorder, recorder._model, optimizer)
    with pytest.raises(RunError, match="another recorder"):
        recorder.flush()
    with pytest.raises(RunError, match="another recorder"):
        recorder.close()
    step(again, model, other)
    assert again.close().num_steps == 5
    Run.load(tmp_path / "run").verify()


def test_segments_close_by_time_and_end_as_if_they_had_not(tmp_path):
    now = [0.0]
    by_size = train(problem(), SGD, 10, batch_size=4, path=tmp_path / "size", segment_steps=4, progress=False)
    seen = []

    def after(k, loss):
        now[0] += 16.0
        found = Run.load(tmp_path / "time") if k > 1 else None
        seen.append(found.num_steps if found else 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poprisk.runs._writer.now", lambda: now[0])
        patch.setattr("poprisk.runs._writer.RunWriter.flush", waiting())
        train(problem(), SGD, 10, batch_size=4, path=tmp_path / "time", segment_steps=4, progress=after)
    assert all(k - kept <= 2 for k, kept in zip(range(1, 11), seen, strict=True)), seen
    here, there = manifest_of(tmp_path / "size"), manifest_of(tmp_path / "time")
    assert here["segments"] == there["segments"]  # the same bytes
    assert {f.name for f in (tmp_path / "size").iterdir()} == {f.name for f in (tmp_path / "time").iterdir()}
    assert by_size.num_steps == 10


def waiting():
    """Writing that is done when it returns."""
    from poprisk.runs._writer import RunWriter

    flush = RunWriter.flush

    def flushed(self, **options):
        flush(self, **options)
        self.wait()

    return flushed


def test_a_run_killed_between_segments_is_gone_on_with(tmp_path):
    now = [0.0]

    class Killed(Exception):
        pass

    def after(k, loss):
        now[0] += 31.0
        if k == 7:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poprisk.runs._writer.now", lambda: now[0])
        patch.setattr("poprisk.runs._writer.RunWriter.flush", waiting())
        patch.setattr("poprisk.runs._writer.RunWriter.finish", lambda self, **_: self.lock.release())  # as if killed
        with pytest.raises(Killed):
            train(problem(), SGD, 10, batch_size=4, path=tmp_path / "run", segment_steps=100, progress=after)
    assert Run.load(tmp_path / "run").num_steps == 7
    run = train(problem(), SGD, 10, batch_size=4, path=tmp_path / "run", segment_steps=100, progress=False, resume=True)
    other = train(problem(), SGD, 10, batch_size=4, progress=False)
    assert all(torch.equal(run.weights(k), other.weights(k)) for k in range(11))
    assert torch.equal(run.losses, other.losses)
    Run.load(tmp_path / "run").verify()


@pytest.mark.parametrize("sent_signal", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_a_training_with_all_its_steps(tmp_path, sent_signal):
    (tmp_path / "slow_task.py").write_text(SLOW)
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    process = start("train", "slow_task.py:make", "--steps", 5000, "-o", "run", cwd=tmp_path, env=environment)
    manifest = tmp_path / "run" / "manifest.json"
    deadline = time.monotonic() + 60
    while not manifest.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(sent_signal)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 130, err
    assert "steps are kept in run; the same command continues from there" in err
    assert Run.load(tmp_path / "run").num_steps >= 1
    assert "Traceback" not in err


def test_a_termination_ends_train_like_an_interrupt(tmp_path):
    def after(k, loss):
        if k == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        train(problem(), SGD, 10, batch_size=4, path=tmp_path / "run", progress=after)
    assert Run.load(tmp_path / "run").num_steps == 3
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("damage", ["changed", "missing", "short"])
def test_a_damaged_run_is_opened_up_to_its_last_good_segment(whole, tmp_path, damage, capsys):
    run = sent(whole, tmp_path)
    file, good = run / "segment-00000005.safetensors", Run.load(run)
    weights = [good.weights(k) for k in range(6)]
    content = bytearray(file.read_bytes())
    content[-3] ^= 4
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content if damage == "changed" else content[:-3])
    with pytest.raises(DataError, match="segment-00000005"):
        Run.load(run).verify()
    salvaged = Run.load(run, salvage=True)
    assert salvaged.num_steps == 5
    assert salvaged.kept is None
    assert all(torch.equal(salvaged.weights(k), w) for k, w in enumerate(weights))
    code, out, err = call(capsys, "runs", "repair", run)
    assert code == 0, err
    assert "5 of 12 steps" in out
    opened = Run.load(run)
    opened.verify()
    assert opened.num_steps == 5
    code, out, err = call(capsys, "runs", "repair", run, "--json")
    assert (code, json.loads(out)["steps"], json.loads(out)["lost"]) == (0, 5, 0)


def test_a_run_without_a_good_start_cannot_be_salvaged(whole, tmp_path):
    run = sent(whole, tmp_path)
    (run / "start.safetensors").unlink()
    with pytest.raises(DataError, match=r"start\.safetensors is missing"):
        Run.load(run, salvage=True)


@pytest.mark.parametrize("place", ["nowhere", "folder", "file"])
def test_only_runs_are_repaired(tmp_path, capsys, place):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    code, out, err = call(capsys, "runs", "repair", tmp_path / place)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{place} is not a recorded run: it has no manifest; pass the directory of" in err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_earlier_failure_before_the_first_step_is_no_run(tmp_path, capsys):
    run = train(problem(), SGD, 2, path=tmp_path / "run", progress=False)
    manifest = run.manifest
    manifest |= {"segments": [], "num_steps": 0, "closed": False}
    run._storage.write_manifest(manifest)
    assert train(Problem.build(problem), SGD, 3, path=tmp_path / "run", progress=False, resume=True).num_steps == 3
