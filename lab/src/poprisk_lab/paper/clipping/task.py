r"""The task of the clipping experiment: thresholds, and the network of the demo on noisy digits."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from poprisk._core.seeds import stream
from poprisk.cli._demonstration.networks import MLPShape, plain_network
from poprisk.cli._demonstration.study import DemoConfig, demo_data
from poprisk.cli._demonstration.training import epoch_batches
from poprisk.optim import PopRiskAdamW
from poprisk.runs._digits import NUM_CLASSES, NUM_PIXELS
from poprisk_lab.paper.clean_lm import study as clean_lm


@dataclass(frozen=True)
class ClippingConfig:
    """Thresholds, from one that never acts to one that always does; ``None`` for no clipping, 1 is the usual choice."""

    max_norms: tuple[float | None, ...] = (None, 100.0, 1.0, 0.3, 0.03)
    lrs: dict[str, float] = field(default_factory=lambda: {"AdamW": 1e-3, "soft": 1e-2})
    """The usual learning rate of AdamW, and ten times as much for Algorithm 1, which also trains the language model."""
    lm: clean_lm.ModelConfig = field(default_factory=clean_lm.ModelConfig)
    lm_seeds: int = 2
    digits: DemoConfig = field(default_factory=DemoConfig)
    """The demo's network and data; its learning rates are not used."""


SMOKE = ClippingConfig(
    max_norms=(None, 0.03),
    lm=clean_lm.SMOKE.model,
    lm_seeds=1,
    digits=DemoConfig(seeds=2, train_size=100, steps=10, width=8, evaluations=2),
)


def train_digits(config: DemoConfig, name: str, lr: float, seed: int, max_norm: float | None) -> dict[str, Any]:
    """One network of the demo, trained separately, because each run is clipped by its own norm."""
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
    """The network of the demo with its initial weights there."""
    return plain_network(MLPShape(NUM_PIXELS, config.width, config.depth, NUM_CLASSES), stream(seed, "weights"))
