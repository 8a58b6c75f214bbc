"""Fixed parameters and gradient streams with known signal and noise."""

import torch
from torch import Tensor

SHAPES = ((7, 5), (), (130,))


def start(shapes=SHAPES, dtype=torch.float64, device="cpu", seed=0) -> list[Tensor]:
    """The same numbers in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [torch.nn.Parameter(x.to(device=device, dtype=dtype)) for x in values]


def stream(steps, shapes=SHAPES, dtype=torch.float64, device="cpu", seed=1) -> list[list[Tensor]]:
    """Gradients of unit noise around means from 0 to 2 of either sign, representable in float32 for every dtype."""
    generator = torch.Generator().manual_seed(seed)
    means = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    rows = []
    for _ in range(steps):
        row = [m + torch.randn(m.shape, generator=generator, dtype=torch.float64) for m in means]
        rows.append([g.float().to(device=device, dtype=dtype) for g in row])
    return rows


def train(optimizer, params, gradients) -> None:
    """One step per row of gradients."""
    for row in gradients:
        for p, g in zip(params, row, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference over the largest expected magnitude, over all tensors."""
    difference = max(
        (a.detach().double().cpu() - e.detach().double().cpu()).abs().max().item()
        for a, e in zip(actual, expected, strict=True)
    )
    return difference / max(e.detach().abs().max().item() for e in expected)
