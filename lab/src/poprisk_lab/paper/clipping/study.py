"""What clipping the gradient's norm does to the gate: always active, sometimes, never."""

import argparse
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from poprisk._core.seeds import stream
from poprisk._core.statistics import mean_over_seeds
from poprisk.cli._demonstration.networks import MLPShape, initial_weights
from poprisk.cli._demonstration.study import DemoConfig, demo_data
from poprisk.cli._demonstration.training import epoch_batches
from poprisk.errors import ClosedGateWarning
from poprisk.optim import PopRiskAdamW
from poprisk.runs._digits import NUM_CLASSES, NUM_PIXELS
from poprisk_lab.data.char_lm import help_topics
from poprisk_lab.engine.run_ledger import Ledger
from poprisk_lab.paper.clean_lm import study as clean_lm

KIND = "clipping"


@dataclass(frozen=True)
class ClippingConfig:
    """Thresholds from one that never acts to one that always does; None is no clipping, 1 the usual choice."""

    max_norms: tuple[float | None, ...] = (None, 100.0, 1.0, 0.3, 0.03)
    lrs: dict[str, float] = field(default_factory=lambda: {"AdamW": 1e-3, "soft": 1e-2})
    """The usual learning rate of AdamW and ten times it for Algorithm 1, which alone trains the language model."""
    lm: clean_lm.ModelConfig = field(default_factory=clean_lm.ModelConfig)
    lm_seeds: int = 2
    digits: DemoConfig = field(default_factory=lambda: DemoConfig(poprisk_lrs=(1e-3, 3e-3, 1e-2, 3e-2)))
    """The demo's network and data; its learning rates are not used."""


SMOKE = ClippingConfig(
    max_norms=(None, 0.03),
    lm=clean_lm.SMOKE.model,
    lm_seeds=1,
    digits=DemoConfig(seeds=2, train_size=100, steps=10, width=8, evaluations=2),
)


def run(config: ClippingConfig, output: Path) -> dict[str, Any]:
    """Measure what the output file does not hold yet, then summarize task by task."""
    text = help_topics()
    ledger = Ledger(output, KIND, asdict(config) | {"text_sha256": text.sha256})
    cells = [(name, max_norm) for name in config.lrs for max_norm in config.max_norms]
    gated = [cell for cell in cells if cell[0] != "AdamW"]

    def language_model(name: str, max_norm: float | None, seed: int) -> dict[str, Any]:
        return asdict(clean_lm.train(config.lm, text, name, config.lrs[name], seed, max_norm=max_norm))

    def digits(name: str, max_norm: float | None, seed: int) -> dict[str, Any]:
        return train_digits(config.digits, name, config.lrs[name], seed, max_norm)

    tasks = {"noisy digits": (digits, cells, config.digits.seeds), "clean LM": (language_model, gated, config.lm_seeds)}
    for task, (experiment, chosen, seeds) in tasks.items():
        for name, max_norm in chosen:
            for seed in range(seeds):
                key = {"task": task, "optimizer": name, "max_norm": max_norm, "seed": seed}
                ledger.measure(key, partial(experiment, name, max_norm, seed))
    summary = [_summary_row(ledger, task, *cell) for task, (_, chosen, _) in tasks.items() for cell in chosen]
    ledger.finish({"summary": summary})
    return {"summary": summary}


def train_digits(config: DemoConfig, name: str, lr: float, seed: int, max_norm: float | None) -> dict[str, Any]:
    """One network of the demo, on its own, because each training is clipped by its own norm."""
    data = demo_data(config)
    inputs, labels, wrong = data.inputs[seed], data.labels[seed], data.wrong[seed]
    model = mlp(config, seed)
    optimizer = clean_lm.make_optimizer(name, model, lr)
    batches = epoch_batches(config.train_size, config.examples_per_step, [stream(seed, "batches")])
    gates, clipped = [], 0
    for step in range(config.steps):
        index = next(batches)[0]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[index]), labels[index]).backward()
        if max_norm is not None:
            clipped += int(nn.utils.clip_grad_norm_(model.parameters(), max_norm) > max_norm)
        optimizer.step()
        if isinstance(optimizer, PopRiskAdamW) and (step + 1) % 10 == 0:
            gates.append(optimizer.diagnostics()[0].mean_gate.item())
    with torch.no_grad():
        right = model(data.test_inputs[seed]).argmax(-1) == data.test_labels[seed]
        fitted = model(inputs).argmax(-1) == labels
    return {
        "accuracy": right.double().mean().item(),
        "memorized": fitted[wrong].double().mean().item(),
        "mean_gate": math.fsum(gates) / len(gates) if gates else None,
        "clipped_share": None if max_norm is None else clipped / config.steps,
    }


def mlp(config: DemoConfig, seed: int) -> nn.Sequential:
    """The demo's network with the weights it has there."""
    shape = MLPShape(NUM_PIXELS, config.width, config.depth, NUM_CLASSES)
    weights = initial_weights(shape, stream(seed, "weights"))
    layers: list[nn.Module] = []
    for index, (fan_in, fan_out) in enumerate(shape.layers):
        linear = nn.Linear(fan_in, fan_out)
        linear.weight.data, linear.bias.data = weights[2 * index], weights[2 * index + 1].flatten()
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _summary_row(ledger: Ledger, task: str, name: str, max_norm: float | None) -> dict[str, Any]:
    runs = ledger.select(task=task, optimizer=name, max_norm=max_norm)
    row: dict[str, Any] = {"task": task, "optimizer": name, "max_norm": max_norm}
    for quantity in ("clipped_share", "mean_gate", "accuracy", "memorized", "loss"):
        values = [r[quantity] for r in runs if r.get(quantity) is not None]
        row[quantity] = asdict(mean_over_seeds(values)) if values else None
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """``python -m poprisk_lab.paper.clipping.study --output results/clipping.json``."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.paper.clipping.study", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("results/clipping.json"))
    parser.add_argument("--smoke", action="store_true", help="a few seconds at a tiny size")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", ClosedGateWarning)  # the mean gate is among the results
    for row in run(SMOKE if options.smoke else ClippingConfig(), options.output)["summary"]:
        measured = [f"{k} {v['value']:.4f}" for k, v in row.items() if isinstance(v, dict)]
        print(f"{row['task']}, {row['optimizer']}, max_norm {row['max_norm']}: {', '.join(measured)}")
    print(f"Wrote {options.output}")


if __name__ == "__main__":
    main()
