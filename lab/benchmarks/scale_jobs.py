"""Jobs against plain loops: a large kernel of ResNet-18 on a GPU, and what Dask and the store cost on a CPU.

On a GPU: the tiles of the kernel of 60,000 × 50,000 images in float16, the first 5% of them (and at least one change of
rows), first in a plain loop that keeps nothing, then as jobs in a store on the disk, interrupted there and resumed. On
the CPU, at the same time on cores of its own: tiles of about a second in a plain loop, in two plain loops at once (what
the machine itself gains by a second process), and by one, two and four workers, in turns; and a plan of ten thousand
tiles. Images are random: no figure depends on their content.

    python benchmarks/scale_jobs.py --out results/scale_jobs.json
    python benchmarks/scale_jobs.py --out results/scale_jobs.json --only cpu    # and keep the other part that is stored
    python benchmarks/scale_jobs.py --out FILE --tiny                           # tiny, on the CPU
"""

import argparse
import faulthandler
import hashlib
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

NEEDED = ("torch", "numpy", "zarr", "numcodecs", "google_crc32c", "fsspec", "dask", "distributed", "pydantic", "typer")
ROWS, COLUMNS, SHARE, CPU_CORES = 60_000, 50_000, 0.05, 5
FILLED = 0.9
"""Share of the GPU's memory that a plan may fill."""
LEAST_SHARE, MOST_OVERHEAD, LEAST_SCALING, MOST_SECONDS = 0.95, 0.05, 1.8, 10.0


def missing() -> list[str]:
    """Modules that cannot be imported here, with the reason."""
    found = []
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except Exception as error:
            found.append(f"{name} ({type(error).__name__}: {error})")
    return found


def residual_network(width: int) -> Any:
    """ResNet-18 whose batch normalization uses its running statistics always, so that examples are independent."""
    import torch
    from scale_models import ResNet18

    class Fixed(torch.nn.BatchNorm2d):
        def train(self, mode: bool = True) -> "Fixed":
            return super().train(False)

    torch.manual_seed(0)
    module = ResNet18(1, width)
    for part in module.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.__class__ = Fixed
    return module.train()


def images(width: int, train: int, test: int) -> Any:
    """Random images of CIFAR's shape, with a target each."""
    import torch

    from poprisk import Problem

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(train + test, 3, 32, 32, generator=generator)
    y = torch.randn(train + test, 1, generator=generator)
    rest = (x[train:], y[train:])
    return Problem(residual_network, "squared", x[:train], y[:train], arguments={"width": width}, test=rest)


