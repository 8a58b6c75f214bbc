"""Outputs that are closed or full, and runs that vanish while they are read: an exit code and at most one line."""

import os
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from cli_calls import call

from poprisk import Problem, Run, train
from poprisk._core.store import tensors
from poprisk.errors import DataError
from poprisk.report import KeptAnalysis

SGD = partial(torch.optim.SGD, lr=0.1)
TASK = """
import torch
from torch import nn
from poprisk import Problem

def make():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    return Problem(lambda: nn.Linear(3, 2), "cross_entropy", x, (x[:, 0] > 0).long())
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    train(Problem.build(f"{tmp_path}/task.py:make"), SGD, 6, path=tmp_path / "run", segment_steps=2, progress=False)
    return tmp_path / "run"


def ended(out, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "poprisk", *map(str, arguments)],
        stdout=out,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("words", [("audit", "{run}"), ("runs", "{run}", "--json"), ("report", "{run}"), ("--help",)])
def test_an_output_that_nobody_reads_on_ends_quietly(run, tmp_path, monkeypatch, words):
    """As in ``poprisk audit RUN | head -1``: 141, the code of a program that SIGPIPE ends."""
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        code, err = ended(closed, *(each.format(run=run) for each in words))
    assert code == 141
    assert "poprisk" not in err
    assert "Traceback" not in err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_an_output_that_is_full_is_one_line(run):
    with open("/dev/full", "w") as full:
        code, err = ended(full, "audit", run)
    assert code == 2
    said = [line for line in err.splitlines() if not line.startswith("audit: ")]  # its progress
    assert len(said) == 1
    assert said[0].startswith("poprisk: error: ")
    assert "No space left on device; check the free space" in said[0]


@pytest.mark.parametrize("command", ["analyze", "report"])
@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_is_removed_while_it_is_analyzed_is_one_line_and_not_made_again(
    run, tmp_path, capsys, monkeypatch, command, after
):
    put, calls = KeptAnalysis.put, []

    def removed(self, name, part):
        calls.append(name)
        if len(calls) == after:
            shutil.rmtree(run)
        return put(self, name, part)

    monkeypatch.setattr(KeptAnalysis, "put", removed)
    output = ["-o", tmp_path / "page.html"] if command == "report" else []
    code, out, err = call(capsys, command, run, "--budget", 1, *output)
    said = [line for line in err.splitlines() if not line.startswith("analysis: ")]
    assert (code, out) == (2, "")
    assert said == [f"poprisk: error: {run} was removed while it was read: restore it from a copy, or train again"]
    assert len(calls) == after
    assert not run.exists()
    assert not (tmp_path / "page.html").exists()


def test_a_file_that_is_removed_as_it_is_opened_is_missing(run, monkeypatch):
    opened, read = Run.load(run), tensors.read_regular

    def removed(path):
        path.unlink()
        return read(path)

    monkeypatch.setattr(tensors, "read_regular", removed)
    with pytest.raises(DataError, match=r"segment-00000002\.safetensors is missing: restore it from a copy"):
        opened.weights(3)
