"""What one GPU was measured to do (``benchmarks/scale_gpu.py``), beside what was asked for and how it was before."""

from collections.abc import Iterator, Mapping
from typing import Any

from poprisk_lab.costs.page.words import duration
from poprisk_lab.pages.wording import table

Figures = Mapping[str, Any]
_MINUTES, _ERROR, _SPEEDUP, _FOLDS, _THROUGHPUT = 12.0, 1e-3, 20.0, 3.0, 0.99


def reached_table(saved: Figures) -> str:
    """Every bar with its figure, and the same by the code before it was made fast, where that was timed."""
    rows = list(_rows(saved["measurements"]))
    return table(["on one GPU", "measured", "asked for", "before", ""], rows)


def precisions_table(saved: Figures) -> str:
    """The kinds of products: their speed, the bound on their rounding, and the error of the whole."""
    found = saved["measurements"]["resnet_kernel"]["precisions"]
    head = ["products in", "Tflop/s", "bound on rounding", "error found"]
    rows = [
        [name, f"{each['tflops']:.0f}", f"{each['bound']:.1e}", f"{each['error']:.1e}"] for name, each in found.items()
    ]
    return table(head, rows)


def _rows(measured: Figures) -> Iterator[list[str]]:
    yield from _kernel(measured["resnet_kernel"])
    yield from _ten_outputs(measured["resnet_ten_outputs"])
    yield from _adjoint(measured["adjoint"], measured["adjoint_cpu"])
    yield from _folds(measured["k_fold"])
    yield from _training(measured["training_step"])


def _kernel(found: Figures) -> Iterator[list[str]]:
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


def _ten_outputs(found: Figures) -> Iterator[list[str]]:
    fast, size = found["captured"], found["n"] * found["outputs"]
    what = f"the same network with {found['outputs']} outputs, n = {found['n']:,}: {size:,} × {size:,} entries"
    yield [what, f"{duration(fast['seconds'])}, error {fast['error']:.1e}", "whole", "", _verdict(True)]


def _adjoint(gpu: Figures, cpu: Figures) -> Iterator[list[str]]:
    for name in ("SGD, ReLU", "Adam, ReLU"):
        fast, slow = gpu[name], cpu[name]
        times = slow["seconds"] / fast["seconds"]
        what = f"adjoint of {fast['queries']} queries through {fast['steps']} steps of {name.split(',')[0]}"
        against = f"{slow['cores']} cores {duration(slow['seconds'])} ({slow['timed_steps']} steps timed)"
        told = f"{duration(fast['seconds'])}, {times:.0f}× faster than {against}"
        before = f"{duration(fast['before_seconds'])} ({fast['before_steps']} steps timed)"
        yield [what, told, f"≥ {_SPEEDUP:g}×", before, _verdict(times >= _SPEEDUP)]


def _folds(found: Figures) -> Iterator[list[str]]:
    for name, each in found.items():
        if isinstance(each, dict) and "ratio_to_one" in each:
            ratio, bare = each["ratio_to_one"], each["ratio_to_bare_loop"]
            told = f"{ratio:.2f}× one member, {bare:.2f}× a bare training loop"
            reached = max(ratio, bare) <= _FOLDS
            yield [f"ten folds stacked, {name}", told, f"≤ {_FOLDS:g}×", "", _verdict(reached)]


def _training(found: Figures) -> Iterator[list[str]]:
    race = found["race"]["PopRiskAdamW"]
    ratio, error = race["throughput_ratio"], race["standard_error"]
    what = f"compiled and captured training step, {found['weights'] / 1e9:.2f} B weights: tokens/s over fused AdamW's"
    yield [what, f"{ratio:.3f} ± {error:.3f}", f"≥ {_THROUGHPUT:g}", "", _verdict(ratio >= _THROUGHPUT)]


def _verdict(reached: bool) -> str:
    return "reached" if reached else "**missed**"
