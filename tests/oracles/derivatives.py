"""Naive derivatives of a module by its flat weights: one example at a time, plain autograd, float64."""

from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call


def flat_weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters() if p.requires_grad])


def outputs(module: nn.Module, w: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """All outputs stacked example by example, [n * p]; every example is a batch of its own."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    pieces = w.split([p.numel() for p in named.values()])
    weights = {name: piece.view_as(p) for (name, p), piece in zip(named.items(), pieces, strict=True)}
    return torch.cat([functional_call(module, weights, (x.unsqueeze(0),)).reshape(-1) for x in inputs])


def jacobian(module: nn.Module, w: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """J [n * p, d]."""
    return torch.autograd.functional.jacobian(lambda v: outputs(module, v, inputs), w)


def mean_jacobian(
    module: nn.Module, start: torch.Tensor, end: torch.Tensor, inputs: torch.Tensor, points: int
) -> torch.Tensor:
    """J averaged over the segment by the midpoint rule with many points."""
    total = 0
    for i in range(points):
        total = total + jacobian(module, start + (i + 0.5) / points * (end - start), inputs)
    return total / points


def mean_loss(
    module: nn.Module, loss: Callable, w: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    rows = outputs(module, w, inputs).reshape(len(inputs), -1)
    return sum(loss(u, y) for u, y in zip(rows, targets, strict=True)) / len(inputs)
