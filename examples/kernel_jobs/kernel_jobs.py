"""A tangent kernel in tiles that several processes make, one of which is killed; then products with the file it is."""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from poprisk import Problem, train
from poprisk.jobs import DiskMatrix, JobPlan, assemble_matrix, job_status, run_jobs
from poprisk.operators import top_eigenpairs

INPUTS, CLASSES, STEPS = 20, 3, 40
MEMORY_LIMIT = 2**26


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def points(count: int) -> Problem:
    """Points around three centres; a function of a script, so that every worker can make the same ones."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, INPUTS, generator=generator)
    labels = torch.arange(count + count // 4) % CLASSES
    x = centres[labels] + torch.randn(len(labels), INPUTS, generator=generator)
    return Problem(network, "cross_entropy", x[:count], labels[:count], test=(x[count:], labels[count:]))


def start_workers(folder: Path, count: int) -> list[subprocess.Popen]:
    command = [sys.executable, "-m", "poprisk", "jobs", "work", str(folder), "--lease", "20"]
    return [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(count)]


def kill_one(folder: Path, workers: list[subprocess.Popen]) -> None:
    """As a crash or a scheduler would, in the middle of a tile."""
    while job_status(folder).done < 2 and workers[0].poll() is None:
        time.sleep(0.05)
    if workers[0].poll() is None:
        os.kill(workers[0].pid, signal.SIGKILL)
    workers[0].wait()
    print(f"killed a worker; {job_status(folder).done} of {job_status(folder).total} jobs are done")


def look(first: DiskMatrix, last: DiskMatrix) -> None:
    """Nothing here has a whole kernel in memory."""
    size = last.path.stat().st_size
    print(f"kernel: {last.shape[0]} x {last.shape[1]}, {size / 2**20:.1f} MiB in a file that numpy maps")
    if last.bound is not None:
        print(f"error of an entry K_ij: at most {last.bound:.1e} sqrt(K_ii K_jj)")
    top = top_eigenpairs(last, 3).values
    print(f"largest eigenvalues at the end: {', '.join(f'{value:.4g}' for value in top)}")
    pairs = zip(first.panels(), last.panels(), strict=True)
    sums = torch.tensor([[(b - a).square().sum(), a.square().sum()] for (_, a), (_, b) in pairs]).sum(0)
    print(f"relative change of the kernel over training: {(sums[0] / sums[1]).sqrt():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2, help="further processes; the first of them is killed")
    parser.add_argument("--precision", help="multiply in float16 or bfloat16x3, with a bound on the error")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run_folder, folder = Path(place) / "run", Path(place) / "jobs"
        problem = Problem.build(f"{__file__}:points", count=arguments.examples)
        run = train(problem, torch.optim.Adam, STEPS, batch_size=32, path=run_folder, progress=False)

        plan = JobPlan(folder, threads=1, memory_limit=MEMORY_LIMIT)
        options = {"side": 50, "precision": arguments.precision}
        kernels = plan.train_kernel(run, [0, STEPS], **options)
        plan.cross_kernel(run, STEPS, **options)
        print(f"poprisk jobs planned: {job_status(folder).total}")

        workers = start_workers(folder, arguments.workers)
        if workers:
            kill_one(folder, workers)
        done = run_jobs(folder, lease=20.0)  # this process joins in
        for worker in workers:
            worker.wait()
        print(f"this process finished {done.computed}, {done.taken_over} of them begun by the one that was killed")
        look(*(assemble_matrix(folder, name) for name in kernels))


if __name__ == "__main__":
    main()
