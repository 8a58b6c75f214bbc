"""Speed on one GPU: tangent kernels of ResNet-18, influence of 500 queries, K-fold, and a captured training step.

Every measurement runs in a process of its own with a time limit and writes what it has after each part, so that a
failure costs only its own figures; errors are recorded beside them. Inputs are synthetic (random images with CIFAR's
shape, clusters with MNIST's shape, random tokens): no figure depends on their content. The CPU path of the adjoint is
timed in a process pinned to two cores, beside the first measurements on the GPU, which use the other cores.

    python benchmarks/scale_gpu.py --out results/scale_gpu.json
    python benchmarks/scale_gpu.py --out FILE --only adjoint k_fold
    python benchmarks/scale_gpu.py --out FILE --smoke          # tiny, on the CPU
"""

import argparse
import faulthandler
import json
import multiprocessing
import os
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from scale_influence import OPTIMIZERS, adjoint, adjoint_cpu, ten_folds
from scale_kernels import resnet_kernel, resnet_ten_outputs
from scale_recorder import Recorder
from scale_training import training_step

from poprisk._core.store.envelope import environment
from poprisk._core.store.files import write_json

MEASUREMENTS: dict[str, tuple[Callable[[Recorder], None], float]] = {
    "adjoint_cpu": (adjoint_cpu, 75.0),
    "adjoint": (adjoint, 60.0),
    "resnet_kernel": (resnet_kernel, 60.0),
    "training_step": (training_step, 80.0),
    "k_fold": (ten_folds, 40.0),
    "resnet_ten_outputs": (resnet_ten_outputs, 40.0),
}
"""What is measured, in this order, and the most seconds that each may take."""


LEAST_SPEEDUP = 20.0
"""Of the adjoint of all queries on the GPU over two cores."""


def run_one(name: str, path: Path, seconds: float, smoke: bool) -> None:
    """In a process of its own."""
    warnings.simplefilter("ignore")
    # What is killed at its limit has said before where it stood.
    faulthandler.dump_traceback_later(max(1.0, seconds - 2), exit=False)
    _keep_to_its_cores(name, smoke)
    recorder = Recorder(path, seconds, smoke)
    recorder.note(environment=environment())
    try:
        MEASUREMENTS[name][0](recorder)
        peak = torch.cuda.max_memory_allocated() if recorder.device == "cuda" else 0
        recorder.note(finished=True, peak_bytes=peak)
    except Exception:
        recorder.note(error_outside_parts=traceback.format_exc(limit=-6))
    faulthandler.cancel_dump_traceback_later()


def _keep_to_its_cores(name: str, smoke: bool) -> None:
    """The two first cores belong to the CPU path; more threads than cores would wait for each other in every sum."""
    cores = sorted(os.sched_getaffinity(0))
    if name != "adjoint_cpu" and len(cores) > 4:
        cores = cores[2:]
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(1 if smoke else min(4, len(cores)))


def speedups(results: dict[str, Any]) -> dict[str, Any]:
    """Of the adjoint over the CPU path, where both were measured."""
    gpu, cpu = results.get("adjoint", {}), results.get("adjoint_cpu", {})
    both = [name for name in OPTIMIZERS if "seconds" in gpu.get(name, {}) and "seconds" in cpu.get(name, {})]
    ratios = {name: cpu[name]["seconds"] / gpu[name]["seconds"] for name in both}
    return {name: {"speedup": ratio, "reached": ratio >= LEAST_SPEEDUP} for name, ratio in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(MEASUREMENTS), default=list(MEASUREMENTS))
    parser.add_argument("--budget", type=float, default=230.0, help="seconds for all together")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--commit", default=None, help="the commit measured, where git cannot tell")
    args = parser.parse_args()
    # A process in which CUDA runs cannot be forked; importing everything again takes each measurement some seconds.
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    end = time.monotonic() + args.budget
    results: dict[str, Any] = {}
    if args.out.exists():
        results = json.loads(args.out.read_text()).get("measurements", {})

    def merge(name: str, path: Path) -> None:
        if path.exists():
            results[name] = json.loads(path.read_text())
            path.unlink()
        about = {"benchmark": "scale_gpu", "smoke": args.smoke, "commit": args.commit}
        write_json(args.out, about | {"measurements": results, "adjoint_speedup": speedups(results)})
        print(name, json.dumps(results.get(name)), flush=True)

    running: dict[str, tuple[Any, Path, float]] = {}

    def start(name: str) -> None:
        path = args.out.with_suffix(f".{name}.part.json")
        seconds = min(MEASUREMENTS[name][1], end - time.monotonic() - 2)
        process = context.Process(target=run_one, args=(name, path, seconds, args.smoke))
        process.start()
        running[name] = (process, path, time.monotonic() + seconds + 1)

    def finish(name: str) -> None:
        process, path, until = running.pop(name)
        process.join(max(0.1, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        merge(name, path)

    if "adjoint_cpu" in args.only:
        start("adjoint_cpu")
    for name in [name for name in args.only if name != "adjoint_cpu"]:
        if end - time.monotonic() < 8:
            print(f"{name}: no time left", flush=True)
            continue
        start(name)
        finish(name)
    if "adjoint_cpu" in running:
        finish("adjoint_cpu")


if __name__ == "__main__":
    main()
