"""Trainings killed, ended, interrupted or started twice at random moments: none is lost, all end with the same bytes.

``killed_trainings.py`` makes the trials in a process that forks, because this one has threads and hooks of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    "trials", [6, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])], ids=["some", "many"]
)
def test_no_training_is_lost(trials):
    paths = [str(HERE.parents[1] / "src"), str(HERE), *filter(None, sys.path)]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(HERE / "killed_trainings.py"), "--trials", str(trials), "--seed", "1"]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert (found["trials"], found["lost"], found["unequal"]) == (trials, 0, 0)
    assert found["most"] <= 30
    assert found["hits"] + found["refused"] >= trials / 3  # signals that met their training
