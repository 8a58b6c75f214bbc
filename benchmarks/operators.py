"""The operators of a run at scale, on two CPU cores: leading eigenpairs of W, G on 20 vectors, channels and coupling.

A tanh network of 112 810 weights is trained for 200 minibatch steps on 1 000 digits, 10 outputs each, so that W is
10 000 × 10 000; nothing of that size is ever formed. The last line printed is one JSON object: ``stages`` with seconds
by the clock and of processor time (all threads; on a machine shared with others the clock measures them too), residuals
relative to the largest eigenvalue, the peak of resident memory, ``accuracy`` of float32 against float64 operators of a
smaller run, and ``exponents`` of the cost of a product with W in its steps, columns, examples and weights, 1 where it
is linear. The pairs are looked for in the same window followed in stretches, which is several times cheaper, and
certified by the steps as they were.

    python benchmarks/operators.py --output results/operators_cpu.json
    python benchmarks/operators.py --smoke
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from poprisk._core.linalg.spectra import top_eigenpairs
from poprisk._core.store.envelope import environment
from poprisk._core.store.files import write_json
from poprisk.operators._stretches import RunPath, StretchedWindow
from poprisk.operators._top_space import top_channels
from poprisk.operators._window import Window
from poprisk.runs._digits import digits_split
from poprisk.runs._problem import Problem
from poprisk.runs._run import Run
from poprisk.runs._training import train

TOLERANCE = 1e-3
LIMIT_SECONDS, LIMIT_BYTES = 25 * 60, 8 * 2**30


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    examples: int = 1000
    test_examples: int = 200
    width: int = 300
    steps: int = 200
    batch_size: int = 100
    rate: float = 0.01
    pairs: int = 20
    columns: tuple[int, ...] = (5, 10, 20)
    lengths: tuple[int, ...] = (50, 100, 200)
    sets: tuple[int, ...] = (250, 500, 1000)
    widths: tuple[int, ...] = (75, 150, 300)
    stretch: int = 5
    """Steps of a stretch of the window that is searched."""
    repeats: int = 2
    memory: int = 2**30
    """Bytes that a product with W may hold on to."""


SMOKE = Size(
    examples=20,
    test_examples=5,
    width=6,
    steps=8,
    batch_size=5,
    pairs=3,
    columns=(1, 2, 4),
    lengths=(2, 4, 8),
    sets=(10, 20, 40),
    widths=(3, 6, 12),
    stretch=2,
    repeats=1,
)
ORACLE = Size(examples=60, test_examples=5, width=16, steps=30, batch_size=16)
SMOKE_ORACLE = Size(examples=10, test_examples=5, width=4, steps=3, batch_size=5)


def network(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))


def recorded(size: Size) -> Run:
    digits = digits_split(seed=0, train_size=size.examples)
    test = digits.test_inputs[: size.test_examples], digits.test_labels[: size.test_examples]
    problem = Problem(
        network,
        "cross_entropy",
        digits.train_inputs,
        digits.train_labels,
        name="digits",
        arguments={"width": size.width},
        test=test,
    )
    optimizer = partial(torch.optim.SGD, lr=size.rate, momentum=0.9)
    return train(problem, optimizer, size.steps, batch_size=size.batch_size, progress=False)


class Stopwatch:
    """Seconds by the clock and of processor time for each named stage, told as they end."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, float]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """One stage."""
        wall, processor = time.perf_counter(), time.process_time()
        yield
        row = {"seconds": time.perf_counter() - wall, "processor_seconds": time.process_time() - processor}
        self.stages[name] = {key: round(value, 2) for key, value in row.items()}
        say(f"{name}: {row['seconds']:.1f} s by the clock, {row['processor_seconds']:.1f} s of processor time")

    def total(self, key: str) -> float:
        """Over all stages."""
        return round(sum(row[key] for row in self.stages.values()), 2)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def solve(size: Size) -> tuple[Run, Window, dict[str, Any]]:
    """The bar: everything that is asked of a window, timed stage by stage."""
    watch = Stopwatch()
    run = recorded(size)
    with watch("window"):
        window = Window.of_run(run, dtype=torch.float32, dense=False, memory=size.memory)
        path = RunPath.read(run, window.model, window.inputs, window.targets)
        coarse = StretchedWindow(path, size.stretch)
    with watch("eigenpairs"):
        pairs = top_eigenpairs(
            window.dissipation_gramian,
            size.pairs + 1,  # the first one left out says what ε is
            tolerance=TOLERANCE,
            surrogate=coarse.dissipation_gramian,
            progress=lambda made, done: say(f"  {made} products, {done} of {size.pairs + 1} pairs"),
        )
    g = window.output_gradient
    with watch("test transfer"):
        noise = torch.randn(len(g), size.pairs - 1, generator=torch.Generator().manual_seed(0))
        GH = window.test_transfer @ torch.cat([g[:, None], noise], dim=1)
    with watch("channels"):
        top = top_channels(window, size.pairs, pairs=pairs)
    moved = window.test_displacement()
    sources = window.sources()
    predicted = top.coupling.predict(
        (window.stop_outputs - window.start_outputs).reshape(-1), sources.train, sources.test
    )
    largest = pairs.values[0].item()
    bar = {
        "outputs": window.num_outputs,
        "weights": window.model.size,
        "nodes": sorted({maps.nodes for maps in window.steps}),
        "losses": window.losses(),
        "largest_corrections": window.corrections().amax(0).tolist(),
        "stages": watch.stages,
        "seconds": watch.total("seconds"),
        "processor_seconds": watch.total("processor_seconds"),
        "peak_resident_bytes": peak(),
        "values": [float(f"{value:.4g}") for value in pairs.values.tolist()],
        "largest_residual": pairs.residuals.max().item() / largest,
        "converged": pairs.converged,
        "products": pairs.products,
        "surrogate_products": pairs.surrogate_products,
        "test_displacement_error": relative(sources.test - GH[:, 0], moved),
        "channels": {
            "rank": top.rank,
            "epsilon": top.epsilon / largest,
            "unresolved": top.channels.unresolved,
            "smallest_train_root": top.channels.smallest_train_root,
            "relative_remainder": top.coupling.relative_remainder,
            "visibility": top.channels.visibility_norm,
            "visibility_limit": top.test_limit,
            "test_left_out": top.test_left_out,
            "prediction_error": relative(predicted, moved),
            "prediction_bound": top.prediction_bound(g) / moved.norm().item(),
        },
    }
    return run, window, bar


def accuracy(size: Size) -> dict[str, float]:
    """Leading eigenvalues of W in float32, with the nodes it chooses and with one, against float64, relative to λ_1."""
    run = recorded(size)
    exact = spectrum(Window.of_run(run, dense=False))
    single = Window.of_run(run, dtype=torch.float32, dense=False)
    rows = {"float32": single, "float32_one_node": single.with_nodes(1)}
    return {name: ((spectrum(w) - exact).abs().max() / exact[0]).item() for name, w in rows.items()}


def spectrum(window: Window) -> Tensor:
    return torch.linalg.eigvalsh(window.dissipation_gramian.to_dense().double()).flip(0)[: ORACLE.pairs]


def scaling(run: Run, size: Size) -> dict[str, Any]:
    """Processor seconds of a product with W against steps, columns, examples and weights; the least of the repeats."""
    few, short, options = size.columns[0], size.lengths[0], {"dtype": torch.float32, "dense": False, "nodes": 1}
    brief = replace(size, steps=short)
    wide = {network_size(width): recorded(replace(brief, width=width)) for width in size.widths}
    sweeps = {
        "steps": {stop: timed(Window.of_run(run, stop=stop, **options), few) for stop in size.lengths},
        "columns": {count: timed(Window.of_run(run, stop=short, **options), count) for count in size.columns},
        "examples": {n: timed(Window.of_run(recorded(replace(brief, examples=n)), **options), few) for n in size.sets},
        "weights": {d: timed(Window.of_run(other, **options), few) for d, other in wide.items()},
    }
    next(iter(sweeps["steps"].values()))()
    rounds = [
        {name: {key: once() for key, once in sweep.items()} for name, sweep in sweeps.items()}
        for _ in range(size.repeats)
    ]
    least = {name: {key: min(r[name][key] for r in rounds) for key in sweep} for name, sweep in sweeps.items()}
    seconds = {f"seconds_by_{name}": values for name, values in least.items()}
    return {**seconds, "exponents": {name: exponent(values) for name, values in least.items()}}


def timed(window: Window, columns: int) -> Callable[[], float]:
    """A function that multiplies W with some columns and returns the processor seconds."""
    H = torch.randn(window.num_outputs, columns, generator=torch.Generator().manual_seed(0))

    def once() -> float:
        begin = time.process_time()
        window.dissipation_gramian.matmat(H)
        return time.process_time() - begin

    return once


def network_size(width: int) -> int:
    return sum(p.numel() for p in network(width).parameters())


def exponent(seconds: dict[int, float]) -> float:
    """The slope of the cost in logarithmic scales."""
    return float(np.polyfit(np.log(list(seconds)), np.log(list(seconds.values())), 1)[0])


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def peak() -> int:
    """Peak resident bytes of this very program."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a small version, in a few seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None, help="also write the result to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size = SMOKE if args.smoke else Size()
    run, _, bar = solve(size)
    result = {
        "benchmark": "operators",
        "smoke": args.smoke,
        "threads": args.threads,
        "config": asdict(size),
        "tolerance": TOLERANCE,
        "limits": {"seconds": LIMIT_SECONDS, "bytes": LIMIT_BYTES},
        **bar,
    }
    say(json.dumps(result))
    result |= {
        "accuracy": accuracy(SMOKE_ORACLE if args.smoke else ORACLE),
        **scaling(run, size),
        "environment": environment(),
    }
    if args.output:
        write_json(args.output, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
