"""Time of an optimizer step beside another's: interleaved rounds in one process, so that their ratio means something.

A single time depends on the machine and on what else runs there; the median of ratios taken one after the other hardly
does.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from poprisk.errors import BackendWarning, HyperparameterError
from poprisk.optim import PopRiskAdamW

Shapes = Sequence[tuple[int, ...]]
CASES: dict[str, Shapes] = {"1M, 20 tensors": [(50_000,)] * 20, "10M, 1 tensor": [(10_000_000,)]}
"""What ``poprisk bench`` steps: many small tensors, where calls cost most, and a large one, where memory does."""


def timed(function: Callable[[], object], repeats: int, device: str) -> float:
    """Seconds for each of several calls, on the device's own clock where it has one.

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


def step_parameters(shapes: Shapes, device: str) -> list[Tensor]:
    """Random weights with random gradients.

    >>> [tuple(p.shape) for p in step_parameters([(2, 3), (4,)], "cpu")]
    [(2, 3), (4,)]
    """
    params = [torch.randn(shape, device=device).mul_(0.02).requires_grad_() for shape in shapes]
    for p in params:
        p.grad = torch.randn_like(p).mul_(1e-3)
    return params


def interleaved(
    functions: Mapping[str, Callable[[], object]], rounds: int, repeats: int, device: str, seconds: float | None = None
) -> list[dict[str, float]]:
    """Seconds of each function in each round, one after the other within a round.

    Args:
        functions: By name.
        rounds: How many, at most.
        repeats: Calls for each timing.
        device: "cpu" or "cuda".
        seconds: After this time no further round begins, once there are three.

    Raises:
        HyperparameterError: fewer than one round or call.

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
    """One case: median milliseconds of a step, and median ratios of PopRiskAdamW to AdamW, round by round."""

    milliseconds: dict[str, float]
    """By optimizer and implementation."""
    ratios: dict[str, float]
    """PopRiskAdamW over AdamW in the same implementation."""
    spread: dict[str, tuple[float, float]]
    """The quarter and three-quarter points of these ratios over the rounds."""
    rounds: int
    notes: tuple[str, ...] = ()


def step_times(shapes: Shapes, device: str, *, rounds: int = 15, seconds: float = 10.0) -> StepTimes:
    """Both optimizers in every implementation that both have, on the same weights and gradients.

    Args:
        shapes: Of the parameters.
        device: "cpu" or "cuda".
        rounds: Of interleaved timings, at most.
        seconds: That they may take, about.

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
                _ = [optimizers[name].step() for _ in range(2)]  # states are made, kernels compiled
        notes += [str(w.message) for w in said if issubclass(w.category, BackendWarning)]
    steps = {name: optimizer.step for name, optimizer in optimizers.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gradients that never change keep the gate closed
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
    """A tile of a tangent kernel beside the gradient of the same examples' mean loss."""

    examples: int
    outputs: int
    weights: int
    milliseconds: float
    gradients: float
    """How many such gradients the tile takes the time of, the median over interleaved rounds."""


def kernel_time(device: str, *, examples: int = 64, rounds: int = 7, seconds: float = 10.0) -> KernelTime:
    """The tangent kernel of some examples of a small network, all pairs of outputs.

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
