"""The cost models against a benchmark that they were not made with: ``benchmarks/scale_gpu.py``."""

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
