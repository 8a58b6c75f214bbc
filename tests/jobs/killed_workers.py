"""Workers, schedulers and clients killed with SIGKILL at random while they make a kernel; what came of it.

    python tests/jobs/killed_workers.py --trials 20

Each trial: a scheduler, four workers and a client, each in a process of its own, and three of them killed at random
moments while tiles are being made. Whatever has ended is started again. Meanwhile another process reads every tile that
has its final name. At the end the kernel is compared byte by byte with that of one process, and the log is counted.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import job_problems
import torch

from poprisk._core.store import load_all, open_store
from poprisk.errors import DataError
from poprisk.jobs import JobPlan, _kinds, run_jobs
from poprisk.runs import Problem, train

WORKERS, KILLS, SIDE, TILE_SECONDS = 4, 3, 8, 0.05
PRELOADED = ["torch", "zarr", "distributed", "poprisk.jobs", "job_problems"]


def context():
    """Processes that have imported everything when they start."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def scheduler(port: int) -> None:
    async def run() -> None:
        from distributed import Scheduler

        async with Scheduler(host="127.0.0.1", port=port, dashboard=False) as started:
            await started.finished()

    quiet()
    asyncio.run(run())


def worker(port: int, log: str) -> None:
    async def run() -> None:
        from distributed import Worker

        async with Worker(f"tcp://127.0.0.1:{port}", nthreads=1, memory_limit=0, dashboard=False) as started:
            await started.finished()

    quiet()
    os.environ |= {"JOBS_LOG": log, "TILE_SECONDS": str(TILE_SECONDS)}
    asyncio.run(run())


def client(port: int, folder: Path) -> None:
    from distributed import Client

    quiet()
    _kinds.KINDS["kernel"] = job_problems.LoggedTiles
    with Client(f"tcp://127.0.0.1:{port}", timeout=60) as connected:
        connected.wait_for_workers(1, timeout=60)
        run_jobs(folder, client=connected)


def quiet() -> None:
    import logging

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def read_tiles(folder: Path, stop, reads, torn) -> None:
    """Reads every tile as soon as it has its final name, over and over, and counts torn ones."""
    (group,) = load_all(open_store(folder))
    while not stop.wait(0.2):
        for cell in group.done():
            try:
                group.tile(cell)
            except DataError:
                torn.value += 1
            reads.value += 1


def tiles(folder: Path) -> dict[str, bytes]:
    (values,) = folder.glob("*/values")
    return {str(path.relative_to(values)): path.read_bytes() for path in values.rglob("*") if path.is_file()}


class Processes:
    """The scheduler, the workers and the client of a trial; what has ended is started again."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._what = {"scheduler": (scheduler, (port,)), "client": (client, (port, folder))}
        self._what |= {f"worker {i}": (worker, (port, str(log))) for i in range(WORKERS)}
        self._context, self.alive = context(), {}
        self.clients = 0

    def start_missing(self) -> bool:
        """Whether the client has done its work."""
        for name, (function, arguments) in self._what.items():
            process = self.alive.get(name)
            if process is not None and process.is_alive():
                continue
            if name == "client" and process is not None and process.exitcode == 0:
                return True
            self.clients += name == "client"
            self.alive[name] = self._context.Process(target=function, args=arguments)
            self.alive[name].start()
        return False

    def kill(self, name: str) -> None:
        self.alive[name].kill()  # which may have ended by itself since the others were killed
        self.alive[name].join()

    def stop(self) -> None:
        for process in self.alive.values():
            process.kill()
            process.join()


def trial(folder: Path, expected: dict[str, bytes], chance: random.Random, kinds: list[str]) -> dict:
    (group,) = load_all(open_store(folder))
    total, log = len(group.cells()), folder.with_name(f"{folder.name}.log")
    moments = sorted(chance.uniform(0.05, 0.85) * total for _ in range(KILLS))
    made, killed = context(), Counter()
    stop, reads, torn = made.Event(), made.Value("q", 0), made.Value("q", 0)
    reader = made.Process(target=read_tiles, args=(folder, stop, reads, torn))
    reader.start()
    processes = Processes(folder, log)
    while not processes.start_missing():
        if moments and len(group.done()) >= moments[0]:
            time.sleep(chance.uniform(0.0, 0.1))  # anywhere in a tile, not just after one
            kind = chance.choice(kinds)
            victim = f"worker {chance.randrange(WORKERS)}" if kind == "worker" else kind
            if processes.alive["client"].is_alive():
                processes.kill(victim)
                killed[kind] += 1
                moments.pop(0)
        time.sleep(0.02)
    processes.stop()
    stop.set()
    reader.join()
    begun = Counter(job_problems.begun(log))
    lost = killed["worker"] + WORKERS * (killed["scheduler"] + killed["client"])
    return {
        "identical": tiles(folder) == expected,
        "tiles": total,
        "killed": killed.total(),
        **{f"killed_{kind}": killed[kind] for kind in ("worker", "scheduler", "client")},
        "torn_reads": torn.value,
        "reads": reads.value,
        "computed": begun.total(),
        "computed_again": begun.total() - total,
        "computed_again_beyond_what_was_in_flight": max(0, begun.total() - total - lost),
    }


def run_trials(
    trials: int, seed: int, examples: int = 72, kinds=("worker", "worker", "scheduler", "client"), **options
):
    """Of kernels in full precision; ``options`` of ``JobPlan.train_kernel`` make others."""
    torch.set_num_threads(1)
    chance, found, began = random.Random(seed), [], time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        problem = Problem.build(job_problems.blobs, n=examples, test=0, inputs=20, width=30, outputs=10)
        run = train(problem, torch.optim.Adam, 2, batch_size=32, path=folder / "run", progress=False)
        JobPlan(folder / "planned").train_kernel(run, 1, side=SIDE, **options)
        shutil.copytree(folder / "planned", folder / "alone")
        run_jobs(folder / "alone", client="in-process")
        expected = tiles(folder / "alone")
        for number in range(trials):
            there = folder / f"trial{number}"
            shutil.copytree(folder / "planned", there)
            found.append(trial(there, expected, chance, list(kinds)))
            shutil.rmtree(there)
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    sums = {key: sum(each[key] for each in found) for key in found[0]}
    return {"trials": trials, **sums, "seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(run_trials(arguments.trials, arguments.seed)))
