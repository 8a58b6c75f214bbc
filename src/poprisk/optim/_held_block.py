"""Measuring a model on held-back examples: batches without a data loader, losses example by example."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import default_collate

from poprisk.errors import DataError, HyperparameterError
from poprisk.optim._evaluation import evaluating
from poprisk.optim._example_losses import ExampleLosses, Loss, field, has_classes
from poprisk.optim._held_curve import Metric, calibrated
from poprisk.optim._hold_back import check_examples, common_length
from poprisk.optim._last_features import LastFeatures

_UNITS = 16
"""Batches that the block is cut into where only the mean loss of a batch is known: their spread gives the error."""


@runtime_checkable
class Measurable(Protocol):
    """Held-back examples that measure a model themselves, as a trainer does with its own batches and loss."""

    count: int
    """Number of held-back examples."""

    def measure(self, model: nn.Module, batch_size: int) -> tuple[Float[Tensor, "held"], ...]:
        """Loss and score of every held-back example, on the CPU; smaller scores are better.

        Where scores are errors, a third part may have losses to compare moments of about the same accuracy by.
        """
        ...


class HeldBlock:
    """Held-back examples, their loss example by example, and the score that a moment is chosen by.

    Args:
        held: A map-style dataset of (inputs, target) or of dictionaries, a tuple of arrays with the targets last, or an
            object with ``inputs`` and ``targets``, such as a :class:`~poprisk.Problem`.
        loss: The mean loss of outputs and targets, as in the training loop. None: that of the problem, or the one that
            the model returns.
        metric: What to choose by; None takes accuracy for classes, otherwise the loss.
        collate: Makes a batch of a list of examples of a dataset.
    """

    def __init__(
        self, held: Any, loss: Loss | None, metric: Metric | None, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        if hasattr(held, "inputs") and hasattr(held, "targets") and not hasattr(held, "__getitem__"):
            loss, held = held.batch_loss if loss is None else loss, (held.inputs, held.targets)
        check_examples(held)
        if hasattr(held, "iloc"):
            raise DataError("a table cannot be measured as it is: pass a tuple of arrays, (inputs, targets)")
        self._is_arrays = isinstance(held, tuple) and len(held) >= 2 and not hasattr(held, "_fields")
        if self._is_arrays and loss is None:
            raise HyperparameterError(
                "KeepBest needs the loss of outputs and targets: torch.nn.functional.cross_entropy"
            )
        self._held: Any = held
        self._loss = loss
        self._metric: Metric | None = metric
        self._collate = collate or _collated
        self._losses, self._by_loss = ExampleLosses(loss), False
        nested = self._is_arrays and isinstance(self._held[0], tuple)
        parts = (*self._held[0], *self._held[1:]) if nested else self._held
        self.count = common_length(parts) if self._is_arrays else len(parts)
        if not self.count:
            raise DataError("the held-back block is empty: hold at least one example back")

    def like(self, data: Any) -> "HeldBlock":
        """Other examples of the same form."""
        return HeldBlock(data, self._loss, self._metric, self._collate)

    @property
    def by_batch(self) -> bool:
        """Whether the block is measured batch by batch, since the model tells no loss of single examples."""
        return self._losses.by_batch

    def measure(self, model: nn.Module, batch_size: int) -> tuple[Float[Tensor, "held"], ...]:
        """Losses and scores of every held-back example, on the CPU; the model is in evaluation mode meanwhile.

        Examples whose label is ignored (-100) are left out. Where scores are errors, the calibrated losses follow
        (:func:`~poprisk.optim._held_curve.calibrated`).

        The losses of tokens are added up for each example, and divided by the mean number of tokens of an example:
        their mean is that over all tokens that are not ignored.
        """
        with evaluating(model) as device:
            found = self._sweep(model, batch_size, device)
            few = max(1, self.count // _UNITS)
            if self.by_batch and few < batch_size:  # known after the first batch
                found = self._sweep(model, few, device)
        losses, divisors, scores, *classes = (torch.cat(list(each)).cpu() for each in zip(*found, strict=True))
        counted = divisors > 0
        if not bool(counted.any()):
            raise DataError("the labels of all held-back examples are ignored (-100): hold others back")
        losses, scores = losses[counted] / divisors[counted].mean(), scores[counted]
        if self._by_loss:
            return losses, losses
        return (losses, scores, calibrated(*(each[counted] for each in classes))) if classes else (losses, scores)

    def unseen(self, model: nn.Module, batch_size: int) -> float | None:
        """What one unseen mistake would add to the mean loss; None where targets are not classes."""
        if self.by_batch:
            return None
        with evaluating(model) as device:
            found = self._sweep(model, batch_size, device, mistaken=True)
        if not found:
            return None
        losses, divisors = (torch.cat([row[i] for row in found]) for i in range(2))
        return float(losses.sum() / divisors.sum()) / len(losses)

    def _sweep(
        self, model: nn.Module, batch_size: int, device: torch.device, mistaken: bool = False
    ) -> list[tuple[Tensor, ...]]:
        """What is measured, batch by batch; ``mistaken``: as if the second most likely class were the label."""
        found = []
        for outputs, logits, given in self._outputs(model, batch_size, device):
            targets = given
            if isinstance(targets, Tensor) and targets.dtype == torch.float64 and isinstance(logits, Tensor):
                targets = targets.to(logits.dtype)
            if mistaken:
                targets = _second_class(logits, targets)
                if targets is None:
                    return []
            losses, divisors = self._losses(outputs, targets)
            rows = losses.detach(), divisors, self._score(logits, targets, losses.detach())
            found.append(rows if self._by_loss or self._metric else (*rows, logits.detach().float(), targets))
            if self.by_batch and batch_size > max(1, self.count // _UNITS):
                break
        return found

    def features(self, model: nn.Module, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the last linear layer receives for each example, the outputs, and the targets, all on the CPU."""
        with evaluating(model) as device, LastFeatures(model) as features:
            found = []
            for _, logits, targets in self._outputs(model, batch_size, device):
                if not isinstance(logits, Tensor) or logits.shape[:1] != targets.shape[:1]:
                    raise DataError("features need a model that returns a tensor with one row for each example")
                found.append([x.detach().cpu() for x in (features.take(logits), logits.float(), targets)])
        points, logits, targets = (torch.cat(column) for column in zip(*found, strict=True))
        return points, logits, targets

    def _outputs(self, model: nn.Module, batch_size: int, device: torch.device) -> Iterator[tuple[Any, Any, Any]]:
        """Outputs, logits and targets, batch by batch."""
        dtype = next((each.dtype for each in model.parameters() if each.is_floating_point()), torch.float32)
        for start in range(0, self.count, batch_size):
            inputs, targets = self._batch(start, min(start + batch_size, self.count))
            inputs, targets = _placed(inputs, device, dtype), _placed_targets(targets, device)
            outputs = model(**_accepted(model, inputs)) if isinstance(inputs, Mapping) else model(*inputs)
            yield outputs, outputs if isinstance(outputs, Tensor) else field(outputs, "logits"), targets

    def _batch(self, start: int, stop: int) -> tuple[Any, Any]:
        if self._is_arrays:
            *inputs, targets = self._held
            parts = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], tuple) else tuple(inputs)
            return tuple(_tensor(part[start:stop]) for part in parts), _tensor(targets[start:stop])
        batch = self._collate([self._held[i] for i in range(start, stop)])
        if isinstance(batch, Mapping):
            named = {"labels" if name == "label" and "labels" not in batch else name: x for name, x in batch.items()}
            return named, named.get("labels")
        *inputs, targets = batch
        return tuple(inputs), targets

    def _score(self, logits: Any, targets: Any, losses: Tensor) -> Tensor:
        classes = has_classes(logits, targets) and not self.by_batch
        self._by_loss = self._metric == "loss" or (self._metric is None and not classes)
        if self._by_loss:
            return losses
        if not classes:
            needs = "outputs of one row of class scores and one label for each example"
            raise DataError(f'metric={self._metric!r} needs {needs}: use metric="loss"')
        if self._metric == "probability":
            return 1 - logits.float().softmax(1).gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
        return (logits.argmax(1) != targets).float()


