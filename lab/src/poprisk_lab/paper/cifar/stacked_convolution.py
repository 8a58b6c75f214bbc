r"""Convolutions of many networks at once: 3 x 3, stride 1, zeros around, each member with its own weights.

Two ways with one result. ``im2col`` writes the nine neighbours of every pixel side by side and multiplies matrices, one
batched product for all members. Only input and weights are kept for the backward pass; the nine-fold copy is made anew
there, so that it exists for one layer at a time. ``grouped`` gives cuDNN one convolution with a group for each member.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from poprisk.errors import HyperparameterError

Convolution = Literal["im2col", "grouped"]
CONVOLUTIONS = ("im2col", "grouped")


def stacked_conv3x3(
    x: Float[Tensor, "members batch height width inputs"],
    w: Float[Tensor, "members outputs inputs 3 3"],
    convolution: str = "im2col",
) -> Float[Tensor, "members batch height width outputs"]:
    r"""Each member's convolution of its own images, channels last.

    .. math:: y_{m,b,i,j,o} = \sum_{k,l,c} w_{m,o,c,k,l}\, x_{m,b,\,i+k-1,\,j+l-1,\,c}

    Args:
        x: Images of every member, channels last.
        w: Weights of every member, laid out as in ``torch.nn.Conv2d``.
        convolution: ``im2col`` or ``grouped``.

    Returns:
        As ``torch.nn.functional.conv2d(x, w, padding=1)``, member by member.

    Raises:
        HyperparameterError: no such way.

    >>> x, w = torch.ones(2, 1, 3, 3, 1), torch.ones(2, 1, 1, 3, 3)
    >>> stacked_conv3x3(x, w)[0, 0, :, :, 0]
    tensor([[4., 6., 4.],
            [6., 9., 6.],
            [4., 6., 4.]])
    """
    if convolution == "im2col":
        return _NinefoldProduct.apply(x, w)  # type: ignore[return-value]
    if convolution == "grouped":
        return _grouped(x, w)
    raise HyperparameterError(f"convolution must be one of {', '.join(CONVOLUTIONS)}, got {convolution!r}")


class _NinefoldProduct(torch.autograd.Function):
    """The nine neighbours of each pixel times a matrix, forgetting the neighbours after use."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _product(x, w)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:  # a convolution again: by the kernel turned half round, its channels exchanged
            grad_x = _product(grad, w.flip(-1, -2).transpose(1, 2))
        if ctx.needs_input_grad[1]:
            nine_c_by_o = torch.bmm(_neighbours(x).mT, grad.flatten(1, 3))
            grad_w = nine_c_by_o.unflatten(1, (3, 3, -1)).permute(0, 4, 3, 1, 2)
        return grad_x, grad_w


def _product(x: Tensor, w: Tensor) -> Tensor:
    members, outputs = w.shape[:2]
    matrix = w.permute(0, 3, 4, 2, 1).reshape(members, -1, outputs)
    return torch.bmm(_neighbours(x), matrix).view(*x.shape[:-1], outputs)


def _neighbours(x: Tensor) -> Float[Tensor, "members pixels nine_inputs"]:
    """Of every pixel, the nine around it, channel after channel; zeros beyond the border."""
    padded = functional.pad(x, (0, 0, 1, 1, 1, 1))
    windows = padded.unfold(2, 3, 1).unfold(3, 3, 1)  # members batch height width inputs 3 3: a view
    return windows.permute(0, 1, 2, 3, 5, 6, 4).reshape(x.shape[0], -1, 9 * x.shape[-1])


def _grouped(x: Tensor, w: Tensor) -> Tensor:
    members = x.shape[0]
    images = x.permute(1, 0, 4, 2, 3).flatten(1, 2)  # batch, members x inputs, height, width
    made = functional.conv2d(images, w.flatten(0, 1), padding=1, groups=members)
    return made.unflatten(1, (members, -1)).permute(1, 0, 3, 4, 2).contiguous()
