"""The memory limit is kept by tiles and products of a kernel many times larger."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to tell the peak")
@pytest.mark.parametrize(("n", "limit"), [(1800, 3 * 2**22), (900, 2**21)])
def test_the_peak_stays_within_the_limit(n, limit):
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "memory_use.py"), str(n), str(limit)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["kernel"] > 8 * limit
    assert found["tile_bytes"] <= limit
    assert found["peak"] <= limit, found