def perceptron(sizes: list[int]) -> Any:
    """Linear layers with hyperbolic tangents."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(sizes)]
    return torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.Tanh())][:-1])


def vectors(sizes: list[int], train: int) -> Any:
    """Random vectors with random targets."""
    import torch

    from poprisk import Problem

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(train, sizes[0], generator=generator)
    y = torch.randn(train, sizes[-1], generator=generator)
    return Problem(perceptron, "squared", x, y, arguments={"sizes": sizes})


def recorded(folder: Path, make: Any, **arguments: Any) -> Any:
    """A run of one step, in a directory."""
    import torch

    from poprisk import Problem, train

    problem = Problem.build(make, **arguments)
    return train(problem, torch.optim.SGD, 1, batch_size=min(64, len(problem)), path=folder, progress=False)


def plain_loop(store: Path, count: int) -> dict[str, Any]:
    """The first tiles, one after the other, computed as a worker does and brought to the host."""
    import torch

    from poprisk._core.store import load_all, open_store
    from poprisk.jobs import _engine, _kinds
    from poprisk.operators import pinned

    (group,) = load_all(open_store(store))
    device, begin = torch.device(group.content["device"]), time.perf_counter()
    with pinned(group.content["threads"]):
        kind = _kinds.KernelTiles(group, _engine.shipped_run(group, {}, None).open(device), device)
        times, digests = [time.perf_counter() - begin], []
        for cell in group.cells()[:count]:
            block = kind.compute(cell)["values"].cpu()
            times.append(time.perf_counter() - begin)
            digests.append(hashlib.sha256(block.contiguous().numpy().tobytes()).hexdigest())
            begin += time.perf_counter() - begin - times[-1]  # the digest does not count
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"times": times, "digests": digests, "peak_bytes": peak}


def stream(store: Path, count: int) -> dict[str, Any]:
    """The same kernel by ``kernel_tiles``, copied to the host while the next tile is computed."""
    import torch

    from poprisk._core.store import load_all, open_store
    from poprisk.jobs import _engine
    from poprisk.operators._kernels.tiles import on_host, tiled_kernel

    (group,) = load_all(open_store(store))
    device = torch.device(group.content["device"])
    run = _engine.shipped_run(group, {}, None).open(device)
    problem, model = run.problem, run.model()
    assert problem.test is not None
    made = tiled_kernel(
        *(model, run.weights(0).to(model.weights), problem.test[0], problem.inputs),
        precision="float16",
        memory=group.where["memory_limit"],
    )
    times, begin, block = [], time.perf_counter(), None
    for number, tile in enumerate(on_host(made.tiles())):
        times.append(time.perf_counter() - begin)
        block = tile.block
        if number + 1 == count:
            break
    assert block is not None
    return {"times": times, "entries": block.numel()}


def tile_files(store: Path) -> list[Path]:
    """The stored tiles, the oldest first."""
    found = [path for path in store.glob("*/values/c/*/*") if path.name.isdigit()]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)


def interrupted_run(store: Path, count: int, **options: Any) -> dict[str, Any]:
    """Do jobs until that many tiles are stored, and then press Ctrl-C."""
    import _thread

    from poprisk.jobs import run_jobs

    begin, over = time.perf_counter(), threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            if len(tile_files(store)) >= count:
                _thread.interrupt_main()
                return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run_jobs(store, progress=False, **options)
        stopped = False
    except KeyboardInterrupt:
        stopped = True
    finally:
        over.set()
        thread.join()
    return {"interrupted": stopped, "seconds": time.perf_counter() - begin, "tiles": len(tile_files(store))}


def gpu_part(tiny: bool, note: Any) -> None:
    import torch

    from poprisk import cluster
    from poprisk._core.store import load_all, open_store
    from poprisk.jobs import JobPlan, job_status

    rows, columns, width = (24, 40, 4) if tiny else (ROWS, COLUMNS, 64)
    device = "cpu" if tiny else "cuda"
    torch.set_num_threads(4)
    with tempfile.TemporaryDirectory() as place:
        folder, began = Path(place), time.perf_counter()
        run = recorded(folder / "run", images, width=width, train=columns, test=rows)
        note(recorded_seconds=time.perf_counter() - began, weights=run.num_weights, rows=rows, columns=columns)
        limit = 2**28 if tiny else int(FILLED * _free_memory())
        began = time.perf_counter()
        plan = JobPlan(folder / "store", device=device, memory_limit=limit)
        options = {"side": 4} if tiny else {}
        plan.cross_kernel(run, 0, precision="float16", **options)
        del plan
        (group,) = load_all(open_store(folder / "store"))
        tile, cells = group.where["tile"], group.cells()
        note(planned_seconds=time.perf_counter() - began, memory_limit=limit, tile=tile, tiles=len(cells))
        note(tile_bytes=group.where["tile_bytes"], chunk=group.where["chunk"], bound=group.where["bound"])
        in_a_row = -(-columns // tile[1])
        count = min(len(cells) - 1, max(int(SHARE * len(cells)) + 2, in_a_row + 4))
        loop = _child("loop", folder / "store", count)
        note(loop=loop | {"digests": None}, measured_tiles=count, measured_share=count / len(cells))
        note(stream=_child("stream", folder / "store", count))
        began = time.perf_counter()
        with cluster("processes", workers=1, gpus=0 if tiny else 1) as client:
            note(cluster_seconds=time.perf_counter() - began)
            first = interrupted_run(folder / "store", count, client=client)
            files = tile_files(folder / "store")
            stamps = [path.stat().st_mtime_ns / 1e9 for path in files]
            note(jobs=first | {"first_tile_seconds": first["seconds"] - (stamps[-1] - stamps[0])})
            before = {path: path.stat().st_mtime_ns for path in files}
            second = interrupted_run(folder / "store", min(len(files) + 4, len(cells)), client=client)
            kept = all(path.stat().st_mtime_ns == stamp for path, stamp in before.items())
            note(resumed=second | {"kept_what_was_stored": kept}, status=job_status(folder / "store"))
        note(jobs_stamps=[stamp - stamps[0] for stamp in stamps])
        note(**compared(loop, stamps, [group.region(cell) for cell in cells[:count]], tile))
        same = [_digest(group, cell) == digest for cell, digest in zip(cells[:count], loop["digests"], strict=True)]
        note(tiles_compared=len(same), tiles_identical=sum(same), stored_bytes=sum(p.stat().st_size for p in files))


def compared(loop: dict[str, Any], stamps: list[float], regions: list[Any], tile: list[int]) -> dict[str, Any]:
    """Seconds of a tile in both, from the third tile on: when graphs were captured and files were made once."""
    skipped, last = 2, min(len(stamps), len(loop["times"]) - 1)
    each = last - 1 - skipped
    plain = (loop["times"][last] - loop["times"][1 + skipped]) / each
    jobs = (stamps[last - 1] - stamps[skipped]) / each
    entries = sum((r.stop - r.start) * (c.stop - c.start) for r, c in regions[skipped + 1 : last]) / each
    return {
        "plain_seconds_per_tile": plain,
        "jobs_seconds_per_tile": jobs,
        "share_of_plain": plain / jobs,
        "whole_kernel_minutes": jobs * ROWS * COLUMNS / entries / 60,
        "reached_share": plain / jobs >= LEAST_SHARE,
    }


def cpu_part(tiny: bool, note: Any, seconds: float = 300.0) -> None:
    import torch

    from poprisk import cluster
    from poprisk._core.cluster import WORKER_MEMORY
    from poprisk.jobs import JobPlan, run_jobs

    torch.set_num_threads(1)
    sizes, side, sides = ([20, 8, 2], 4, 3) if tiny else ([784, 256, 64, 10], 48, 8)
    end = time.perf_counter() + seconds
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        small = ten_thousand(folder, note, 200 if tiny else 10_000)
        run = recorded(folder / "run", vectors, sizes=sizes, train=side * sides)
        plan = JobPlan(folder / "planned", memory_limit=2**31)
        plan.train_kernel(run, 0, side=side, method="jacobian contraction")
        tiles = sides * (sides + 1) // 2
        counts = {"one": 1, "two": 2} | ({"four": 4} if tiny or len(os.sched_getaffinity(0)) >= 4 else {})
        found: dict[str, list[float]] = {name: [] for name in ("plain", "beside", *counts)}
        with ExitStack() as stack:
            clients = {}
            for name, workers in counts.items():
                clients[name] = stack.enter_context(cluster("processes", workers=workers, memory_limit=0))
                JobPlan(folder / f"warm {name}", memory_limit=2**28).train_kernel(small, 0, side=10)
                run_jobs(folder / f"warm {name}", client=clients[name], progress=False)  # what is imported is imported
                note(ready=name)
            while (rounds := len(found["plain"])) < 3:
                if rounds and time.perf_counter() + 3.3 * statistics.mean(found["plain"]) > end:
                    break
                found["plain"].append(_child("loop", folder / "planned", tiles, WORKER_MEMORY)["times"][-1])
                found["beside"].append(beside(folder, tiles))
                for name, client in clients.items():
                    there = folder / f"{name}{rounds}"
                    shutil.copytree(folder / "planned", there)
                    found[name].append(run_jobs(there, client=client, progress=False).seconds)
                note(cpu_seconds=found, cpu_tiles=tiles)

        def ratio(a: str, b: str) -> float:
            return statistics.median(x / y for x, y in zip(found[a], found[b], strict=True))

        overhead, scaling = ratio("one", "plain") - 1, ratio("one", "two")
        note(
            seconds_per_tile=statistics.median(found["plain"]) / tiles,
            overhead=overhead,
            scaling_one_to_two=scaling,
            machine_scaling=ratio("plain", "beside"),
            reached_overhead=overhead <= MOST_OVERHEAD,
            reached_scaling=scaling >= LEAST_SCALING,
            **({"scaling_one_to_four": ratio("one", "four")} if "four" in found else {}),
        )


def beside(folder: Path, tiles: int) -> float:
    """Seconds that these tiles take two plain loops at once: how far the machine itself scales with two processes."""
    from poprisk._core.cluster import WORKER_MEMORY

    half = tiles // 2

    def loop(name: str) -> float:
        shutil.copytree(folder / "planned", folder / name, dirs_exist_ok=True)
        return _child("loop", folder / name, half, WORKER_MEMORY)["times"][-1]

    with ThreadPoolExecutor(2) as pool:
        return max(pool.map(loop, ("left", "right"))) / (2 * half) * tiles


def ten_thousand(folder: Path, note: Any, count: int) -> Any:
    """Plan as many tiles, and resume when all but one are there; the run."""
    from poprisk._core.store import load_all, open_store
    from poprisk.jobs import JobPlan, run_jobs

    n = int((2 * count) ** 0.5) + 1
    run, store = recorded(folder / "small run", vectors, sizes=[4, 3, 1], train=n), folder / "many"
    began = time.perf_counter()
    JobPlan(store).train_kernel(run, 0, side=1)
    planned = time.perf_counter() - began
    (group,) = load_all(open_store(store))
    cells = group.cells()
    for i, j in cells[:-1]:
        for a, b in {(i, j), (j, i)}:
            path = store / group.path / "values" / "c" / str(a) / str(b)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    began = time.perf_counter()
    done = run_jobs(store, client="in-process", progress=False)
    resumed = time.perf_counter() - began
    found = {"tiles": len(cells), "planned_seconds": planned, "resumed_seconds": resumed, "computed": done.computed}
    note(ten_thousand=found | {"reached": planned + resumed <= MOST_SECONDS})
    return run


def _digest(group: Any, cell: Any) -> str:
    return hashlib.sha256(group.tile(cell).contiguous().numpy().tobytes()).hexdigest()


def _free_memory() -> int:
    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.mem_get_info()[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def _child(part: str, store: Path, count: int, settings: dict[str, str] | None = None) -> dict[str, Any]:
    """A part in a process of its own, whose memory is free again when it ends."""
    out = store.with_name(f"{store.name} {part}.json")
    command = [sys.executable, __file__, "--part", part, "--store", store, "--count", count, "--out", out]
    subprocess.run([str(each) for each in command], check=True, env=os.environ | (settings or {}))
    return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--only", choices=("gpu", "cpu"), help="measure one part, and keep the other one of the file")
    parser.add_argument("--part", choices=("all", "gpu", "cpu", "loop", "stream"), default="all")
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cores", type=int, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--commit", default=None, help="the commit measured, where git cannot tell")
    args = parser.parse_args()
    if lacking := missing():
        sys.exit(f"cannot be imported here: {'; '.join(lacking)}")
    if args.part in ("loop", "stream"):
        if args.part == "loop":
            plain_loop(args.store, 1)  # what is imported is imported
        found = (plain_loop if args.part == "loop" else stream)(args.store, args.count)
        args.out.write_text(json.dumps(found))
    elif args.part == "all":
        _both(args)
    else:
        _measure(args)


def _measure(args: argparse.Namespace) -> None:
    figures: dict[str, Any] = {}
    faulthandler.dump_traceback_later(300)
    if args.cores:
        os.sched_setaffinity(0, args.cores)

    def note(**more: Any) -> None:
        figures.update(more)
        args.out.write_text(json.dumps(figures))
        print(args.part, json.dumps(more)[:400], flush=True)

    (gpu_part if args.part == "gpu" else cpu_part)(args.tiny, note)


def _both(args: argparse.Namespace) -> None:
    """Both parts at once, each on cores of its own; or one of them, beside what is stored of the other."""
    from poprisk._core.store.envelope import environment

    cores = sorted(os.sched_getaffinity(0))
    parts = [args.only] if args.only else ["gpu", "cpu"]
    apart = len(parts) > 1 and len(cores) > 2 * CPU_CORES
    split = {"gpu": cores[:-CPU_CORES], "cpu": cores[-CPU_CORES:]} if apart else {}
    outs = {part: args.out.with_suffix(f".{part}.json") for part in parts}
    begin, running = time.perf_counter(), {}
    for part, out in outs.items():
        command = [sys.executable, __file__, "--part", part, "--out", str(out), *(["--tiny"] if args.tiny else [])]
        running[part] = subprocess.Popen([*command, "--cores", *map(str, split.get(part, cores))])
        if not split:
            running[part].wait()
    codes = {part: process.wait() for part, process in running.items()}
    about = {"commit": args.commit or environment()["commit"], "environment": environment()}
    about |= {"tiny": args.tiny, "seconds": time.perf_counter() - begin, "cores": len(cores)}
    found = {part: about | json.loads(out.read_text()) if out.exists() else {} for part, out in outs.items()}
    for out in outs.values():
        out.unlink(missing_ok=True)
    whole = merged(json.loads(args.out.read_text()) if args.only and args.out.exists() else {}, found)
    args.out.write_text(json.dumps(whole, indent=1) + "\n")
    for part, keys in {
        "gpu": ("share_of_plain", "plain_seconds_per_tile", "jobs_seconds_per_tile", "whole_kernel_minutes"),
        "cpu": ("seconds_per_tile", "overhead", "scaling_one_to_two", "scaling_one_to_four", "ten_thousand"),
    }.items():
        print(part, {key: whole.get(part, {}).get(key) for key in keys}, flush=True)
    if any(codes.values()):
        sys.exit(f"a part failed: {codes}")


def merged(before: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What is stored, with the parts that were measured now: a part that has ended early does not replace another.

    Each part says where it was measured; earlier results said so once, for both.
    """
    shared = {key: before[key] for key in ("tiny", "commit", "environment") if key in before}
    parts = {part: shared | before[part] for part in ("gpu", "cpu") if part in before}
    last = {"gpu": "tiles_identical", "cpu": "overhead"}
    return (
        {"benchmark": "scale_jobs"}
        | parts
        | {part: each for part, each in found.items() if last[part] in each or part not in parts}
    )


if __name__ == "__main__":
    from scale_jobs import main as imported  # problems are built by functions of a module that workers import

    imported()
