"""The loss of each held-back example, from the mean loss that a training loop uses or that a model returns."""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from poprisk.errors import DataError, HyperparameterError

Loss = Callable[[Any, Any], Tensor]
Sums = tuple[Tensor, Tensor]
"""For each example the sum of its losses, and what to divide by: 1, the number of its tokens, or their weights. An
example that is ignored has 0."""
IGNORED = -100
"""Target of a token that has no loss, in torch and in transformers."""


class ExampleLosses:
    """Losses of single examples.

    Args:
        loss: The mean loss of outputs and targets, as in the training loop, or None where the model returns an object
            with ``loss``, as models of transformers do.
    """

    def __init__(self, loss: Loss | None) -> None:
        if loss is not None and (isinstance(loss, type) or not callable(loss)):
            name = getattr(loss, "__name__", type(loss).__name__)
            raise HyperparameterError(
                f"loss must be a function of outputs and targets, got {name}: CrossEntropyLoss()?"
            )
        self._loss, self._unreduced = loss, None if loss is None else _unreduced(loss)
        self._ignored = getattr(loss, "ignore_index", getattr(loss, "keywords", {}).get("ignore_index", IGNORED))
        self._weights = _class_weights(loss)
        self._by_vmap = True
        self._way: Callable[[Tensor, Tensor], Sums] | None = None
        self.by_batch = False
        """Whether only the mean loss of a batch is known."""

    def __call__(self, outputs: Any, targets: Any) -> Sums:
        """Sum and divisor of every example; of the batch as a whole where no more is known."""
        if self._loss is None:
            return self._from_model(outputs, targets)
        if not isinstance(targets, Tensor):
            raise DataError(f"the targets of a batch must be a tensor, got {type(targets).__name__}: pass collate=…")
        count = len(targets)
        tokens = _tokens(outputs, targets, self._ignored)
        if self._unreduced is not None:
            losses = self._unreduced(outputs, targets)
            if losses.dim() == 0 or len(losses) % count:
                raise DataError(f"the loss must give one value for each of {count} examples, got {list(losses.shape)}")
            losses = losses.float().reshape(count, -1)
            if self._weights is not None and not targets.is_floating_point():
                kept = targets != self._ignored
                weights = self._weights.to(losses)[targets.where(kept, 0)] * kept
                return losses.sum(1), weights.reshape(count, -1).sum(1)
            return (losses.mean(1), torch.ones_like(losses[:, 0])) if tokens is None else (losses.sum(1), tokens)
        losses = self._one_by_one(outputs, targets).float()
        if tokens is None:
            return losses, torch.ones_like(losses)
        return torch.where(tokens > 0, losses, 0.0) * tokens, tokens

    def _one_by_one(self, outputs: Any, targets: Tensor) -> Tensor:
        loss: Any = self._loss
        if not isinstance(outputs, Tensor) or len(outputs) % len(targets):
            raise DataError(
                'losses of examples need outputs that are a tensor: pass a loss that takes reduction="none"'
            )
        flat = len(outputs) != len(targets)  # the tokens of all examples, one after the other
        rows = outputs.unflatten(0, (len(targets), -1)) if flat else outputs.unsqueeze(1)
        if self._by_vmap:
            try:
                return torch.func.vmap(lambda o, t: loss(o, t.unsqueeze(0)).reshape(()))(rows, targets)
            except (RuntimeError, TypeError, ValueError, IndexError):  # e.g. control flow that depends on the data
                self._by_vmap = False
        return torch.stack([loss(rows[i], targets[i : i + 1]).reshape(()) for i in range(len(targets))])

    def _from_model(self, outputs: Any, targets: Any) -> Sums:
        mean = field(outputs, "loss")
        if not isinstance(mean, Tensor):
            what = f"the model returns {type(outputs).__name__} without a loss"
            raise DataError(f"{what}: pass that of outputs and targets, such as torch.nn.functional.cross_entropy")
        logits, tolerance = field(outputs, "logits"), 1e-2 if mean.element_size() < 4 else 1e-3
        mean = mean.detach().float().mean()
        if self._way is None and not self.by_batch:
            self._way = _way_of(mean, tolerance, logits, targets)
            self.by_batch = self._way is None
        if self._way is not None:
            return self._way(logits, targets)
        return mean.reshape(1), torch.ones_like(mean).reshape(1)


def field(outputs: Any, name: str) -> Any:
    """A named part of a model's outputs, or None."""
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _way_of(mean: Tensor, tolerance: float, logits: Any, targets: Any) -> Callable[[Tensor, Tensor], Sums] | None:
    """How the model's loss comes from its logits; None if its mean over the batch cannot be had from them."""
    if not (isinstance(logits, Tensor) and isinstance(targets, Tensor)):
        return None
    ways: list[Callable[[Tensor, Tensor], Sums]] = []
    if targets.is_floating_point() and logits.numel() == targets.numel():
        ways.append(_squared)
    elif logits.dim() == targets.dim() + 1 and logits.shape[:-1] == targets.shape:
        ways += [_unshifted] if targets.dim() == 1 else [_shifted, _unshifted]
    if not ways:
        return None
    found = [sums.sum() / divisors.sum() for sums, divisors in (way(logits, targets) for way in ways)]
    gaps = [float((each - mean).abs()) for each in found]
    nearest = min(range(len(ways)), key=gaps.__getitem__)
    return ways[nearest] if gaps[nearest] <= tolerance * float(mean.abs()) + 1e-6 else None


def _squared(logits: Tensor, targets: Tensor) -> Sums:
    losses = (logits.float().reshape(targets.shape) - targets).square().reshape(len(targets), -1).mean(1)
    return losses, torch.ones_like(losses)


def _unshifted(logits: Tensor, targets: Tensor) -> Sums:
    losses = functional.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
    kept = (targets != IGNORED).reshape(len(targets), -1).float()
    return losses.reshape(len(targets), -1).sum(1), kept.sum(1)


def _shifted(logits: Tensor, targets: Tensor) -> Sums:
    return _unshifted(logits[:, :-1], targets[:, 1:])


def _tokens(outputs: Any, targets: Tensor, ignored: int) -> Tensor | None:
    """Number of targets of each example that have a loss, where targets are classes and some may be ignored."""
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        return None
    if targets.dim() < 2 and not has_classes(outputs, targets):
        return None
    return (targets != ignored).reshape(len(targets), -1).sum(1).float()


def has_classes(outputs: Any, targets: Any) -> bool:
    """Whether outputs are one row of class scores, and targets one class, for each example."""
    tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    return (
        tensors
        and outputs.dim() == 2
        and targets.dim() == 1
        and len(outputs) == len(targets)
        and outputs.shape[1] > 1
        and not (targets.is_floating_point() or targets.is_complex())
    )


def _class_weights(loss: Any) -> Tensor | None:
    """The weights of classes, by whose sum the mean loss is divided."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss.weight
    if isinstance(loss, partial) and loss.func in (functional.cross_entropy, functional.nll_loss):
        return loss.keywords.get("weight")
    return None


def _unreduced(loss: Loss) -> Callable[[Any, Any], Tensor] | None:
    """The loss with ``reduction="none"``, where it has that option."""
    if isinstance(getattr(loss, "reduction", None), str):
        unreduced = copy(loss)
        setattr(unreduced, "reduction", "none")  # noqa: B010
        return unreduced
    try:
        takes = "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        takes = False
    return (lambda outputs, targets: loss(outputs, targets, reduction="none")) if takes else None  # pyright: ignore[reportCallIssue]
