"""Times of every operation at several sizes: what the cost models of `poprisk_lab.costs` are held against.

`docs/scaling.md` is made of them.

Each operation is timed at one middle size, then with one size at a time made smaller and larger, so that the exponent
of each can be read off; and once at a size so small that only the launches count. The models are fitted at the middle
size alone. Every point is measured by itself: an error is recorded and the next one goes on; what there is lies in the
file after each point. All together take about 190 s on an H200, 130 s on one CPU thread; a point that no time is left
for (``--budget``) is left out, and said to be, and ``--only`` adds operations to a file that is there. CPU times are
processor time.

    python benchmarks/cost_models.py --out results/cost_models_gpu.json     # CUDA where there is a GPU
    python benchmarks/cost_models.py --device cpu --out results/cost_models_cpu.json
    python benchmarks/cost_models.py --out FILE --smoke                     # tiny, on the CPU
"""

import argparse
import gc
import json
import time
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cost_operations import OPERATIONS, Sizes, machine_figures, recorded_bytes
from cost_timing import median_seconds

from poprisk._core.store.envelope import environment
from poprisk._core.store.files import write_json

FEWEST_SECONDS = 2.0  # that a point may need


@dataclass(frozen=True)
class Points:
    """Where an operation is measured."""

    base: Sizes
    """The middle."""
    series: dict[str, tuple[int, ...]]
    """Other values of one size at a time."""
    tiny: tuple[Sizes, ...]
    """What is changed for sizes at which only launches count; two of them where a call has a fixed cost besides."""
    others: tuple[Sizes, ...] = ()
    """Further changes of the middle size, in several sizes at once."""

    def __iter__(self) -> Iterator[tuple[str, Sizes]]:
        yield "base", self.base
        for change in self.tiny:
            yield "tiny", self.base | change
        for name, values in self.series.items():
            for value in values:
                yield name, self.base | {name: value}
        for change in self.others:
            yield "others", self.base | change
        if self.tiny:
            yield "base", self.base  # again, in case the machine has become slower


STATES = {"p": 4, "g": 4, "m": 4, "v": 4, "s": 4}
ADAMW, LOW = STATES | {"s": 0}, {"v": 2, "s": 2}
NETWORK = {"inputs": 512, "width": 1024, "outputs": 4}
SMALL = {"inputs": 4, "width": 4}

GPU = {
    "optimizer_step": Points(
        {"weights": 10**8, **STATES},
        {"weights": (10**7, 5 * 10**8)},
        ({"weights": 1024},),
        tuple({"weights": w, **LOW} for w in (10**7, 10**8, 5 * 10**8)),
    ),
    "adamw_step": Points({"weights": 10**8, **ADAMW}, {"weights": (10**7, 5 * 10**8)}, ({"weights": 1024},)),
    "training_step": Points(
        {"layers": 8, "width": 4096, "tokens": 8192, "itemsize": 2},
        {"layers": (2, 32), "width": (2048, 8192), "tokens": (2048, 32768)},
        ({"width": 16, "tokens": 16},),
    ),
    "adjoint": Points(
        {"steps": 32, "batch": 64, "queries": 256, "examples": 4096, "inputs": 784, "width": 256, "outputs": 10},
        {"steps": (8, 128), "queries": (64, 1024), "batch": (16, 256), "width": (128, 512, 1024)},
        (SMALL | {"queries": 2, "batch": 4},),
    ),
    "retraining": Points(
        {"steps": 16, "batch": 256, "members": 32, "examples": 4096, "inputs": 784, "width": 1024, "outputs": 10},
        {"steps": (4, 64), "members": (8, 128), "batch": (64, 1024), "width": (512, 2048)},
        (SMALL | {"members": 2, "batch": 4}, SMALL | {"members": 2, "batch": 4, "steps": 2}),
    ),
    "window_gramian": Points(
        {"steps": 8, "batch": 512, "examples": 4096, "columns": 16, "test_examples": 0}
        | {"inputs": 512, "width": 1024, "outputs": 4},
        {"steps": (2, 32), "columns": (4, 64), "examples": (1024, 16384), "width": (512, 2048)},
        (SMALL | {"batch": 4, "examples": 8, "columns": 1},),
    ),
    "window_transfer": Points(
        {"steps": 8, "batch": 512, "examples": 4096, "columns": 16, "test_examples": 1024}
        | {"inputs": 512, "width": 1024, "outputs": 4},
        {"steps": (2, 32), "columns": (4, 64), "width": (512, 2048)},
        (SMALL | {"batch": 4, "examples": 8, "columns": 1, "test_examples": 4},),
    ),
    "factor_tile": Points(
        {"examples": 4096, "chunk": 1024, **NETWORK},
        {"examples": (1024, 2048, 8192), "outputs": (2, 8), "width": (512, 2048, 4096)},
        (SMALL | {"examples": 2, "outputs": 2},),
    ),
    "jacobian_tile": Points(
        {"examples": 256, "chunk": 64, "inputs": 512, "width": 768, "outputs": 4},
        {"examples": (64, 128, 512), "outputs": (2, 8), "width": (384, 1536)},
        (SMALL | {"examples": 2, "outputs": 2},),
    ),
    "product_tile": Points(
        {"rows": 4096, "columns": 8, "chunk": 4096, "inputs": 512, "width": 2048, "outputs": 4},
        {"rows": (1024, 16384), "columns": (2, 32), "width": (1024, 4096)},
        (SMALL | {"rows": 2, "outputs": 1},),
    ),
    "kernel_product": Points(
        {"examples": 8192, "columns": 16, "inputs": 512, "width": 2048, "outputs": 4},
        {"examples": (1024, 32768), "columns": (4, 64), "width": (1024, 4096)},
        (SMALL | {"examples": 2, "columns": 1, "outputs": 1},),
    ),
    "convolution_rows": Points(
        {"examples": 512, "width": 32},
        {"examples": (128, 2048), "width": (16, 64)},
        ({"examples": 2, "width": 4},),
    ),
    "rounded_product": Points(
        {"examples": 1024, "row_length": 2**21},
        {"examples": (512, 2048), "row_length": (2**19, 2**23)},
        ({"examples": 16, "row_length": 64},),
    ),
}

