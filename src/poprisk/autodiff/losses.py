r"""Losses :math:`\ell(u, y)` of one example: outputs without a batch axis in, a scalar out."""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from poprisk.errors import DataError, HyperparameterError

# The outputs and the target of ONE example, in the module's own shape, to a scalar.
ExampleLoss = Callable[[Tensor, Tensor], Tensor]


def squared_loss(outputs: Float[Tensor, "*out"], target: Float[Tensor, "*target"]) -> Float[Tensor, ""]:
    r"""Half the squared distance, summed over the outputs; its output gradient is the residual u - y.

    .. math:: \ell(u, y) = \tfrac12 \|u - y\|^2

    Raises:
        DataError: outputs and target differ in shape; they are not broadcast.

    >>> import torch
    >>> squared_loss(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    tensor(2.)
    """
    if outputs.shape != target.shape:
        raise DataError(
            f"a target must have the shape of one example's outputs, {list(outputs.shape)}, got {list(target.shape)}: "
            "reshape the targets to the module's outputs"
        )
    return 0.5 * (outputs - target).square().sum()


def cross_entropy_loss(outputs: Float[Tensor, "classes *places"], target: Tensor) -> Float[Tensor, ""]:
    r"""Negative log-likelihood of the target class (or of class probabilities), summed over places.

    .. math:: \ell(u, y) = \log \textstyle\sum_j e^{u_j} - u_y

    >>> import torch
    >>> cross_entropy_loss(torch.zeros(4), torch.tensor(1))  # log 4
    tensor(1.3863)
    """
    return F.cross_entropy(outputs.unsqueeze(0), target.unsqueeze(0), reduction="sum")


def resolve_loss(loss: str | ExampleLoss) -> ExampleLoss:
    """A loss by name, or the callable itself.

    Raises:
        HyperparameterError: neither a known name nor callable.

    >>> resolve_loss("squared") is squared_loss
    True
    """
    named: dict[str, ExampleLoss] = {"squared": squared_loss, "cross_entropy": cross_entropy_loss}
    if isinstance(loss, str) and loss in named:
        return named[loss]
    if callable(loss):
        return loss
    raise HyperparameterError(
        f"loss must be one of {sorted(named)} or a function of one example's outputs and target, got {loss!r}"
    )
