"""What the last linear layer of a model receives: the features of an example, as the network sees it."""

from types import TracebackType
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn


class LastFeatures:
    """While it is open, watches the linear layers of a model.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> with LastFeatures(model) as features:
    ...     outputs = model(torch.zeros(4, 2))
    ...     features.take(outputs).shape
    torch.Size([4, 3])
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._seen, self._handles = model, list[Tensor](), list[Any]()

    def __enter__(self) -> "LastFeatures":
        layers = [layer for layer in self._model.modules() if isinstance(layer, nn.Linear)]
        watch = lambda _, given: self._seen.append(given[0])  # noqa: E731
        self._handles = [layer.register_forward_pre_hook(watch) for layer in layers]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()

    def are_rows(self, count: int) -> bool:
        """Whether the last linear layer saw one row for each of the examples that have just passed."""
        return bool(self._seen) and self._seen[-1].dim() == 2 and len(self._seen[-1]) == count

    def take(self, outputs: Tensor | None = None) -> Float[Tensor, "b features"]:
        """The features of the batch that has just passed; its outputs where the last layer saw no rows of examples."""
        rows = outputs is not None and not self.are_rows(len(outputs))
        found = outputs.flatten(1) if rows and outputs is not None else self._seen[-1]
        self._seen.clear()
        return found.detach().float()
