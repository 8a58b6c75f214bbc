"""Gradients of a step that need more than one backward pass: the median of three micro-batches, and SAM's."""

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk_lab.engine.parameter_layout import ParameterLayout
from poprisk_lab.engine.task import StackedBatch, StackedWeights

GradientKind = Literal["plain", "median of three", "sharpness"]
"""Of the batch's mean loss; of its thirds, the median of each coordinate; at the worst point nearby."""

RADIUS = 0.05
"""SAM's ρ (Foret et al. 2021, arXiv 2010.01412), the value of its authors for CIFAR."""

Losses = Callable[[StackedWeights, StackedBatch], Float[Tensor, "members"]]


def stacked_gradient(
    losses: Losses,
    layout: ParameterLayout,
    weights: Float[Tensor, "members d"],
    batch: StackedBatch,
    kinds: Sequence[tuple[slice, GradientKind]],
) -> Float[Tensor, "members d"]:
    r"""The gradient of every member, made as its rule asks.

    *Median of three* is RM3 (Chatterjee and Zielinski 2020, arXiv 2003.07422): the batch is split in three, and each
    coordinate takes the median of the three gradients. *Sharpness* is SAM: with the gradient g of a member, the
    gradient at :math:`w + \rho g/\|g\|`, on the same batch.

    All members take part in every pass, so put the members of these two kinds in a stack of their own.

    Args:
        losses: The mean loss of each member on its batch.
        layout: Of the rows.
        weights: One row per member.
        batch: Indices of the examples of this step.
        kinds: Rows of each rule and the kind of its gradient; rows that are not named have a plain one.
    """

    def gradient(at: Tensor, part: StackedBatch) -> Tensor:
        return torch.autograd.grad(losses(layout.views(at), part).sum(), at)[0]

    found = gradient(weights, batch)
    asked = {kind for _, kind in kinds}
    if "median of three" in asked:
        thirds = {name: index.chunk(3, dim=1) for name, index in batch.items()}
        a, b, c = (gradient(weights, {name: third[i] for name, third in thirds.items()}) for i in range(3))
        middle = torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))
        found = _with_rows(found, middle, [rows for rows, kind in kinds if kind == "median of three"])
    if "sharpness" in asked:
        plain = found.detach()
        length = plain.norm(dim=1, keepdim=True).clamp(min=torch.finfo(plain.dtype).tiny)
        moved = (weights.detach() + RADIUS * plain / length).requires_grad_()
        found = _with_rows(found, gradient(moved, batch), [rows for rows, kind in kinds if kind == "sharpness"])
    return found


def _with_rows(found: Tensor, other: Tensor, places: Sequence[slice]) -> Tensor:
    found = found.clone()
    for rows in places:
        found[rows] = other[rows]
    return found
