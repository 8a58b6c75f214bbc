"""The memory limit is kept by tiles and products of a kernel many times larger."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT = 3 * 2**22


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to tell the peak")
def test_the_peak_stays_within_the_limit():
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "memory_use.py"), "1800", str(LIMIT)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["kernel"] > 8 * LIMIT
    assert found["tile_bytes"] <= LIMIT
    assert found["peak"] <= LIMIT, found
