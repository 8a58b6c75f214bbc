"""A tangent kernel in tiles that several processes make, one of which is killed; then products with its store."""

import argparse
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

from poprisk import Problem, cluster, train
from poprisk.jobs import JobPlan, StoredMatrix, job_status, open_matrix
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


def done(store: Path) -> int:
    return sum(finished for finished, _ in job_status(store).values())


def kill_one(store: Path, client) -> None:
    """As a crash or a scheduler would, in the middle of a tile."""
    victim = next(iter(client.run(os.getpid).values()))
    while done(store) < 2:
        time.sleep(0.05)
    os.kill(victim, signal.SIGKILL)
    print(f"killed a worker; {done(store)} jobs are done")


def look(first: StoredMatrix, last: StoredMatrix) -> None:
    """Nothing here has a whole kernel in memory."""
    print(f"kernel: {last.shape[0]} x {last.shape[1]}, in {len(list(last.tiles()))} tiles")
    if last.bound is not None:
        print(f"error of an entry K_ij: at most {last.bound:.1e} sqrt(K_ii K_jj)")
    top = top_eigenpairs(last, 3).values
    print(f"largest eigenvalues at the end: {', '.join(f'{value:.4g}' for value in top)}")
    pairs = zip(first.tiles(), last.tiles(), strict=True)
    sums = torch.tensor([[(b - a).square().sum(), a.square().sum()] for (*_, a), (*_, b) in pairs]).sum(0)
    print(f"relative change of the kernel over training: {(sums[0] / sums[1]).sqrt():.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=600)
    parser.add_argument("--workers", type=int, default=2, help="processes, one of which is killed; 0: a plain loop")
    parser.add_argument("--precision", help="multiply in float16 or bfloat16x3, with a bound on the error")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        store, problem = Path(place) / "jobs.zarr", Problem.build(f"{__file__}:points", count=arguments.examples)
        run = train(problem, torch.optim.Adam, STEPS, batch_size=32, path=Path(place) / "run", progress=False)

        plan = JobPlan(store, threads=1, memory_limit=MEMORY_LIMIT)
        options = {"side": 50, "precision": arguments.precision}
        kernels = plan.train_kernel(run, [0, STEPS], **options)
        plan.cross_kernel(run, STEPS, **options)
        print(f"poprisk jobs planned: {sum(total for _, total in job_status(store).values())}")

        if arguments.workers:
            with cluster("processes", workers=arguments.workers) as client:
                threading.Thread(target=kill_one, args=(store, client), daemon=True).start()
                found = plan.run()
        else:
            found = plan.run(client="in-process")
        print(f"all {found.total} jobs are done")
        look(*(open_matrix(store, name) for name in kernels))


if __name__ == "__main__":
    main()
