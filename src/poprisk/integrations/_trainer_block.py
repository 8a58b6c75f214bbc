"""Held-back examples measured as a Hugging Face trainer would: its batches, its loss, example by example."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from poprisk.errors import DataError
from poprisk.optim import ExampleLosses, Metric, calibrated, evaluating, field


class _Rows(NamedTuple):
    """One entry for each example: the sum of its losses, how many there are (its tokens, or 1), and its score."""

    sums: Tensor
    counts: Tensor
    scores: Tensor | None = None
    classes: tuple[Tensor, Tensor] | None = None
    """Logits and labels, where scores are errors."""


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
        self._trainer, self._losses = trainer, ExampleLosses(None)

    @property
    def one_at_a_time(self) -> bool:
        """Whether the outputs do not explain the trainer's loss."""
        return self._losses.by_batch

    def measure(self, model: nn.Module, batch_size: int) -> tuple[Tensor, ...]:
        """Loss and score of every held-back example, on the CPU; calibrated losses where scores are errors."""
        found: list[_Rows] = []
        with evaluating(model) as device, _logs_kept(self._trainer):
            start = 0
            while start < self.count:
                stop = min(start + (1 if self.one_at_a_time else batch_size), self.count)
                rows = self._rows(model, device, start, stop)
                if len(rows.sums) == stop - start:  # otherwise the examples follow one at a time
                    found.append(rows)
                    start = stop
        sums, counts = torch.cat([each.sums for each in found]).cpu(), torch.cat([each.counts for each in found]).cpu()
        losses = (sums.double() * (self.count / counts.double().sum().clamp(min=1))).float()
        scores = [each.scores for each in found if each.scores is not None]
        if len(scores) == len(found) and self._metric != "loss":
            classes = [each.classes for each in found if each.classes is not None]
            logits, labels = (torch.cat(each).cpu() for each in zip(*classes, strict=True)) if classes else (None, None)
            more = () if logits is None or labels is None else (calibrated(logits, labels),)
            return losses, torch.cat(scores).float().cpu(), *more
        if self._metric in ("accuracy", "probability"):
            raise DataError(f'metric={self._metric!r} needs one label for each example: use metric="loss"')
        return losses, losses

    def _rows(self, model: nn.Module, device: torch.device, start: int, stop: int) -> _Rows:
        batch = dict(self._collate([self._held[i] for i in range(start, stop)]))
        batch = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
        labels, count = batch.get("labels"), stop - start
        seen: list[Any] = []
        hook = model.register_forward_hook(lambda module, args, outputs: seen.append(outputs))
        try:
            loss = self._batch_loss(model, batch).detach().float().reshape(())
        finally:
            hook.remove()
        outputs = seen[0] if len(seen) == 1 else None  # several calls make one loss: it is not explained by either
        tokens = None if self.one_at_a_time else _token_losses(outputs, count, loss)
        if tokens is not None:
            return tokens
        logits = field(outputs, "logits")
        logits = logits if isinstance(logits, Tensor) and len(logits) == count else None
        sums, counts = self._losses(SimpleNamespace(loss=loss, logits=logits), labels)
        scores = self._scores(logits, labels, sums)
        if scores is None or logits is None or labels is None or self._metric is not None:
            return _Rows(sums, counts, scores)
        return _Rows(sums, counts, scores, (logits.detach().float(), labels))

    def _scores(self, logits: Tensor | None, labels: Any, losses: Tensor) -> Tensor | None:
        if self.one_at_a_time or logits is None or logits.dim() != 2 or labels.dim() != 1 or labels.is_floating_point():
            return None
        return 1 - (-losses).exp() if self._metric == "probability" else (logits.argmax(1) != labels).float()


def _token_losses(outputs: Any, count: int, loss: Tensor) -> _Rows | None:
    """From the log-probabilities of tokens, which TRL's models return for fine-tuning."""
    found, mask = field(outputs, "log_probs"), field(outputs, "label_mask")
    if not (isinstance(found, Tensor) and isinstance(mask, Tensor)) or found.dim() != 2 or len(found) != count:
        return None
    sums, counts = -(found.float() * mask).sum(1), mask.sum(1)
    mean = float(sums.sum() / counts.sum().clamp(min=1))
    return _Rows(sums, counts) if math.isclose(mean, float(loss), rel_tol=2e-3, abs_tol=1e-5) else None


@contextmanager
def _logs_kept(trainer: Any) -> Iterator[None]:
    """TRL's trainers add up their metrics in every loss; those of held-back batches are dropped."""
    before = deepcopy(getattr(trainer, "_metrics", None))
    try:
        yield
    finally:
        if before is not None:
            trainer._metrics = before
