"""What one GPU was measured to do (``benchmarks/scale_gpu.py``): beside its goals, and beside the cost models.

The cost models were not fitted to this benchmark.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from poprisk_lab.costs.kernels import rounded_product, rounded_rows
from poprisk_lab.costs.network import Network
from poprisk_lab.costs.page.predictions import RESNET, RESNET_TEN, Predictor, whole_kernel
from poprisk_lab.costs.page.words import duration
from poprisk_lab.costs.training import StateBytes, optimizer_step, training_step
from poprisk_lab.costs.trajectories import adjoint, retraining
from poprisk_lab.pages.wording import table

Figures = Mapping[str, Any]
_MINUTES, _ERROR, _SPEEDUP, _FOLDS, _THROUGHPUT = 12.0, 1e-3, 20.0, 3.0, 0.99


def reached_table(saved: Figures) -> str:
    """Every goal with its measurement, and the time of the code before it was optimized, where that was measured."""
    rows = list(_rows(saved["measurements"]))
    return table(["on one GPU", "measured", "goal", "before", ""], rows)


def precisions_table(saved: Figures) -> str:
    """The kinds of products: their speed, the bound on their rounding, and the error of the whole."""
    found = saved["measurements"]["resnet_kernel"]["precisions"]
    head = ["products in", "Tflop/s", "bound on rounding", "error found"]
    rows = [
        [name, f"{each['tflops']:.0f}", f"{each['bound']:.1e}", f"{each['error']:.1e}"] for name, each in found.items()
    ]
    return table(head, rows)


def _rows(measured: Figures) -> Iterator[list[str]]:
    yield from _kernel_reached(measured["resnet_kernel"])
    yield from _ten_outputs_reached(measured["resnet_ten_outputs"])
    yield from _adjoint_reached(measured["adjoint"], measured["adjoint_cpu"])
    yield from _folds_reached(measured["k_fold"])
    yield from _training_reached(measured["training_step"])


def _kernel_reached(found: Figures) -> Iterator[list[str]]:
    fast = found["captured"]
    minutes, error = fast["extrapolated_minutes"], fast["error"]
    what = f"ResNet-18, kernel {found['rows']:,} × {found['columns']:,}, one output, float16 products"
    one, before = fast["seconds_per_example"], found["before"]["seconds_per_example"]
    yield [
        f"{what}: from {fast['measured_share']:.1%} of it",
        f"{minutes:.1f} min",
        f"≤ {_MINUTES:g} min",
        f"gradients of an example {duration(before)}, now {duration(one)}",
        _verdict(minutes <= _MINUTES),
    ]
    sample = f"largest error of {fast['error_sample']} × {fast['error_sample']} entries, in √(Kᵢᵢ Kⱼⱼ)"
    yield [sample, f"{error:.1e}", f"≤ {_ERROR:.0e}", "", _verdict(error <= _ERROR)]


def _ten_outputs_reached(found: Figures) -> Iterator[list[str]]:
    fast, size = found["captured"], found["n"] * found["outputs"]
    what = f"the same network with {found['outputs']} outputs, n = {found['n']:,}: {size:,} × {size:,} entries"
    yield [what, f"{duration(fast['seconds'])}, error {fast['error']:.1e}", "whole", "", _verdict(True)]


def _adjoint_reached(gpu: Figures, cpu: Figures) -> Iterator[list[str]]:
    for name in ("SGD, ReLU", "Adam, ReLU"):
        fast, slow = gpu[name], cpu[name]
        times = slow["seconds"] / fast["seconds"]
        what = f"adjoint of {fast['queries']} queries through {fast['steps']} steps of {name.split(',')[0]}"
        against = f"{slow['cores']} cores {duration(slow['seconds'])} ({slow['timed_steps']} steps timed)"
        told = f"{duration(fast['seconds'])}, {times:.0f}× faster than {against}"
        before = f"{duration(fast['before_seconds'])} ({fast['before_steps']} steps timed)"
        yield [what, told, f"≥ {_SPEEDUP:g}×", before, _verdict(times >= _SPEEDUP)]


def _folds_reached(found: Figures) -> Iterator[list[str]]:
    for name, each in found.items():
        if isinstance(each, dict) and "ratio_to_one" in each:
            ratio, bare = each["ratio_to_one"], each["ratio_to_bare_loop"]
            told = f"{ratio:.2f}× one member, {bare:.2f}× a bare training loop"
            reached = max(ratio, bare) <= _FOLDS
            yield [f"ten folds stacked, {name}", told, f"≤ {_FOLDS:g}×", "", _verdict(reached)]


def _training_reached(found: Figures) -> Iterator[list[str]]:
    race = found["race"]["PopRiskAdamW"]
    ratio, error = race["throughput_ratio"], race["standard_error"]
    what = f"compiled and captured training step, {found['weights'] / 1e9:.2f} B weights: tokens/s over fused AdamW's"
    yield [what, f"{ratio:.3f} ± {error:.3f}", f"≥ {_THROUGHPUT:g}", "", _verdict(ratio >= _THROUGHPUT)]


def _verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"


@dataclass(frozen=True)
class Elsewhere:
    """One figure of the other benchmark."""

    what: str
    measured: float
    """Seconds."""
    predicted: float


def elsewhere_table(predictor: Predictor, saved: Mapping[str, Any]) -> str:
    """What the other benchmark measured, beside what the models say of it."""
    head = ["measured by `benchmarks/scale_gpu.py`", "measured", "predicted", "predicted / measured"]
    found = list(compared(predictor, saved["measurements"]))
    rows = [
        [each.what, duration(each.measured), duration(each.predicted), f"{each.predicted / each.measured:.2f}"]
        for each in found
    ]
    return table(head, rows)


def compared(predictor: Predictor, measured: Mapping[str, Any]) -> Iterator[Elsewhere]:
    """Every figure that a model speaks of and that is there."""
    makers = (_resnet_tile, _resnet_ten_outputs, _adjoint, _folds, _training_step)
    for maker in makers:
        yield from maker(predictor, measured)


def _resnet_tile(predictor: Predictor, measured: Mapping[str, Any]) -> Iterator[Elsewhere]:
    found = measured.get("resnet_kernel", {}).get("captured", {})
    if "tile_seconds" in found and predictor.has("convolution_rows", "rounded_product"):
        plan, network = found["plan"], RESNET.network
        rows = _rows_seconds(predictor, network, plan["passing"], plan["chunk"])
        product = rounded_product(plan["held"], plan["passing"], measured["resnet_kernel"]["weights"])
        what = f"ResNet-18, a float16 tile of {plan['held']:,} × {plan['passing']:,} and the rows of its columns"
        yield Elsewhere(what, found["tile_seconds"], rows + predictor.seconds("rounded_product", product))


def _rows_seconds(predictor: Predictor, network: Network, examples: int, chunk: int) -> float:
    sizes = (network.forward_flops, network.first_flops, 3 * network.activations, network.weights)
    cost = rounded_rows(*sizes, examples=chunk, outputs=network.outputs).repeated(examples / chunk)
    return predictor.seconds("convolution_rows", cost)


def _resnet_ten_outputs(predictor: Predictor, measured: Mapping[str, Any]) -> Iterator[Elsewhere]:
    found = measured.get("resnet_ten_outputs", {})
    if "captured" in found and predictor.has("convolution_rows", "rounded_product"):
        n, outputs = found["n"], found["outputs"]
        whole = whole_kernel(predictor, RESNET_TEN.network, n)
        if whole is not None and outputs == RESNET_TEN.network.outputs:
            what = f"ResNet-18, the float16 kernel of {n:,} examples with {outputs} outputs"
            yield Elsewhere(what, found["captured"]["seconds"], whole.seconds)


def _adjoint(predictor: Predictor, measured: Mapping[str, Any]) -> Iterator[Elsewhere]:
    found = measured.get("adjoint", {}).get("SGD, ReLU", {})
    if "seconds" in found and predictor.has("adjoint"):
        cost = adjoint(Network.perceptron(_SMALL), steps=found["steps"], batch=64, queries=found["queries"])
        what = f"adjoint of {found['queries']} queries through {found['steps']} steps, {found['weights']:,} weights"
        yield Elsewhere(what, found["seconds"], predictor.seconds("adjoint", cost))


def _folds(predictor: Predictor, measured: Mapping[str, Any]) -> Iterator[Elsewhere]:
    for name, found in measured.get("k_fold", {}).items():
        if isinstance(found, dict) and "ten_seconds" in found and predictor.has("retraining"):
            sizes, batch = name.split(", batch ")
            network = Network.perceptron([int(width) for width in sizes.split("-")])
            cost = retraining(network, steps=found["steps"], batch=int(batch), members=10)
            what = f"ten members of {sizes}, {found['steps']} steps of {batch}"
            yield Elsewhere(what, found["ten_seconds"], predictor.seconds("retraining", cost))


def _training_step(predictor: Predictor, measured: Mapping[str, Any]) -> Iterator[Elsewhere]:
    found = measured.get("training_step", {})
    seconds = found.get("race", found).get("adamw_step_seconds")
    if seconds is not None and predictor.has("training_step", "adamw_step"):
        weights, tokens = found["weights"], found["tokens_per_step"]
        passes = predictor.seconds("training_step", training_step(weights, tokens))
        step = predictor.seconds("adamw_step", optimizer_step(weights, StateBytes(s=0)))
        what = f"captured training step with AdamW, a decoder of {weights / 1e6:.0f} M weights, {tokens:,} tokens"
        yield Elsewhere(what, seconds, passes + step)


_SMALL = (784, 128, 64, 10)
