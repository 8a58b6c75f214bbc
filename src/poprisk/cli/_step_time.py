"""Time optimizer steps against each other, in interleaved rounds in one process.

A single time depends on the machine and on what else is running; the median of interleaved ratios hardly does.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import AdamW, Optimizer

from poprisk.errors import BackendWarning, HyperparameterError
from poprisk.optim import PopRiskAdamW

Shapes = Sequence[tuple[int, ...]]
CASES: dict[str, Shapes] = {"1M, 20 tensors": [(50_000,)] * 20, "10M, 1 tensor": [(10_000_000,)]}
"""Cases of ``poprisk bench``: many small tensors, limited by calls, and a large one, limited by memory."""


def timed(function: Callable[[], object], repeats: int, device: str) -> float:
    """Seconds per call, averaged over several calls; on a GPU, by its own clock.

    >>> timed(lambda: None, 3, "cpu") < 1.0
    True
    """
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(repeats):
            function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / repeats
    begin = time.perf_counter()
    for _ in range(repeats):
        function()
    return (time.perf_counter() - begin) / repeats


def step_parameters(shapes: Shapes, device: str) -> list[torch.nn.Parameter]:
    """Random weights with random gradients.

    >>> [tuple(p.shape) for p in step_parameters([(2, 3), (4,)], "cpu")]
    [(2, 3), (4,)]
    """
    params = [torch.nn.Parameter(torch.randn(shape, device=device).mul_(0.02)) for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p).mul_(1e-3)
    return params


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int, repeats: int, device: str, seconds: float | None = None
) -> list[dict[str, float]]:
    """Seconds per call of each function in each round; within a round, the functions take turns.

    Args:
        functions: The functions, by name.
        rounds: Maximum number of rounds.
        repeats: Calls per timing.
        device: "cpu" or "cuda".
        seconds: No further round begins after this time, once there are three.

    Raises:
        HyperparameterError: ``rounds`` or ``repeats`` is less than 1.

    >>> rows = interleaved({"a": lambda: None, "b": lambda: None}, 4, 1, "cpu")
    >>> len(rows), sorted(rows[0])
    (4, ['a', 'b'])
    """
    if rounds < 1 or repeats < 1:
        raise HyperparameterError(f"rounds and repeats must be at least 1, got {rounds} and {repeats}")
    rows: list[dict[str, float]] = []
    began = time.perf_counter()
    for _ in range(rounds):
        rows.append({name: timed(function, repeats, device) for name, function in functions.items()})
        if seconds is not None and len(rows) >= 3 and time.perf_counter() - began > seconds:
            break
    return rows


@dataclass(frozen=True)
class StepTimes:
    """Results of one case: median milliseconds per step, and median ratios of PopRiskAdamW to AdamW over the rounds."""

    milliseconds: dict[str, float]
    """Milliseconds by optimizer and implementation."""
    ratios: dict[str, float]
    """Ratio of PopRiskAdamW to AdamW with the same implementation."""
    spread: dict[str, tuple[float, float]]
    """First and third quartile of these ratios over the rounds."""
    rounds: int
    notes: tuple[str, ...] = ()


def step_times(shapes: Shapes, device: str, *, rounds: int = 15, seconds: float = 10.0) -> StepTimes:
    """Time both optimizers with every implementation that both have, on the same weights and gradients.

    Args:
        shapes: Shapes of the parameters.
        device: "cpu" or "cuda".
        rounds: Maximum number of rounds.
        seconds: Approximate time limit.

    >>> sorted(step_times([(1000,)], "cpu", rounds=3).ratios)
    ['foreach', 'fused']
    """
    params = step_parameters(shapes, device)
    optimizers: dict[str, Optimizer] = {}
    notes: list[str] = []
    for kind in ("foreach", "fused"):
        chosen: dict[str, Any] = {kind: True}
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            optimizers[f"AdamW, {kind}"] = AdamW(params, **chosen)
            optimizers[f"PopRiskAdamW, {kind}"] = PopRiskAdamW(params, **chosen)
            for name in (f"AdamW, {kind}", f"PopRiskAdamW, {kind}"):
                _ = [optimizers[name].step() for _ in range(2)]  # creates the state and compiles kernels
        notes += [str(w.message) for w in said if issubclass(w.category, BackendWarning)]
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # constant gradients keep the gate closed
        rows = interleaved(steps, rounds, 3, device, seconds)
    ratios = {k: sorted(row[f"PopRiskAdamW, {k}"] / row[f"AdamW, {k}"] for row in rows) for k in ("foreach", "fused")}
    return StepTimes(
        milliseconds={name: 1e3 * statistics.median(row[name] for row in rows) for name in optimizers},
        ratios={kind: statistics.median(values) for kind, values in ratios.items()},
        spread={kind: (values[len(values) // 4], values[-1 - len(values) // 4]) for kind, values in ratios.items()},
        rounds=len(rows),
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass(frozen=True)
class KernelTime:
    """Time of a tile of a tangent kernel, compared with the gradient of the mean loss of the same examples."""

    examples: int
    outputs: int
    weights: int
    milliseconds: float
    gradients: float
    """Time of the tile in units of such gradients: median over interleaved rounds."""


def kernel_time(device: str, *, examples: int = 64, rounds: int = 7, seconds: float = 10.0) -> KernelTime:
    """Time the tangent kernel of a small network for some examples, all pairs of outputs.

    >>> kernel_time("cpu", examples=4, rounds=1).outputs
    10
    """
    from poprisk._core.autodiff import FlatModel
    from poprisk.operators import train_kernel

    network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(device)
    model = FlatModel(network, "squared")
    x, y = torch.randn(examples, 64, device=device), torch.randn(examples, 10, device=device)

    def gradient() -> None:
        network.zero_grad()
        (network(x) - y).square().mean().backward()

    def tile() -> None:
        train_kernel(model, model.weights, x)

    for function in (gradient, tile):
        function()
    rows = interleaved({"gradient": gradient, "tile": tile}, rounds, 3, device, seconds)
    return KernelTime(
        examples=examples,
        outputs=10,
        weights=sum(p.numel() for p in network.parameters()),
        milliseconds=1e3 * statistics.median(row["tile"] for row in rows),
        gradients=statistics.median(row["tile"] / row["gradient"] for row in rows),
    )
