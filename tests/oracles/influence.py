"""Influence by brute force: train again with torch's own optimizers in float64, and difference.

One step on the batch B: backward of Σ_{i∈B} (α_i ℓ_i - ⟨δ_i, u_i⟩) / |B|, clip, optimizer step. α are the examples'
weights and δ shifts of their labels (for squared loss and cross-entropy: of the targets).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def train_again(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable,
    losses: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    targets: Tensor,
    batches: list[Tensor],
    *,
    alpha: Tensor | None = None,
    shift: Tensor | None = None,
    initial: Tensor | None = None,
    clip_norm: float | None = None,
    rates: list[float] | None = None,
) -> nn.Module:
    """`losses` maps outputs and targets of a batch to a vector of losses; `rates` are the step's learning rates."""
    model = make_model().double()
    if initial is not None:
        with torch.no_grad():
            nn.utils.vector_to_parameters(initial, model.parameters())
    optimizer = make_optimizer(model.parameters())
    alpha = torch.ones(len(inputs), dtype=torch.float64) if alpha is None else alpha
    for k, index in enumerate(batches):
        if rates is not None:
            for group in optimizer.param_groups:
                group["lr"] = rates[k]
        optimizer.zero_grad()
        u = model(inputs[index])
        total = (alpha[index] * losses(u, targets[index])).sum()
        if shift is not None:
            total = total - (shift[index] * u.flatten(1)).sum()
        (total / len(index)).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return model


def flat(model: nn.Module) -> Tensor:
    """The trainable weights as one vector, shared ones once."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def central_difference(f: Callable[[float], Tensor], epsilon: float = 1e-5) -> Tensor:
    """f'(0) from f(±ε)."""
    return (f(epsilon) - f(-epsilon)) / (2 * epsilon)
