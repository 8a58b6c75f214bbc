"""Workers killed with SIGKILL at random while they make the tiles of a kernel, and replaced; what came of it.

    python tests/jobs/killed_workers.py --trials 20

Each trial: three workers on one kernel, each of them killed once at a random moment while tiles are being made, a new
one joining for each. Meanwhile another process reads every result that has its final name. At the end the kernel is
compared byte by byte with that of one process, and the logs are counted.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import job_problems
import torch

from poprisk.errors import DataError
from poprisk.jobs._assemble import assemble_matrix
from poprisk.jobs._manifest import Manifest
from poprisk.jobs._plan import JobPlan
from poprisk.jobs._results import read_logs, read_result
from poprisk.jobs._worker import run_jobs, work
from poprisk.runs._problem import Problem
from poprisk.runs._training import train

WORKERS, LEASE, SIDE = 3, 4.0, 8
FORK = multiprocessing.get_context("fork")


class Reader:
    """A process that reads every result as soon as it has its final name, over and over, and counts torn ones."""

    def __init__(self, folder: Path) -> None:
        self._reads, self._torn, self._stop = FORK.Value("q", 0), FORK.Value("q", 0), FORK.Event()
        self._process = FORK.Process(target=self._run, args=(folder, set(Manifest.load(folder).groups[0].keys)))
        self._process.start()

    def _run(self, folder: Path, keys: set[str]) -> None:
        while not self._stop.wait(0.05):
            for path in (folder / "results").glob("*/*.safetensors"):
                if path.stem in keys:
                    try:
                        read_result(folder, path.stem)
                    except DataError:
                        self._torn.value += 1
                    self._reads.value += 1

    def stop(self) -> tuple[int, int]:
        """Reads, and those of something torn."""
        self._stop.set()
        self._process.join()
        assert self._process.exitcode == 0
        return self._reads.value, self._torn.value


def start(folder: Path, name: str):
    process = FORK.Process(target=work, args=(folder,), kwargs={"name": name, "lease": LEASE}, name=name)
    process.start()
    return process


def finished(folder: Path) -> int:
    return len(list((folder / "results").glob("*/*.safetensors")))


def trial(folder: Path, expected: tuple, chance: random.Random) -> dict:
    keys = Manifest.load(folder).groups[0].keys
    before, total = finished(folder), len(keys)  # the weights lie among the results too
    moments = sorted(chance.uniform(0.02, 0.85) * total for _ in range(WORKERS))
    reader = Reader(folder)
    alive = [start(folder, f"w{i}") for i in range(WORKERS)]
    originals, killed, joined = list(alive), [], WORKERS
    for moment in moments:
        while finished(folder) - before < moment:
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.1))  # anywhere in a tile, not just after one
        victim = originals.pop(chance.randrange(len(originals)))
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        killed.append(victim.name)
        alive.remove(victim)
        alive.append(start(folder, f"w{joined}"))
        joined += 1
    for process in alive:
        process.join()
    reads, torn = reader.stop()
    assert all(process.exitcode == 0 for process in alive), [process.exitcode for process in alive]
    aside = len(list((folder / "results").glob("*/.*.tmp")))
    kernel = assemble_matrix(folder, Manifest.load(folder).groups[0].name)
    return {
        "identical": (kernel.path.read_bytes(), kernel.bound) == expected,
        "tiles": total,
        "killed": len(killed),
        "torn_reads": torn,
        "reads": reads,
        "files_left_aside": aside,
        **counted(folder, killed),
    }


def counted(folder: Path, killed: list[str]) -> dict:
    """From the logs: computations begun, kills in the middle of one, and those made again with and without such a kill.

    Of the kills in the middle of a tile some come after its result is in place: that tile is not made again.
    """
    starts, dones, last = Counter(), Counter(), {}
    for line in read_logs(folder):
        starts[line.get("key")] += line["event"] == "start"
        dones[line.get("key")] += line["event"] == "done"
        last[line["worker"]] = line
    hit = Counter(last[name]["key"] for name in killed if last[name]["event"] == "start")
    keys = [key for key in starts if key]
    unexplained = sum(max(0, starts[key] - 1 - hit[key]) for key in keys)
    return {
        "computed": sum(starts[key] for key in keys),
        "killed_inside_a_tile": sum(hit.values()),
        "computed_again": sum(starts[key] - 1 for key in keys),
        "computed_twice_without_a_kill": unexplained + sum(max(0, dones[key] - 1) for key in keys),
    }


def run_trials(trials: int, seed: int, examples: int = 72, **options) -> dict:
    """Of kernels in full precision; ``options`` of ``JobPlan.train_kernel`` make others."""
    options = options or {"method": "jacobian contraction"}
    torch.set_num_threads(1)
    chance, found, began = random.Random(seed), [], time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        problem = Problem.build(job_problems.blobs, n=examples, test=0, inputs=200, width=300, outputs=10)
        run = train(problem, torch.optim.Adam, 2, batch_size=32, path=folder / "run", progress=False)
        (name,) = JobPlan(folder / "planned").train_kernel(run, 1, side=SIDE, **options)
        shutil.copytree(folder / "planned", folder / "alone")
        run_jobs(folder / "alone")
        alone = assemble_matrix(folder / "alone", name)
        expected = (alone.path.read_bytes(), alone.bound)
        for number in range(trials):
            there = folder / f"trial{number}"
            shutil.copytree(folder / "planned", there)
            found.append(trial(there, expected, chance))
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
