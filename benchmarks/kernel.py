"""Time and memory of a full train kernel against the two functions of PyTorch's own tutorial on tangent kernels.

All compute the [n p, n p] kernel in float32 on the same model and inputs, on one thread unless told otherwise. The last
line printed is one JSON object: ``speedup`` is the median over interleaved rounds of (better of the two) / ours, and
``memory`` what became of all three in processes that may not map more than 4 GiB. A function that would take too long
for the race is timed on an eighth of the examples, and its time for all of them foretold from that.

    python benchmarks/kernel.py --output results/kernel_cpu.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap

from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.store.envelope import environment
from poprisk._core.store.files import write_json
from poprisk.operators._kernels.tangent import train_kernel

LIMIT = 4 * 2**30
OUR_MEMORY = 2 * 2**30


def jacobian_contraction(module: nn.Module, x: Tensor) -> Tensor:
    """The tutorial's ``empirical_ntk_jacobian_contraction``, full: per-example Jacobians by parameter, contracted."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def forward(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(module, parameters, (one.unsqueeze(0),)).squeeze(0)

    def jacobians() -> list[Tensor]:
        return [j.flatten(2) for j in vmap(jacrev(forward), (None, 0))(parameters, x).values()]

    first, second = jacobians(), jacobians()
    blocks = torch.stack([torch.einsum("Naf,Mbf->NMab", a, b) for a, b in zip(first, second, strict=True)]).sum(0)
    return blocks.transpose(1, 2).reshape(blocks.shape[0] * blocks.shape[2], -1)


def vector_products(module: nn.Module, x: Tensor) -> Tensor:
    """The tutorial's ``empirical_ntk_ntk_vps``, full: for every pair of examples a vjp of the identity, then a jvp."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}

    def forward(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(module, parameters, (one.unsqueeze(0),)).squeeze(0)

    def block(first: Tensor, second: Tensor) -> Tensor:
        def at_first(parameters: dict[str, Tensor]) -> Tensor:
            return forward(parameters, first)

        def at_second(parameters: dict[str, Tensor]) -> Tensor:
            return forward(parameters, second)

        output, pullback = vjp(at_first, parameters)

        def product(cotangent: Tensor) -> Tensor:
            return jvp(at_second, (parameters,), pullback(cotangent))[1]

        return vmap(product)(torch.eye(output.numel(), dtype=output.dtype))

    blocks = vmap(vmap(block, (None, 0)), (0, None))(x, x)
    return blocks.transpose(1, 2).reshape(blocks.shape[0] * blocks.shape[2], -1)


def ours(module: nn.Module, x: Tensor, memory: int | None = None) -> Tensor:
    model = FlatModel(module, "squared")
    return train_kernel(model, model.weights, x, memory=memory)


FUNCTIONS = {"jacobian_contraction": jacobian_contraction, "vector_products": vector_products, "ours": ours}


def mlp(inputs: int = 64, width: int = 256) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )  # fmt: skip


def cnn() -> nn.Module:
    """The shape of the tutorial's network, for digits of 16×16."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(),
        nn.Linear(16 * 10 * 10, 10),
    )  # fmt: skip


def case(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    if name == "cnn":
        return cnn(), torch.randn(256, 1, 16, 16)
    if name == "mlp":
        return mlp(), torch.randn(256, 64)
    if name == "large mlp":
        return mlp(784, 1024), torch.randn(1000, 784)
    raise SystemExit(f"unknown case {name!r}")


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def compare(name: str, rounds: int, patience: float) -> dict:
    """Interleaved rounds; a slower baseline is left out if a small run foretells more than ``patience`` seconds."""
    module, x = case(name)
    expected = ours(module.double(), x[:8].double())
    for function in FUNCTIONS.values():
        error = ((function(module, x[:8].double()) - expected).norm() / expected.norm()).item()
        if error > 1e-10:
            raise SystemExit(f"{function.__name__} differs from ours by {error:.2g}")
    module.float()
    foretold = {key: _foretold(function, module, x) for key, function in FUNCTIONS.items()}
    likely = min((key for key in FUNCTIONS if key != "ours"), key=foretold.__getitem__)
    raced = {key: FUNCTIONS[key] for key, guess in foretold.items() if guess < patience or key in ("ours", likely)}
    rows = []
    for _ in range(rounds):
        rows.append({key: seconds(lambda function=function: function(module, x)) for key, function in raced.items()})
    baselines = [key for key in raced if key != "ours"]
    best = min(baselines, key=lambda key: statistics.median(row[key] for row in rows))
    return {
        "n": x.shape[0],
        "p": 10,
        "d": sum(p.numel() for p in module.parameters()),
        "seconds": {key: statistics.median(row[key] for row in rows) for key in raced},
        "foretold_seconds_of_what_was_left_out": {key: foretold[key] for key in FUNCTIONS if key not in raced},
        "better_baseline": best,
        "speedup": statistics.median(row[best] / row["ours"] for row in rows),
        "speedups": [round(row[best] / row["ours"], 3) for row in rows],
    }


def _foretold(function: Callable[[nn.Module, Tensor], Tensor], module: nn.Module, x: Tensor) -> float:
    """Seconds for all examples, from the time for an eighth of them and a cost that grows with their square."""
    few = x[: x.shape[0] // 8]
    function(module, few[:2])
    return 64 * seconds(lambda: function(module, few))


def limited(name: str) -> dict:
    """The large case in one process for each function, none of which may map more than 4 GiB."""
    outcome = {}
    for key in FUNCTIONS:
        command = [sys.executable, __file__, "--alone", key, "--case", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        outcome[key] = (
            json.loads(lines[-1]) if done.returncode == 0 and lines else {"outcome": f"died {done.returncode}"}
        )
        print(f"{name} under {LIMIT >> 30} GiB, {key}: {outcome[key]}", flush=True)
    return outcome


def alone(key: str, name: str) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    module, x = case(name)
    options = {"memory": OUR_MEMORY} if key == "ours" else {}
    begin = time.perf_counter()
    try:
        K = FUNCTIONS[key](module, x, **options)
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error) and not isinstance(error, MemoryError):
            raise
        print(json.dumps({"outcome": "out of memory"}))
        return
    seconds_taken = time.perf_counter() - begin
    row = {"outcome": "finished", "seconds": seconds_taken, "memory": OUR_MEMORY, "peak_resident_bytes": _peak()}
    print(json.dumps(row | {"kernel": list(K.shape)}))


def _peak() -> int:
    """Peak resident bytes of this very program; ``getrusage`` would count those of the process that started it."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--patience", type=float, default=120.0, help="leave out what would take longer, in seconds")
    parser.add_argument("--output", type=Path, default=None, help="also write the result to this file")
    parser.add_argument("--alone", choices=list(FUNCTIONS), default=None, help="one function, under the memory limit")
    parser.add_argument("--case", default="large mlp")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.alone:
        alone(args.alone, args.case)
        return
    cases = {}
    for name in ("mlp", "cnn"):
        cases[name] = compare(name, args.rounds, args.patience)
        row = cases[name]
        print(f"{name}: {row['seconds']}, {row['speedup']:.1f} times {row['better_baseline']}", flush=True)
    summary = {
        "benchmark": "kernel",
        "threads": args.threads,
        "speedup": {name: round(row["speedup"], 2) for name, row in cases.items()},
        "memory_limit_bytes": LIMIT,
        "memory": {"large mlp": limited("large mlp")},
        "cases": cases,
        "environment": environment(),
    }
    if args.output:
        write_json(args.output, summary)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
