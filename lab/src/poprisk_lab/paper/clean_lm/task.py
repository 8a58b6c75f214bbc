r"""The task of the clean language model: sizes, optimizers, and the held-out loss."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from poprisk.optim import PopRiskAdamW, join_gate
from poprisk_lab.data.char_lm import (
    CharText,
    all_windows,
    next_character_loss,
)

GATES: dict[str, dict[str, Any]] = {
    "soft": {"gate": "soft", "strength": 1.0, "weight_decay": 1e-2},
    "calibrated": {"gate": "soft", "strength": 1.0, "weight_decay": 1e-2, "alpha": "calibrated"},
    "snr": {"gate": "snr", "strength": 1.0, "weight_decay": 1e-2},
}
"""PopRiskAdamW's options beside its learning rate, with AdamW's weight decay; ``soft`` is Algorithm 1."""


@dataclass(frozen=True)
class ModelConfig:
    """The language model and the length of its training."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 64
    batch_size: int = 32
    steps: int = 600
    gate_every: int = 10
    """Number of steps between readings of the mean gate."""


@dataclass(frozen=True)
class CleanLMConfig:
    """Optimizers, learning rates and seeds of the experiment."""

    model: ModelConfig = field(default_factory=ModelConfig)
    seeds: int = 2
    adamw_lrs: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    poprisk_lrs: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
    gates: tuple[str, ...] = tuple(GATES)


SMOKE = CleanLMConfig(
    model=ModelConfig(width=16, heads=2, layers=1, context=16, batch_size=4, steps=12, gate_every=4),
    seeds=2,
    adamw_lrs=(1e-3,),
    poprisk_lrs=(1e-2,),
)


def make_optimizer(name: str, model: nn.Module, lr: float) -> Optimizer:
    """AdamW or PopRiskAdamW with one of :data:`GATES`."""
    if name == "AdamW":
        return AdamW(model.parameters(), lr=lr, fused=True)
    return PopRiskAdamW(model.parameters(), lr=lr, fused=True, **join_gate({"normalize_gate": False, **GATES[name]}))


@torch.no_grad()
def held_out_loss(model: nn.Module, text: CharText, context: int) -> float:
    """Nats per character over the whole held-out text."""
    windows = all_windows(text.held_out, context)
    parts = [(next_character_loss(model, chunk).item(), len(chunk)) for chunk in windows.split(128)]
    return math.fsum(loss * count for loss, count in parts) / len(windows)
