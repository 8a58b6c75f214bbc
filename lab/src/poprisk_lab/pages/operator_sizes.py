"""The measured part of ``docs/operators.md``: time, memory and accuracy of operators at the sizes people train."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poprisk_lab.pages.wording import wrapped

_NETWORKS = {
    "mnist": "MLP 784-256-128-10 on 5,000 images of MNIST",
    "resnet": "ResNet-18 with batch normalization on 5,000 images of CIFAR-10",
}
_RUNS = {"demo": "report of `make demo`", "readme": "report of the README's model"}
_READINGS = {
    "left": "what is left of the labels' gradients",
    "dissipated": "shares of the dissipation",
    "term": "terms of the test loss",
    "drift": "drift",
    "diffusion": "diffusion",
}


def parts(results: Path) -> dict[str, str]:
    """The part between the marks, from the folder of results."""
    rows = [*_sections(results), *_reports(results), *_pairs(results)]
    table = [
        "| what | size | on | measured |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return {"operator_sizes": "\n".join([*table, "", _accuracy(results)])}


def _load(results: Path, name: str) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _sections(results: Path) -> Iterator[list[str]]:
    for device in ("cpu", "cuda"):
        saved = _load(results, f"operator_sections_{device}")
        if saved is None:
            continue
        for name, found in saved["result"]["tasks"].items():
            if "error" in found:
                continue
            read = f"{found['steps_read']} of {found['steps']} steps read, {found['stretch']} at a time"
            size = f"np = {found['outputs']:,}, {_millions(found['weights'])} weights; {read}"
            processor = sum(stage["processor_seconds"] for stage in _stages(found))
            told = f"{found['sections_seconds']:.0f} s"
            if device == "cpu":
                told += f" ({processor:.0f} s of processor time)"
            if found["steps_read"] < found["steps"]:
                told += f"; the whole run would take about {found['whole_run_seconds']:.0f} s"
            noise, error = found["terms"]["label noise"]
            told += f"; at most {found['peak_bytes'] / 1e9:.1f} GB"
            told += f"; label noise changed the test loss by {noise:.2f} ± {error:.2f}"
            yield [f"the four sections: {_NETWORKS[name]}", size, _machine(saved), told]


def _stages(found: dict[str, Any]) -> list[dict[str, float]]:
    return [found["stages"][name] for name in ("evaluation form", "readings", "drift and diffusion")]


def _machine(saved: dict[str, Any]) -> str:
    gpu = saved["result"].get("gpu")
    return gpu or _processor(saved["environment"], saved["result"]["threads"])


def _processor(environment: dict[str, Any], threads: int) -> str:
    return f"{environment['cpu']}, {threads} thread{'s' * (threads != 1)}"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,}"


def _reports(results: Path) -> Iterator[list[str]]:
    saved = _load(results, "report_time")
    if saved is None:
        return
    for name, words in _RUNS.items():
        found = saved["result"].get(name)
        if found is None:
            continue
        missing = f"sections missing: {', '.join(found['missing'])}" if found["missing"] else "no section is missing"
        size = f"np = {found['outputs']:,}; {found['steps_read']} of {found['steps']} steps read"
        told = f"{found['seconds']:.0f} s ({found['processor_seconds']:.0f} s of processor time); {missing}"
        yield [words, size, _machine(saved), told]


def _pairs(results: Path) -> Iterator[list[str]]:
    found = _load(results, "operators_cpu")
    if found is None:
        return
    stage, growth = found["stages"]["eigenpairs"], found["exponents"]
    size = f"np = {found['outputs']:,}, {found['weights']:,} weights, {found['config']['steps']} steps"
    told = (
        f"{len(found['values'])} pairs, residuals at most {found['largest_residual']:.1e} of the largest eigenvalue, "
        f"{stage['seconds']:.0f} s ({stage['processor_seconds']:.0f} s of processor time), "
        f"{found['peak_resident_bytes'] / 1e9:.1f} GB; a product grows with the power {growth['steps']:.2f} of the "
        f"steps, {growth['columns']:.2f} of the columns, {growth['examples']:.2f} of the examples, "
        f"{growth['weights']:.2f} of the weights"
    )
    yield [
        "leading eigenpairs of W, certified",
        size,
        _processor(found["environment"], found["threads"]),
        told,
    ]


def _accuracy(results: Path) -> str:
    saved = _load(results, "operator_readings")
    assert saved is not None
    found, config = saved["result"], saved["config"]
    seeds = sorted({setting[2] for setting in config["settings"]})
    kinds = ", ".join(
        f"{words} {found['kinds'][kind][0]} of {found['kinds'][kind][1]}" for kind, words in _READINGS.items()
    )
    return wrapped(
        f"Of {found['total']} numbers of these sections, at np = {10 * config['examples']:,}, {found['inside']} "
        f"({100 * found['inside'] / found['total']:.1f}%) are within their stated errors of the exact operators "
        f"({kinds}; seeds {' and '.join(map(str, seeds))}, which were not used to settle how errors are computed)."
    )