def _second_class(logits: Any, targets: Any) -> Tensor | None:
    """The most likely class but one, or the other of two; None where targets are not classes."""
    if has_classes(logits, targets):
        return logits.topk(2, dim=1).indices[:, 1]
    alike = isinstance(logits, Tensor) and isinstance(targets, Tensor) and logits.numel() == targets.numel()
    if not (alike and bool(((targets == 0) | (targets == 1)).all())):
        return None
    return (logits <= 0).to(targets.dtype).reshape(targets.shape)


def _tensor(rows: Any) -> Tensor:
    """Rows of an array, or a list of numbers, arrays or tensors, as one tensor."""
    if isinstance(rows, Tensor):
        return rows
    if isinstance(rows, Sequence) and isinstance(rows[0], Tensor):
        return torch.stack(list(rows))
    return torch.from_numpy(np.ascontiguousarray(np.asarray(rows)))


def _collated(examples: list[Any]) -> Any:
    """A batch, as torch makes it; of dictionaries the entries that are numbers, lists of numbers as rows."""
    if not isinstance(examples[0], Mapping):
        return default_collate(examples)
    batch = {}
    for name in examples[0]:
        column = [each[name] for each in examples]
        try:
            batch[name] = _tensor(column)
        except (TypeError, ValueError, RuntimeError):  # text, or rows of different lengths
            continue
    return batch


def _placed(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Inputs on the model's device, floating-point ones in its dtype."""
    if isinstance(batch, Tensor):
        return batch.to(device, dtype if batch.is_floating_point() else batch.dtype, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _placed(value, device, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(_placed(value, device, dtype) for value in batch)
    return batch


def _placed_targets(targets: Any, device: torch.device) -> Any:
    """Targets on the model's device, classes in int64, as losses need them."""
    if not isinstance(targets, Tensor):
        return targets
    whole = not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)
    return targets.to(device, torch.int64 if whole else targets.dtype, non_blocking=True)


def _accepted(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a batch that the model's forward takes."""
    parameters = inspect.signature(model.forward).parameters
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in inputs.items() if everything or name in parameters}