CPU = {
    "optimizer_step": Points(
        {"weights": 2 * 10**7, **STATES},
        {"weights": (5 * 10**6, 8 * 10**7)},
        ({"weights": 64},),
        tuple({"weights": w, **LOW} for w in (5 * 10**6, 2 * 10**7, 8 * 10**7)),
    ),
    "adamw_step": Points({"weights": 2 * 10**7, **ADAMW}, {"weights": (5 * 10**6, 8 * 10**7)}, ({"weights": 64},)),
    "training_step": Points(
        {"layers": 4, "width": 512, "tokens": 512, "itemsize": 4},
        {"layers": (1, 16), "width": (256, 1024), "tokens": (128, 2048)},
        ({"width": 4, "tokens": 4},),
    ),
    "adjoint": Points(
        {"steps": 8, "batch": 32, "queries": 32, "examples": 256, "inputs": 64, "width": 128, "outputs": 10},
        {"steps": (2, 32), "queries": (8, 128), "batch": (8, 128), "width": (64, 256)},
        (SMALL | {"queries": 2, "batch": 4},),
    ),
    "retraining": Points(
        {"steps": 8, "batch": 64, "members": 8, "examples": 256, "inputs": 64, "width": 256, "outputs": 10},
        {"steps": (2, 32), "members": (2, 32), "batch": (16, 256), "width": (128, 512)},
        (SMALL | {"members": 2, "batch": 4}, SMALL | {"members": 2, "batch": 4, "steps": 2}),
    ),
    "window_gramian": Points(
        {"steps": 4, "batch": 64, "examples": 256, "columns": 8, "test_examples": 0}
        | {"inputs": 64, "width": 128, "outputs": 4},
        {"steps": (1, 16), "columns": (2, 32), "examples": (128, 1024), "width": (64, 256)},
        (SMALL | {"batch": 4, "examples": 8, "columns": 1},),
    ),
    "window_transfer": Points(
        {"steps": 4, "batch": 64, "examples": 256, "columns": 8, "test_examples": 64}
        | {"inputs": 64, "width": 128, "outputs": 4},
        {"steps": (1, 16), "columns": (2, 32), "width": (64, 256)},
        (SMALL | {"batch": 4, "examples": 8, "columns": 1, "test_examples": 4},),
    ),
    "factor_tile": Points(
        {"examples": 512, "chunk": 256, "inputs": 128, "width": 256, "outputs": 2},
        {"examples": (128, 256, 1024), "outputs": (1, 4), "width": (128, 512, 1024)},
        (SMALL | {"examples": 2, "outputs": 2},),
    ),
    "jacobian_tile": Points(
        {"examples": 64, "chunk": 64, "inputs": 128, "width": 256, "outputs": 4},
        {"examples": (16, 32, 128), "outputs": (2, 8), "width": (128, 512)},
        (SMALL | {"examples": 2, "outputs": 2},),
    ),
    "product_tile": Points(
        {"rows": 128, "columns": 4, "chunk": 128, "inputs": 128, "width": 256, "outputs": 4},
        {"rows": (32, 512), "columns": (1, 16), "width": (128, 512)},
        (SMALL | {"rows": 2, "outputs": 1},),
    ),
    "kernel_product": Points(
        {"examples": 512, "columns": 8, "inputs": 128, "width": 256, "outputs": 4},
        {"examples": (64, 2048), "columns": (2, 64), "width": (128, 512)},
        (SMALL | {"examples": 2, "columns": 1, "outputs": 1},),
    ),
    "convolution_rows": Points(
        {"examples": 16, "width": 16},
        {"examples": (2, 64), "width": (8, 32)},
        ({"examples": 1, "width": 1},),
    ),
    "rounded_product": Points(
        {"examples": 128, "row_length": 2**16},
        {"examples": (64, 256), "row_length": (2**14, 2**18)},
        ({"examples": 2, "row_length": 16},),
    ),
}

