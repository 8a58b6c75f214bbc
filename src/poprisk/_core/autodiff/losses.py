r"""Losses :math:`\ell(u, y)` of one example: outputs without a batch axis in, a scalar out."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from poprisk.errors import DataError, HyperparameterError

# The outputs and the target of ONE example, in the module's own shape, to a scalar.
ExampleLoss = Callable[[Tensor, Tensor], Tensor]

IGNORED = -100
"""The class that torch's cross-entropy leaves out."""


def squared_loss(outputs: Float[Tensor, "*out"], target: Float[Tensor, "*target"]) -> Float[Tensor, ""]:
    r"""Half the squared distance, summed over the outputs; its output gradient is the residual u - y.

    .. math:: \ell(u, y) = \tfrac12 \|u - y\|^2

    Raises:
        DataError: outputs and target differ in shape; they are not broadcast.

    >>> import torch
    >>> squared_loss(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    tensor(2.)
    """
    check_same_shape(outputs, target)
    return 0.5 * (outputs - target).square().sum()


def check_same_shape(outputs: Tensor, target: Tensor) -> None:
    """Check that a target has the shape of one example's outputs: they are not broadcast."""
    if outputs.shape != target.shape:
        raise DataError(
            f"a target must have the shape of one example's outputs, {list(outputs.shape)}, got {list(target.shape)}: "
            "reshape the targets to the module's outputs"
        )


def cross_entropy_loss(outputs: Float[Tensor, "classes *places"], target: Tensor) -> Float[Tensor, ""]:
    r"""Negative log-likelihood of the target class (or of class probabilities), summed over places.

    .. math:: \ell(u, y) = \log \textstyle\sum_j e^{u_j} - u_y

    >>> import torch
    >>> cross_entropy_loss(torch.zeros(4), torch.tensor(1))  # log 4
    tensor(1.3863)
    """
    return F.cross_entropy(outputs.unsqueeze(0), target.unsqueeze(0), reduction="sum")


def logistic_loss(outputs: Float[Tensor, "*one"], target: Tensor) -> Float[Tensor, ""]:
    r"""Negative log-likelihood of a binary target (0, 1, or a probability) under one logit.

    .. math:: \ell(u, y) = -y \log \sigma(u) - (1 - y) \log \sigma(-u) = \log(1 + e^u) - y u

    >>> import torch
    >>> logistic_loss(torch.zeros(1), torch.tensor(1))  # log 2
    tensor(0.6931)
    """
    if outputs.numel() != 1 or target.numel() != 1:
        raise DataError(
            f"logistic loss takes one output and one target (0 or 1) for an example, got shapes "
            f"{list(outputs.shape)} and {list(target.shape)}: use cross_entropy for several classes"
        )
    u, y = outputs.reshape(()), target.reshape(()).to(outputs.dtype)
    # Keeps its digits where the example is fitted; torch's softplus is cut to its argument past 20.
    return -y * F.logsigmoid(u) - (1 - y) * F.logsigmoid(-u)


def scalar_loss(loss: ExampleLoss) -> ExampleLoss:
    """The same loss, refusing anything but a scalar as its value.

    >>> import torch
    >>> scalar_loss(squared_loss)(torch.ones(2), torch.zeros(2))
    tensor(1.)
    """

    def checked(u: Tensor, y: Tensor) -> Tensor:
        value = loss(u, y)
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise DataError(f"loss must return a scalar for one example, got {got}: sum or average over its outputs")
        return value

    return checked


def resolve_loss(loss: str | ExampleLoss) -> ExampleLoss:
    """A loss by name, or the callable itself.

    >>> resolve_loss("squared") is squared_loss
    True
    """
    named: dict[str, ExampleLoss] = {
        "squared": squared_loss,
        "cross_entropy": cross_entropy_loss,
        "logistic": logistic_loss,
    }
    if isinstance(loss, str) and loss in named:
        return named[loss]
    if callable(loss):
        return loss
    raise HyperparameterError(
        f"loss must be one of {sorted(named)} or a function of one example's outputs and target, got {loss!r}"
    )
