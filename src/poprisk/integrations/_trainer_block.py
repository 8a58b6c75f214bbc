"""Held-back examples measured as a Hugging Face trainer would: its batches, its loss, example by example."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk.errors import DataError
from poprisk.optim import Metric, evaluating

_IGNORED = -100
"""The label of tokens that do not count, as in transformers."""


class _Rows(NamedTuple):
    """One entry for each example: the sum of its losses, how many there are (its tokens, or 1), and its score."""

    sums: Tensor
    counts: Tensor
    scores: Tensor | None = None


class TrainerBlock:
    """Held-back examples with the batches and the loss of a trainer.

    A trainer has one loss for a batch. Where the model's outputs explain it (classes, numbers, tokens), the losses of
    the examples are computed from them, and compared with the trainer's own loss in the first batch; otherwise, as in
    preference training, the examples are measured one at a time. The loss of texts is the mean over their tokens.

    Args:
        held: A map-style dataset of the trainer's examples.
        collate: Makes a batch of a list of examples.
        batch_loss: The trainer's loss of a batch.
        metric: What to choose by; None takes accuracy for classes, otherwise the loss.
        trainer: The trainer, whose logs are left as they were.
    """

    def __init__(
        self,
        held: Any,
        collate: Callable[[list[Any]], Any],
        batch_loss: Callable[[nn.Module, dict[str, Any]], Tensor],
        metric: Metric | None,
        trainer: Any = None,
    ) -> None:
        self.count = len(held)
        if not self.count:
            raise DataError("the held-back block is empty: hold at least one example back")
        self._held, self._collate, self._batch_loss, self._metric = held, collate, batch_loss, metric
        self._trainer = trainer
        self._split: Callable[[Any, Any, int], _Rows | None] | None = None
        self._is_known = False

    def measure(self, model: nn.Module, batch_size: int) -> tuple[Tensor, Tensor]:
        """Loss and score of every held-back example, on the CPU."""
        found: list[_Rows] = []
        with evaluating(model) as device, _logs_kept(self._trainer):
            start = 0
            while start < self.count:
                stop = min(start + (1 if self._is_known and self._split is None else batch_size), self.count)
                rows = self._rows(model, device, start, stop)
                if rows is not None:  # otherwise the examples follow one at a time
                    found.append(rows)
                    start = stop
        sums, counts = torch.cat([each.sums for each in found]).cpu(), torch.cat([each.counts for each in found]).cpu()
        losses = (sums.double() * (self.count / counts.double().sum().clamp(min=1))).float()
        scores = [each.scores for each in found if each.scores is not None]
        if len(scores) == len(found) and self._metric != "loss":
            return losses, torch.cat(scores).float().cpu()
        if self._metric in ("accuracy", "probability"):
            raise DataError(f'metric={self._metric!r} needs one label for each example: use metric="loss"')
        return losses, losses

    def _rows(self, model: nn.Module, device: torch.device, start: int, stop: int) -> _Rows | None:
        batch = _moved(dict(self._collate([self._held[i] for i in range(start, stop)])), device)
        labels, count = batch.get("labels"), stop - start
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda module, args, outputs: seen.append(outputs))
        try:
            loss = self._batch_loss(model, batch).detach().float().reshape(())
        finally:
            hook.remove()
        if not self._is_known:
            self._split = next((each for each in self._splits() if _explains(seen, labels, count, each, loss)), None)
            self._is_known = True
            if self._split is None and count > 1:
                return None
        if self._split is None:
            return _Rows(loss.reshape(1), torch.ones(1, device=loss.device))
        rows = self._split(seen[0], labels, count)
        if rows is None:
            raise DataError(f"the outputs for held-back examples {start} to {stop - 1} have another form than before")
        return rows

    def _splits(self) -> list[Callable[[Any, Any, int], _Rows | None]]:
        return [self._classes, _numbers, _token_log_probabilities, _next_tokens, _tokens]

    def _classes(self, outputs: Any, labels: Any, count: int) -> _Rows | None:
        logits = _entry(outputs, "logits")
        if logits is None or labels is None or logits.dim() != 2 or labels.dim() != 1 or labels.is_floating_point():
            return None
        if len(labels) != count or logits.shape[1] < 2:
            return None
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        scores = 1 - (-losses).exp() if self._metric == "probability" else (logits.argmax(1) != labels).float()
        return _Rows(losses, torch.ones_like(losses), scores)


def _numbers(outputs: Any, labels: Any, count: int) -> _Rows | None:
    logits = _entry(outputs, "logits")
    if logits is None or labels is None or not labels.is_floating_point() or logits.numel() != labels.numel():
        return None
    losses = (logits.float().reshape(count, -1) - labels.float().reshape(count, -1)).square().mean(1)
    return _Rows(losses, torch.ones_like(losses))


def _token_log_probabilities(outputs: Any, labels: Any, count: int) -> _Rows | None:
    """TRL's outputs for fine-tuning."""
    found, mask = _entry(outputs, "log_probs"), _entry(outputs, "label_mask")
    if found is None or mask is None or found.dim() != 2 or len(found) != count:
        return None
    return _Rows(-(found.float() * mask).sum(1), mask.sum(1))


def _next_tokens(outputs: Any, labels: Any, count: int) -> _Rows | None:
    """A causal language model predicts the token that follows."""
    logits = _entry(outputs, "logits")
    if logits is None or labels is None or logits.dim() != 3 or labels.dim() != 2 or logits.shape[1] < 2:
        return None
    return _of_tokens(logits[:, :-1], labels[:, 1:], count)


def _tokens(outputs: Any, labels: Any, count: int) -> _Rows | None:
    logits = _entry(outputs, "logits")
    if logits is None or labels is None or logits.dim() != 3 or labels.dim() != 2:
        return None
    return _of_tokens(logits, labels, count)


def _of_tokens(logits: Tensor, labels: Tensor, count: int) -> _Rows | None:
    if logits.shape[:2] != labels.shape or len(labels) != count or labels.is_floating_point():
        return None
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, ignore_index=_IGNORED, reduction="none")
    return _Rows(losses.sum(1), (labels != _IGNORED).sum(1))


def _explains(seen: list[Any], labels: Any, count: int, split: Any, loss: Tensor) -> bool:
    """Whether the losses of the examples have the trainer's loss as their mean."""
    rows = split(seen[0], labels, count) if len(seen) == 1 else None
    if rows is None:
        return False
    mean = float(rows.sums.sum() / rows.counts.sum().clamp(min=1))
    return math.isclose(mean, float(loss), rel_tol=2e-3, abs_tol=1e-5)


def _entry(outputs: Any, name: str) -> Tensor | None:
    found = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
    return found if isinstance(found, Tensor) else None


def _moved(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}


@contextmanager
def _logs_kept(trainer: Any) -> Iterator[None]:
    """TRL's trainers add up their metrics in every loss; those of held-back batches are dropped."""
    before = deepcopy(getattr(trainer, "_metrics", None))
    try:
        yield
    finally:
        if before is not None:
            trainer._metrics = before
