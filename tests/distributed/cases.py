"""What the processes train: many tiny networks at once, each a parameter group with options of its own.

One backward and one step serve all of them, so that every gate, granularity and backend costs one training.
"""

from typing import Any

import torch
from torch import Tensor, nn

from poprisk.optim import Gate
from poprisk.optim._gate import GATE_FIELD

EXAMPLES, STEPS, LOOK_EVERY = 16, 50, 10
ALPHA = 0.3
"""So that under each gate some coordinates move and some do not."""
NAN_AT, NAN_ROW = 20, 4
"""At one step one gradient entry of the networks named nan… is NaN; its row lies on the third of four ranks."""
FORLOOP, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}


def options() -> dict[str, dict[str, Any]]:
    """One entry per network: its name, and what its parameter group asks for."""
    table: dict[str, dict[str, Any]] = {
        f"{gate}-{granularity}": {"gate": gate, "granularity": granularity, **FORLOOP}
        for gate in ("soft", "hard", "snr")
        for granularity in ("element", "row", "tensor")
    }
    for name, backend in (("foreach", FOREACH), ("fused", FUSED)):
        table |= {f"{gate}-{name}": {"gate": gate, **backend} for gate in ("soft", "hard", "snr")}
        table[f"none-{name}"] = {"gate": None, **backend}
        table[f"bf16-{name}"] = {"gate": "snr", "state_dtype": torch.bfloat16, **backend}
    return table | {
        "tensor-fused": {"granularity": "tensor", **FUSED},
        "none-forloop": {"gate": None, **FORLOOP},
        "normalized": {"gate": "snr", "normalize_gate": True, **FORLOOP},
        "shared": {"state": "shared", "betas": (0.9, 0.9), "rho": 0.9, **FORLOOP},
        "calibrated": {"alpha": "calibrated", **FORLOOP},
        "tensor-lr": {"lr": torch.tensor(0.01), **FORLOOP},
        "nan-tensor": {"gate": "snr", "granularity": "tensor", **FORLOOP},
        "nan-fused": {"gate": "snr", **FUSED},
    }


ROUNDED = ("bf16-foreach", "bf16-fused")
"""A last bit of a gradient can tip a stochastic rounding: these are compared on gradients that are the same bit by bit.
"""
SAVED = ("soft-row", "calibrated", "shared", "bf16-fused", "bf16-foreach", "tensor-lr")
"""The networks of the checkpoint: states of every kind and dtype."""


class Tiny(nn.Module):
    """Fewer rows than ranks (3, 1), rows that do not divide (5), a convolution, a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(2, 3, 2)
        self.hidden = nn.Linear(9, 5, bias=False)
        self.last = nn.Linear(5, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.hidden(torch.tanh(self.filter(x)).flatten(1))))


class Many(nn.Module):
    """Independent networks with one start; the loss is the sum of theirs, so each gets the gradient of its own."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        first = Tiny()
        self.networks = nn.ModuleDict()
        for name in names:
            self.networks[name] = Tiny()
            self.networks[name].load_state_dict(first.state_dict())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.stack([(network(x) - y).square().mean() for network in self.networks.values()]).sum()


def groups(model: Many) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, one per network."""
    table = options()
    return [{"params": list(net.parameters()), **paper_gate(table[name])} for name, net in model.networks.items()]


def paper_gate(options: dict[str, Any]) -> dict[str, Any]:
    """The same options with Algorithm 1's gate, changed where they say so."""
    gate = {"alpha": ALPHA, **{name: options[name] for name in GATE_FIELD if name in options}}
    rest = {name: value for name, value in options.items() if name not in GATE_FIELD}
    if options.get("gate", "soft") is None:
        return rest
    fields = {GATE_FIELD[name]: value for name, value in gate.items()}
    return {**rest, "gate": Gate.paper(kind=options.get("gate", "soft"), **fields)}


def batch(step: int, rank: int = 0, ranks: int = 1, examples: int = EXAMPLES) -> tuple[Tensor, Tensor]:
    """One rank's share of the global batch of a step: consecutive rows."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(examples, 2, 4, generator=generator)
    y = 0.3 * x.flatten(1).sum(1, keepdim=True) + torch.randn(examples, 1, generator=generator)
    size = examples // ranks
    rows = slice(rank * size, (rank + 1) * size)
    return x[rows], y[rows]
