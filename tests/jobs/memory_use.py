"""Peak memory of tiles and products of a kernel much larger than the limit, in a process of its own."""

import json
import re
import sys
import tempfile
from pathlib import Path

import job_problems
import torch

from poprisk._core.store import load_all, open_store
from poprisk.jobs import JobPlan, open_matrix, run_jobs
from poprisk.runs._problem import Problem
from poprisk.runs._training import train


def memory(what: str) -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def everything(folder: Path, run: Path, limit: int, **options) -> int:
    (name,) = JobPlan(folder, memory_limit=limit).train_kernel(run, 0, **options)
    run_jobs(folder, client="in-process")
    K = open_matrix(folder, name)
    v = torch.ones(K.shape[1], dtype=K.dtype)
    torch.testing.assert_close(K @ v, v @ K)
    return K.shape[0] * K.shape[1] * K.dtype.itemsize


def main(n: int, limit: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        small = Problem.build(job_problems.blobs, n=8, test=0)
        large = Problem.build(job_problems.blobs, n=n, test=0)
        for name, problem in (("small", small), ("large", large)):
            train(problem, torch.optim.SGD, 1, batch_size=4, dtype=torch.float64, path=folder / name, progress=False)
        everything(folder / "first", folder / "small", limit)  # code and its workspaces are in memory now
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        at_rest = memory("VmRSS")
        size = everything(folder / "jobs", folder / "large", limit)
        (group,) = load_all(open_store(folder / "jobs"))
        print(
            json.dumps(
                {
                    "kernel": size,
                    "limit": limit,
                    "peak": memory("VmHWM") - at_rest,
                    "side": group.where["tile"][0],
                    "tile_bytes": group.where["tile_bytes"],
                }
            )
        )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
