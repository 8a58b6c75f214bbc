r"""Multiplying by a Jacobian when PyTorch lacks a derivative: forward mode, else double backward, else its rows."""

import warnings
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jvp, vjp, vmap

from poprisk.errors import BackendWarning

# A function of the flat weights.
OfWeights = Callable[[Tensor], Tensor]


class JacobianWay(Enum):
    """How J V is formed; all ways give the same numbers. The first that a model allows is taken and remembered."""

    FORWARD = "forward mode"
    """About two forward passes per column; no activation is kept."""
    DOUBLE_BACKWARD = "double backward"
    """About four forward passes per column, with the activations kept: Jᵀc is linear in c, and J V is its adjoint."""
    ROWS = "Jacobian rows"
    """p backward passes per example and the [p, d] rows of a few examples in memory, whatever the number of columns."""


@cache
def load_forward_mode() -> None:
    """Once before forward mode is used: PyTorch then loads decompositions that it scripts, with a warning about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))


def forward_mode(function: OfWeights, w: Float[Tensor, "d"], V: Float[Tensor, "d k"]) -> Tensor:
    r"""Derivatives of ``function`` at w along every column, last axis the columns, by one pass for all of them.

    >>> forward_mode(lambda w: w**2, torch.tensor([3.0]), torch.tensor([[1.0, 10.0]]))
    tensor([[ 6., 60.]])
    """
    load_forward_mode()
    return vmap(lambda v: jvp(function, (w,), (v,))[1], in_dims=1, out_dims=-1)(V)


def double_backward(function: OfWeights, w: Float[Tensor, "d"], V: Float[Tensor, "d k"]) -> Tensor:
    r"""The same derivatives from backward passes alone: the adjoint of :math:`c \mapsto J^\top c` at V.

    >>> double_backward(lambda w: w**2, torch.tensor([3.0]), torch.tensor([[1.0, 10.0]]))
    tensor([[ 6., 60.]])
    """
    zero = vmap(lambda _: torch.zeros_like(function(w)))(w.new_zeros(1))[0]
    transposed = vjp(lambda c: vjp(function, w)[1](c)[0], zero)[1]
    return vmap(lambda v: transposed(v)[0], in_dims=1, out_dims=-1)(V)


def take_first_way(
    ways: Mapping[JacobianWay, Callable[[], Tensor]], known: JacobianWay | None
) -> tuple[JacobianWay, Tensor]:
    """The result of the first way that works, starting from the one known to work if there is one.

    Warns with ``BackendWarning`` when a way has to be given up, naming the operation that lacks the derivative.

    >>> take_first_way({JacobianWay.FORWARD: lambda: torch.zeros(())}, None)
    (<JacobianWay.FORWARD: 'forward mode'>, tensor(0.))
    """
    left = list(ways)
    left = left[left.index(known) :] if known in left else left
    for way, following in zip(left, [*left[1:], None], strict=True):
        try:
            return way, ways[way]()
        except RuntimeError as error:  # NotImplementedError is one
            if following is None or not _lacks_derivative(error):
                raise
            warnings.warn(
                f"this model allows no {way.value}, so products use {following.value}, which costs more: "
                f"{str(error).splitlines()[0]}",
                BackendWarning,
                stacklevel=2,
            )
    raise AssertionError("unreachable: the last way returns or raises")


def _lacks_derivative(error: RuntimeError) -> bool:
    text = str(error).lower()
    signs = ("forward ad", "forward mode ad", "is not implemented", "not been implemented", "jvp", "double backward")
    # What forward mode says where its own tangents do not fit: of mse_loss, and of softplus and logs in float32.
    signs += ("zerotensors are immutable", "expected scalar type", "same dtype")
    return isinstance(error, NotImplementedError) or any(sign in text for sign in signs)
