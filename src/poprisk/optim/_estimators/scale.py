"""How a gradient was rescaled after its variance was taken: clipping, unscaling and summed losses change both alike."""

import torch
from torch import Tensor


def gradient_norm(grad: Tensor) -> Tensor:
    """The norm of a gradient, in float32 or better, on its device."""
    return torch.linalg.vector_norm(grad.detach(), dtype=work_dtype(grad.dtype))


def gradient_ratio(grad: Tensor | None, norm: Tensor) -> Tensor:
    """By how much a gradient was rescaled since its norm was taken; 1 where that cannot be told.

    >>> gradient_ratio(torch.tensor([3.0, 4.0]), torch.tensor(10.0))
    tensor(0.5000)
    """
    if grad is None:
        return torch.ones_like(norm)
    ratio = gradient_norm(grad) / norm
    return torch.where((norm > 0) & torch.isfinite(ratio), ratio, 1.0)


def rescale(variance: Tensor, ratio: Tensor) -> Tensor:
    """The variance of a gradient that was multiplied by the ratio."""
    return variance * ratio * ratio  # not the square first: it leaves float32's range for loss scales that do not


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Variances are kept in float32, or in float64 for float64 weights."""
    return torch.promote_types(dtype, torch.float32)
