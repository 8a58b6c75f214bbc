"""A run on disk: opened again, gone on with, moved, damaged, and killed at any moment."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import tiny_problems
import torch
from tiny_problems import classification, regression, tied, with_dropout

from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._run import Run
from poprisk.runs._training import draw_batch, train

HERE = Path(__file__).parent
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = partial(torch.optim.Adam, lr=0.05)
quiet = partial(train, progress=False, batch_size=4)


def files(path):
    """Names and hashes of a run's files; the manifest beside them has dates."""
    manifest = json.loads((Path(path) / "manifest.json").read_text())
    return [manifest["start"], *manifest["segments"]]


def assert_same_run(one, other):
    assert one.num_steps == other.num_steps
    for k in range(one.num_steps + 1):
        assert torch.equal(one.weights(k), other.weights(k))
        assert torch.equal(one.buffer(k), other.buffer(k))
    for k in range(one.num_steps):
        a, b = one.step(k), other.step(k)
        for name in a.__dataclass_fields__:
            torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=0, atol=0)
    assert torch.equal(one.losses, other.losses)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize(
    "make",
    [
        SGD,
        ADAM,
        partial(PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha=0.1, gated_decay=True), weight_decay=0.01, lr=0.05),
    ],
)
def test_disk_and_memory_hold_the_same(tmp_path, every, make):
    problem = Problem.build(classification)
    kept = quiet(problem, make, 10, path=tmp_path / "run", every=every, segment_steps=3 if every == 1 else None)
    memory = quiet(problem, make, 10, every=1)
    loaded = Run.load(tmp_path / "run")
    assert_same_run(kept, memory)
    assert_same_run(loaded, memory)
    assert loaded.problem.name == "tiny"
    assert loaded.problem.test is not None
    loaded.verify()
    assert loaded.checkpoints == ([0, 3, 6, 9, 10] if every == 1 else [0, 4, 8, 10])
    assert loaded.manifest["closed"]
    assert {"torch", "poprisk", "cpu"} <= loaded.manifest["environment"].keys()
    assert {"threads", "cpu_capability", "torch_seed"} <= loaded.manifest["numerics"].keys()


def test_saved_from_memory(tmp_path):
    run = quiet(classification(), ADAM, 7)
    saved = run.save(tmp_path / "copy")
    assert_same_run(saved, run)
    assert saved.path == tmp_path / "copy"
    assert "7 steps, 51 weights, dense" in repr(saved)
    with pytest.raises(RunError, match="already holds a run"):
        run.save(tmp_path / "copy")


