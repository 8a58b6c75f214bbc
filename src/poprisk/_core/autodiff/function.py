"""A pure function of a flat weight vector, dressed as a module."""

from collections.abc import Callable
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from poprisk.errors import DataError


class FunctionModule(nn.Module):
    """``function(w, inputs)`` with w its one parameter.

    Args:
        function: Flat weights and a batch (a tensor, or the tuple of several) to the batch's outputs, first axis the
            examples, each mapped by itself.
        weights: Starting point; copied.

    Raises:
        DataError: the weights are no flat vector of floating-point numbers.

    >>> import torch
    >>> module = FunctionModule(lambda w, x: x @ w, torch.tensor([1.0, 2.0]))
    >>> module(torch.tensor([[1.0, 1.0]])).tolist()
    [3.0]
    """

    def __init__(self, function: Callable[[Tensor, Any], Tensor], weights: Float[Tensor, "d"]) -> None:
        super().__init__()
        if weights.dim() != 1 or not weights.is_floating_point():
            raise DataError(
                f"weights must be one flat vector of floating-point numbers, got shape {list(weights.shape)} of "
                f"{weights.dtype}: flatten them and unflatten inside the function"
            )
        self.function = function
        self.weights = nn.Parameter(weights.detach().clone())

    def forward(self, *inputs: Tensor) -> Tensor:
        """The function at the module's weights."""
        return self.function(self.weights, inputs[0] if len(inputs) == 1 else inputs)
