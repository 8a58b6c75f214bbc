"""``poprisk jobs``: one voice with the command line; workers, a scheduler and a client in processes of their own."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import dask
import job_problems
import numpy as np
import pytest
import torch

import distributed
from poprisk._core.progress import Progress
from poprisk._core.store import trust
from poprisk.cli import main
from poprisk.jobs import JobPlan, job_status, open_matrix
from poprisk.runs import Problem, train


@pytest.fixture
def planned(tmp_path):
    """Kernels of a run, six tiles each."""
    problem = Problem.build(job_problems.blobs)
    run = train(problem, torch.optim.SGD, 1, batch_size=5, path=tmp_path / "run", progress=False)
    JobPlan(tmp_path / "store").train_kernel(run, [0, 1], side=7)
    return tmp_path / "store"


def call(*arguments):
    with pytest.raises(SystemExit) as leaving:
        main(["jobs", *(str(each) for each in arguments)])
    return leaving.value.code


def test_resume_then_status(planned, capfd, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert call("status", planned) == 0
    zero = "train kernel at step 0: 0 of 6 done\ntrain kernel at step 1: 0 of 6 done\nin all: 0 of 12 done\n"
    assert capfd.readouterr().out == zero
    assert call("resume", planned, "--workers", "1") == 0
    out, err = capfd.readouterr()
    assert re.fullmatch(r"did 12 of 12 jobs in \d+ s; all are done\n", out)
    assert "jobs: 12 of 12 done" in err
    assert call("resume", planned, "--verify", "--workers", "1") == 0
    assert capfd.readouterr().out.startswith("did 0 of 12 jobs")
    assert call("status", planned) == 0
    assert "in all: 12 of 12 done\n" in capfd.readouterr().out


def test_errors_are_one_line_with_an_exit_code(tmp_path, capfd):
    for command in ("resume", "status"):
        assert call(command, tmp_path / "nothing") == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.startswith("poprisk: error: ")
        assert "holds no jobs" in err
        assert err.count("\n") == 1
    assert call("resume") == 2
    assert "Missing argument 'STORE'" in capfd.readouterr().err
    assert call("work") == 2
    assert "Missing option '--scheduler'" in capfd.readouterr().err


def test_a_task_of_a_folder_that_python_does_not_search(tmp_path, capfd, monkeypatch):
    """The installed command does not search the current directory, as python task.py does that of the script."""
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "task_elsewhere.py").write_text(
        "from job_problems import blobs\n\ndef points():\n    return blobs()\n"
    )
    with monkeypatch.context() as searched:
        searched.syspath_prepend(tmp_path / "away")
        problem = Problem.build(importlib.import_module("task_elsewhere").points)
        run = train(problem, torch.optim.SGD, 1, path=tmp_path / "run", progress=False)
        JobPlan(tmp_path / "store").train_kernel(run, 0)
    monkeypatch.delitem(sys.modules, "task_elsewhere")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert call("resume", tmp_path / "store", "--workers", "1") == 2
    assert "its module is not found from here: add its folder to PYTHONPATH" in capfd.readouterr().err
    monkeypatch.syspath_prepend(tmp_path / "away")
    assert call("resume", tmp_path / "store", "--workers", "1") == 0


def test_runs_that_someone_sent_are_done_with_trust_or_a_problem_of_ones_own(tmp_path, capfd, monkeypatch):
    """As for the other commands: what a run names as its task is not imported before the person allows it."""
    task = tmp_path / "task_of_jobs.py"
    task.write_text("from job_problems import blobs\n\ndef points():\n    return blobs()\n")
    run = train(Problem.build(f"{task}:points"), torch.optim.SGD, 1, path=tmp_path / "run", progress=False)
    for name in ("one", "two"):
        JobPlan(tmp_path / name).train_kernel(run, 0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(trust, "_MADE", set())
    monkeypatch.setenv("POPRISK_STATE_DIR", str(tmp_path / "of another person"))
    assert call("resume", tmp_path / "one", "--workers", "1") == 2
    assert "--trust" in capfd.readouterr().err
    assert call("resume", tmp_path / "one", "--workers", "1", "--problem", f"{task}:points") == 0
    monkeypatch.setattr(trust, "_MADE", set())
    assert call("resume", tmp_path / "two", "--workers", "1") == 2
    assert call("resume", tmp_path / "two", "--workers", "1", "--trust") == 0


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1:1", "nosuch://127.0.0.1:8786"])
def test_a_scheduler_that_does_not_answer_is_one_line(planned, capfd, monkeypatch, address):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with dask.config.set({"distributed.comm.timeouts.connect": "0.5s"}):
        for command in (("resume", planned), ("work",)):
            assert call(*command, "--scheduler", address) == 2
            err = capfd.readouterr().err
            assert err.startswith(f"poprisk: error: no scheduler at '{address}' (")
            assert err.count("\n") == 1
    monkeypatch.setitem(sys.modules, distributed.__name__, None)
    for command in (("resume", planned), ("work",)):
        assert call(*command, "--scheduler", address) == 2
        assert "a Dask cluster needs distributed, which is not installed" in capfd.readouterr().err


def test_a_matrix_of_an_earlier_version_is_converted(tmp_path, capfd):
    np.save(tmp_path / "old.npy", np.eye(5, dtype=np.float32))
    assert call("convert", tmp_path / "old.npy", tmp_path / "store", "--name", "old kernel", "--symmetric") == 0
    assert capfd.readouterr().out.startswith("old kernel: in ")
    assert torch.equal(open_matrix(tmp_path / "store", "old kernel").to_dense(), torch.eye(5))


def start(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", *map(str, arguments)], env=environment, text=True, **options)


@pytest.mark.slow
def test_a_scheduler_a_worker_and_a_client_of_the_command_line(planned, tmp_path):
    """As on a cluster, each in a process of its own."""
    file = tmp_path / "scheduler.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    options = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", file)
    started = [start("dask", "scheduler", *options, **quiet)]
    try:
        while not file.exists():
            time.sleep(0.1)
        address = re.search(r'"address": "(\S+?)"', file.read_text()).group(1)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        done: Any = start("poprisk", "jobs", "resume", planned, "--scheduler", address, **pipes)
        assert "waiting for a first worker" in done.stderr.readline()
        started.append(start("poprisk", "jobs", "work", "--scheduler", address, "--memory-limit", "1GiB", **quiet))
        assert re.fullmatch(r"did 12 of 12 jobs in \d+ s; all are done\n", done.communicate(timeout=600)[0])
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait()


@pytest.mark.slow
def test_a_client_that_is_told_to_end_keeps_what_is_done(tmp_path):
    """SIGTERM, as SLURM sends it: the finished tiles stay, and the lock is free."""
    problem = Problem.build(job_problems.blobs, n=60, inputs=40, width=300, outputs=10)
    run = train(problem, torch.optim.SGD, 1, batch_size=5, path=tmp_path / "run", progress=False)
    JobPlan(tmp_path / "store").train_kernel(run, 0, side=1)
    client = start("poprisk", "jobs", "resume", tmp_path / "store", "--workers", "1", stderr=subprocess.PIPE)
    while job_status(tmp_path / "store")["train kernel at step 0"][0] < 3:
        time.sleep(0.05)
    client.terminate()
    assert "poprisk: interrupted; finished jobs are stored" in client.communicate(timeout=600)[1]
    assert client.returncode == 143
    done, total = job_status(tmp_path / "store")["train kernel at step 0"]
    assert 3 <= done < total


def test_progress_has_the_time_left(capfd):
    with Progress("jobs", 10, counted="{done} of {total} done") as progress:
        progress.update(4, worked=False)
        progress.update(5)
        progress.update(10)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "jobs: 4 of 10 done"
    assert re.fullmatch(r"jobs: 5 of 10 done, about \d+ s left", lines[1])
    assert lines[2] == "jobs: 10 of 10 done"
