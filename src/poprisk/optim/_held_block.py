"""Measuring a model on held-back examples: batches without a data loader, losses example by example."""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import default_collate

from poprisk.errors import DataError
from poprisk.optim._evaluation import evaluating
from poprisk.optim._held_curve import Metric

Loss = Callable[[Any, Any], Tensor]


@runtime_checkable
class Measurable(Protocol):
    """Held-back examples that measure a model themselves, as a trainer does with its own batches and loss."""

    count: int
    """Number of held-back examples."""

    def measure(self, model: nn.Module, batch_size: int) -> tuple[Float[Tensor, "held"], Float[Tensor, "held"]]:
        """Loss and score of every held-back example, on the CPU; smaller scores are better."""
        ...


class HeldBlock:
    """Held-back examples, their loss example by example, and the score that a moment is chosen by.

    Args:
        held: A map-style dataset of (input, target) pairs, or a tuple of inputs and targets.
        loss: The mean loss of outputs and targets, as in the training loop.
        metric: What to choose by; None takes accuracy for classes, otherwise the loss.
        collate: Makes a batch of a list of examples of a dataset.
    """

    def __init__(
        self, held: Any, loss: Loss, metric: Metric | None, collate: Callable[[list[Any]], Any] | None
    ) -> None:
        self._held, self._metric, self._collate = held, metric, collate or default_collate
        self._loss = _by_example(loss)
        self._is_arrays = isinstance(held, tuple) and len(held) == 2 and not hasattr(held, "_fields")
        self.count = len(held[1]) if self._is_arrays else len(held)
        if not self.count:
            raise DataError("the held-back block is empty: hold at least one example back")

    def measure(self, model: nn.Module, batch_size: int) -> tuple[Float[Tensor, "held"], Float[Tensor, "held"]]:
        """Losses and scores of every held-back example, on the CPU; the model is in evaluation mode meanwhile."""
        losses, scores = [], []
        with evaluating(model) as device:
            for start in range(0, self.count, batch_size):
                inputs, targets = _moved(self._batch(start, min(start + batch_size, self.count)), device)
                outputs = model(**inputs) if isinstance(inputs, Mapping) else model(*_several(inputs))
                loss = self._loss(outputs, targets).detach().float()
                losses.append(loss)
                scores.append(self._score(outputs, targets, loss))
        return torch.cat(losses).cpu(), torch.cat(scores).cpu()

    def _batch(self, start: int, stop: int) -> tuple[Any, Any]:
        if self._is_arrays:
            inputs, targets = self._held
            parts = inputs if isinstance(inputs, tuple) else (inputs,)
            rows = tuple(torch.as_tensor(part[start:stop]) for part in parts)
            return rows if isinstance(inputs, tuple) else rows[0], torch.as_tensor(targets[start:stop])
        batch = self._collate([self._held[i] for i in range(start, stop)])
        if isinstance(batch, Mapping):
            return batch, batch.get("labels")
        *inputs, targets = batch
        return inputs[0] if len(inputs) == 1 else tuple(inputs), targets

    def _score(self, outputs: Any, targets: Any, losses: Tensor) -> Tensor:
        classes = _has_classes(outputs, targets)
        if self._metric == "loss" or (self._metric is None and not classes):
            return losses
        if not classes:
            raise DataError(
                f"metric={self._metric!r} needs outputs of one row of class scores and one label for each example: use "
                'metric="loss"'
            )
        if self._metric == "probability":
            return 1 - outputs.float().softmax(1).gather(1, targets.unsqueeze(1)).squeeze(1)
        return (outputs.argmax(1) != targets).float()


def _has_classes(outputs: Any, targets: Any) -> bool:
    tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    return (
        tensors
        and outputs.dim() == 2
        and targets.dim() == 1
        and outputs.shape[1] > 1
        and not (targets.is_floating_point() or targets.is_complex())
    )


def _by_example(loss: Loss) -> Callable[[Any, Any], Tensor]:
    """The loss of each example of a batch, from the mean loss that a training loop uses."""
    if isinstance(getattr(loss, "reduction", None), str):
        unreduced = copy(loss)
        setattr(unreduced, "reduction", "none")  # noqa: B010
        return lambda outputs, targets: _per_example(unreduced(outputs, targets), len(targets))
    try:
        takes = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        takes = False
    if takes:
        return lambda outputs, targets: _per_example(loss(outputs, targets, reduction="none"), len(targets))  # pyright: ignore[reportCallIssue]
    return lambda outputs, targets: _one_by_one(loss, outputs, targets)


def _per_example(losses: Tensor, count: int) -> Tensor:
    """One number for each example: further axes, such as the tokens of a text, are averaged."""
    if losses.dim() == 0 or len(losses) % count:
        raise DataError(f"the loss must give one value for each of the {count} examples, got {list(losses.shape)}")
    return losses.reshape(count, -1).mean(1)


def _one_by_one(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        raise DataError(
            "the loss of single examples needs outputs and targets that are tensors: pass a loss that takes "
            'reduction="none"'
        )
    found = [loss(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(targets))]
    return torch.stack([each.reshape(()) for each in found])


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _moved(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_moved(value, device) for value in batch)
    return batch


def _several(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)