def test_a_problem_that_cannot_be_imported_must_be_given(tmp_path):
    inputs, labels = tiny_problems.tiny_data()
    problem = Problem(lambda: tiny_problems.make_mlp(width=6), "cross_entropy", inputs, labels, name="made here")
    quiet(problem, SGD, 4, path=tmp_path / "run", every=2)
    run = Run.load(tmp_path / "run")
    assert run.weights(2).shape == (51,)  # what is recorded opens without it
    with pytest.raises(
        RunError, match=r"open the run with Run.load\(path, problem=…\): problem 'made here' cannot be rebuilt"
    ):
        run.problem
    with pytest.raises(RunError, match="problem=…"):
        run.step(1)  # between checkpoints
    assert Run.load(tmp_path / "run", problem=problem).step(1).batch.shape == (4,)
    other = Problem(tiny_problems.make_mlp, "cross_entropy", inputs + 1, labels)
    with pytest.raises(DataError, match="not trained on the examples"):
        Run.load(tmp_path / "run", problem=other)
    with pytest.raises(DataError, match="trained with loss='cross_entropy'"):
        Run.load(tmp_path / "run", problem=Problem(tiny_problems.make_mlp, "squared", inputs, labels))


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
@pytest.mark.parametrize("name", ["start.safetensors", "segment-00000004.safetensors", "manifest.json"])
def test_damage_is_refused_with_the_files_name(tmp_path, name, damage):
    quiet(classification(), ADAM, 10, path=tmp_path, every=1, segment_steps=4)
    file = tmp_path / name
    content = bytearray(file.read_bytes())
    if damage == "missing":
        file.unlink()
    elif damage == "truncated":
        file.write_bytes(content[: len(content) // 2])
    else:
        spot = content.index(b'"num_steps": 10') + 13 if name == "manifest.json" else len(content) - 5
        content[spot] ^= 1
        file.write_bytes(content)
    with pytest.raises(DataError, match=name.replace(".", r"\.") if name != "manifest.json" else "manifest"):
        Run.load(tmp_path).verify()


def test_foreign_directories_are_refused(tmp_path):
    with pytest.raises(DataError, match="it has no manifest"):
        Run.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"kind": "trial"}')
    with pytest.raises(DataError, match="not the manifest of a run"):
        Run.load(tmp_path)
    (tmp_path / "manifest.json").write_text('{"kind": "run", "format_version": 99}')
    with pytest.raises(DataError, match="format_version 99"):
        Run.load(tmp_path)
    (tmp_path / "manifest.json").rename(tmp_path / "thesis.tex")
    with pytest.raises(RunError, match=r"holds other files \(thesis.tex\)"):
        quiet(classification(), SGD, 2, path=tmp_path)
    assert [f.name for f in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_with_another_run_is_refused(tmp_path):
    problem = classification()
    quiet(problem, SGD, 4, path=tmp_path, every=2)
    before = files(tmp_path)
    with pytest.raises(RunError, match="already holds a run"):
        quiet(problem, SGD, 4, path=tmp_path, every=2)
    again = partial(quiet, path=tmp_path, resume=True)
    for message, call in {
        "every was 2, is 1": partial(again, problem, SGD, 6),
        "seed was 0, is 1": partial(again, problem, SGD, 6, every=2, seed=1),
        "optimizer was torch.optim.SGD, is torch.optim.Adam": partial(again, problem, ADAM, 6, every=2),
        "problem differs": partial(again, regression(), SGD, 6, every=2),
        "layout differs": partial(again, tied(), SGD, 6, every=2),
        "training was .*'batch_size': 4": partial(again, problem, SGD, 6, every=2, batch_size=3),
    }.items():
        with pytest.raises(RunError, match=f"another run .{message}"):
            call()
    assert files(tmp_path) == before


@pytest.mark.parametrize("problem", [classification(), classification(augmented=True), with_dropout()])
@pytest.mark.parametrize("every", [1, 5])
def test_going_on_leads_to_the_same_bits(tmp_path, problem, every):
    options = {"every": every, "clip_norm": 0.5, "schedule": lambda k: 1 / (k + 1), "accumulate": 2}
    options["segment_steps"] = 5 if every == 1 else None
    make = partial(PopRiskAdamW, gate=Gate("soft", strength=1.0, alpha=0.1), weight_decay=0.01, lr=0.1)
    quiet(problem, make, 20, path=tmp_path / "whole", **options)
    for steps in (10, 10, 20):  # the second time there is nothing to do
        run = quiet(problem, make, steps, path=tmp_path / "parts", resume=True, **options)
        assert run.num_steps == steps
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_a_users_loop_goes_on(tmp_path):
    problem = classification()

    def loop(path, stop, resume):
        model = problem.module(torch.float64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05))
        with Recorder(path, model, optimizer, problem=problem, every=4, resume=resume) as recorder:
            for k in range(recorder.num_steps, stop):
                optimizer.param_groups[0]["lr"].fill_(0.05 / (k + 1))
                index = draw_batch(12, 4, 0, k)
                with recorder.step(index):
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(model(problem.inputs[index]), problem.targets[index]).backward()
                    optimizer.step()
        return recorder.run

    loop(tmp_path / "whole", 16, resume=False)
    loop(tmp_path / "parts", 8, resume=True)
    run = loop(tmp_path / "parts", 16, resume=True)
    assert files(tmp_path / "parts") == files(tmp_path / "whole")
    assert run.options(9)[0]["lr"] == pytest.approx(0.05 / 10)


def test_an_exception_keeps_what_was_done(tmp_path):
    problem = classification()
    with pytest.raises(ZeroDivisionError):
        quiet(problem, SGD, 20, path=tmp_path, every=4, schedule=lambda k: 1 / (10 - k))
    run = Run.load(tmp_path, problem=problem)
    assert run.num_steps == 10
    assert not run.manifest["closed"]
    assert run.step(9).batch.shape == (4,)


def test_batches_are_epochs():
    drawn = torch.cat([draw_batch(10, 3, 0, k) for k in range(6)])
    assert len(set(drawn[:9].tolist())) == len(set(drawn[9:].tolist())) == 9
    assert not torch.equal(drawn[:9], drawn[9:])
    assert not torch.equal(drawn[:3], draw_batch(10, 3, 1, 0))
    with pytest.raises(DataError, match="between 1 and the 10"):
        draw_batch(10, 11, 0, 0)


def test_training_arguments():
    problem = classification()
    for wrong, message in {
        "steps": "steps must be a whole number",
        "batch_size": "batch_size must lie between 1 and the 12",
        "accumulate": "accumulate must divide batch_size=4",
    }.items():
        with pytest.raises(HyperparameterError, match=message):
            train(problem, SGD, **{"steps": 3, "batch_size": 4, "progress": False, wrong: 0})
    with pytest.raises(RunError, match="resume=True needs path="):
        quiet(problem, SGD, 3, resume=True)


WRONG = [
    ({"batch_size": "4"}, "batch_size must lie between 1 and the 12 training examples, got '4'"),
    ({"batch_size": 4.0}, "batch_size must lie between"),
    ({"accumulate": None}, "accumulate must divide batch_size=12, got None"),
    ({"clip_norm": -1.0}, "clip_norm must be a positive number, got -1.0: use None"),
    ({"clip_norm": float("nan")}, "clip_norm must be a positive number"),
    ({"seed": "a"}, "seed must be a whole number of 64 bits, got 'a'"),
    ({"every": None}, "every must be a whole number, at least 1, got None"),
    ({"dtype": "float64"}, "dtype must be a floating-point type of torch, got float64"),
    ({"dtype": torch.int8}, "dtype must be a floating-point type"),
    ({"path": 3}, "path must be of type .*, got int"),
    ({"schedule": "cosine"}, "schedule must be a function of .step., got str"),
    ({"schedule": lambda k: float("nan")}, "schedule must return a finite factor, at least 0, got nan"),
    ({"schedule": lambda k: None}, "schedule must return a finite factor"),
    ({"optimizer": None}, "optimizer must be a function of .parameters., got NoneType"),
    ({"optimizer": lambda parameters: None}, "optimizer must return a torch optimizer, got NoneType"),
    ({"optimizer": partial(torch.optim.SGD, lr=float("nan"))}, "learning rates must be finite, got .nan."),
    ({"hold_back": 0.2, "tail": "a"}, "tail must be in .0, 1., or several such numbers, got 'a'"),
    ({"problem": None}, "problem must be a Problem, got NoneType: make one"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_training_arguments_of_other_kinds(wrong, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users have no such checks
    with pytest.raises((DataError, HyperparameterError), match=message) as caught:
        train(**{"problem": classification(), "optimizer": SGD, "steps": 2, "progress": False} | wrong)
    assert str(caught.value).isprintable()


def test_a_problem_is_no_path(tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    quiet(classification(), SGD, 2, path=tmp_path)
    with pytest.raises(DataError, match=r"problem must be Problem or None, got .*: pass the one .*Problem\.build"):
        Run.load(tmp_path, problem="task.py:make_task")
    run = Run.load(tmp_path, problem=classification())
    for k in ("last", 1.5, None, 3):
        with pytest.raises(DataError, match=f"the run has 2 steps: k must lie in 0 … 2, got {k}"):
            run.weights(k)
    assert torch.equal(run.weights(np.int64(2)), run.weights(2))
    with pytest.raises(DataError, match="the targets must be numbers, got str: number the classes"):
        classification().with_targets("labels.npy")
    with pytest.raises(DataError, match=r"the index of an example must lie in 0 … 11, got 1\.5"):
        classification().show(1.5)


def test_training_takes_the_numbers_of_numpy(tmp_path, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    run = quiet(classification(), SGD, np.int64(2), batch_size=np.int64(4), seed=np.int64(1), path=tmp_path / "run")
    same = quiet(classification(), SGD, 2, batch_size=4, seed=1)
    assert run.manifest["training"] == same.manifest["training"]
    assert torch.equal(run.weights(2), same.weights(2))


def test_progress_without_a_terminal(capsys):
    train(classification(), SGD, 30, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("tiny: step 30 of 30, loss ")


NURSERY = """
# Imports once, then forks: each child continues the training and is killed some steps and a moment later.
import functools, json, os, random, signal, sys, time
import torch
import tiny_problems
from poprisk.runs import Problem, Run, train

folder, kills = sys.argv[1], int(sys.argv[2])
problem = Problem.build(tiny_problems.classification)
make = functools.partial(torch.optim.AdamW, lr=0.01)
train(problem, make, 3, batch_size=4, progress=False)
chance, left = random.Random(0), {1: [], 5: []}
for every in [1, 5] * kills:
    path = os.path.join(folder, str(every))
    listen, tell = os.pipe()
    child = os.fork()
    if child == 0:
        segment = 5 if every == 1 else None
        train(problem, make, 1_000_000, batch_size=4, path=path, every=every, segment_steps=segment, resume=True,
              progress=lambda *_: os.write(tell, b"."))
        os._exit(0)
    last = len(left[every]) == kills - 1
    for _ in range(chance.randrange(12 if last else 0, 30)):  # a file of five steps is on disk after ten
        os.read(listen, 1)
    time.sleep(chance.uniform(0.0, 0.01))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    os.close(listen), os.close(tell)
    there = os.path.exists(os.path.join(path, "manifest.json"))
    run = Run.load(path) if there else None
    if run is not None:
        run.verify()
    left[every].append(run.num_steps if there else None)
print(json.dumps(left))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_processes_lead_to_the_same_bits(tmp_path, kills):
    places = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", NURSERY, str(tmp_path), str(kills)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    problem, make = Problem.build(classification), partial(torch.optim.AdamW, lr=0.01)
    for every, left in json.loads(done.stdout.splitlines()[-1]).items():
        print(f"every={every}: steps on disk after each kill {left}")
        steps = [n or 0 for n in left]
        assert len(left) == kills
        assert steps == sorted(steps)  # nothing that was on disk was lost
        assert steps[-1] > 0  # and the kills did come in the middle
        options = {"every": int(every), "segment_steps": 5 if every == "1" else None}
        quiet(problem, make, steps[-1] + 7, path=tmp_path / every, resume=True, **options)
        quiet(problem, make, steps[-1] + 7, path=tmp_path / "whole" / every, **options)
        assert files(tmp_path / every) == files(tmp_path / "whole" / every)
        assert not list((tmp_path / every).glob(".*.tmp"))


def test_a_disk_that_fails_is_heard_of(tmp_path, monkeypatch):
    problem = classification()

    def full(*_):
        raise OSError(28, "No space left on device")

    recorded = quiet(problem, SGD, 4, path=tmp_path / "run", every=2)
    monkeypatch.setattr("poprisk.runs._storage.write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        quiet(problem, SGD, 12, path=tmp_path / "run", every=2, resume=True)
    assert Run.load(tmp_path / "run").num_steps == recorded.num_steps