RUN = {"batch": 4, "examples": 16, "inputs": 64, "outputs": 10}
STORAGE: tuple[Sizes, ...] = tuple(
    RUN | {"steps": steps, "width": width, "every": every, "segment_steps": 8}
    for steps, width, every in ((16, 128, 1), (64, 128, 1), (16, 256, 1), (16, 512, 1), (64, 128, 16), (64, 512, 16))
)


def smoke(plan: dict[str, Points]) -> dict[str, Points]:
    """Every operation at its tiny size, and at one that is a little larger in one of its sizes."""
    small: dict[str, Points] = {}
    for name, points in plan.items():
        base = {key: min(value, 8) for key, value in (points.base | points.tiny[0]).items()}
        first = next(iter(points.series))
        small[name] = Points(base, {first: (2 * base[first],)}, ())
    return small


@dataclass
class Measured:
    """All there is so far, on disk after each point."""

    path: Path
    end: float
    about: dict[str, Any]
    rows: list[dict[str, Any]] = field(default_factory=list)
    storage: list[dict[str, Any]] = field(default_factory=list)
    missing: list[dict[str, Any]] = field(default_factory=list)

    def write(self, **more: Any) -> None:
        """What there is, and more about all of it."""
        self.about |= more
        write_json(self.path, self.about | {"rows": self.rows, "storage": self.storage, "missing": self.missing})

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def lack(self, why: str, **what: Any) -> None:
        """A point that was not measured, and why."""
        self.missing.append(what | {"why": why})
        self.write()
        print("missing", what, why.splitlines()[-1], flush=True)


def measure_point(measured: Measured, device: str, operation: str, series: str, sizes: Sizes) -> None:
    if measured.left() < FEWEST_SECONDS:
        measured.lack("no time left", operation=operation, series=series, sizes=sizes)
        return
    try:
        row = timed_row(device, operation, sizes, 1 if measured.about["smoke"] else 5)
        measured.rows.append({"operation": operation, "series": series, **row})
        measured.write()
        value = sizes.get(series, "")
        print(f"{measured.left():.0f} {operation} {series} {value} {row['seconds']:.2e} s", flush=True)
    except Exception:
        measured.lack(traceback.format_exc(limit=-6), operation=operation, series=series, sizes=sizes)
    free(device)


def timed_row(device: str, operation: str, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """In a function of its own, so that its tensors are gone when the next point begins."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    call, known = OPERATIONS[operation](sizes, device)
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    seconds, times = median_seconds(call, device, repeats=repeats)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    row: dict[str, Any] = {"sizes": sizes, "known": known, "seconds": seconds, "times": times}
    return row | ({"bytes_before": held, "peak_bytes": peak} if device == "cuda" else {})


def measure_storage(measured: Measured, device: str, sizes: Sizes) -> None:
    if measured.left() < FEWEST_SECONDS:
        measured.lack("no time left", operation="recording", sizes=sizes)
        return
    try:
        measured.storage.append({"sizes": sizes, "bytes": recorded_bytes(sizes, device)})
        measured.write()
    except Exception:
        measured.lack(traceback.format_exc(limit=-6), operation="recording", sizes=sizes)


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default=None, help="default: cuda where there is one")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for all together")
    names = list(OPERATIONS)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, help="in this order; others stay in the file"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--commit", default=None, help="the commit measured, where git cannot tell")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    begin = time.monotonic()
    device = "cpu" if args.smoke else args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        torch.set_num_threads(args.threads)
    plan = smoke(CPU) if args.smoke else GPU if device == "cuda" else CPU
    about = {"benchmark": "cost_models", "smoke": args.smoke, "device": device, "threads": torch.get_num_threads()}
    about["environment"] = environment() | ({"commit": args.commit} if args.commit else {})
    measured = Measured(args.out, begin + args.budget, about)
    if args.out.exists() and len(args.only) < len(OPERATIONS):  # what was measured before and is not asked for stays
        before = json.loads(args.out.read_text())
        measured.rows = [row for row in before["rows"] if row["operation"] not in args.only]
        measured.missing = [row for row in before["missing"] if row["operation"] not in (*args.only, "recording")]
    side, copied = (64, 1000) if args.smoke else (8192, 2**28) if device == "cuda" else (1024, 2**25)
    measured.write(machine=machine_figures(device, side, copied))
    free(device)
    for name in args.only:
        for series, sizes in plan[name]:
            measure_point(measured, device, name, series, sizes)
    for sizes in STORAGE[:1] if args.smoke else STORAGE:
        measure_storage(measured, device, sizes)
    measured.write(seconds=time.monotonic() - begin, finished=True)
    print(f"{len(measured.rows)} points, {len(measured.missing)} missing, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
