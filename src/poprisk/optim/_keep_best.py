r"""KeepBest: measure the averaged weights on a held-back block while training goes on, and end with the best."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from poprisk._core.estimate import Estimate
from poprisk._core.store import write_tensors
from poprisk.errors import HyperparameterError, StateDictError
from poprisk.optim._held_block import HeldBlock, Loss, Measurable
from poprisk.optim._held_curve import HeldCurve, Metric, Moment
from poprisk.optim._tail_average import TailAverage

_FORWARD = 1 / 3
"""A forward pass costs about a third of a training step on the same examples."""
_OVERHEAD = 0.15
"""What swapping weights in and out costs, in training steps."""
_BANKED = 6.0
"""Measurements that may be saved up for the stretch where the curve bends."""


@dataclass(frozen=True, eq=False)
class KeptRisk(Estimate):
    """The risk of the weights that :class:`KeepBest` kept, on new data as noisy as the training data."""

    step: int = 0
    """The step at which they were kept."""
    tail: float | None = None
    """The share of the steps that they are a mean of; None for the weights themselves."""
    accuracy: float = math.nan
    """Share of the held-back examples that they get right; NaN where targets are not classes."""
    measured: int = 0
    """Number of moments that were compared."""


class KeepBest:
    r"""Keeps the best of the averaged weights of a training, measured on examples that were held back.

    Training goes on as it is. Every so often, after an optimizer step, the averaged weights are measured on the
    held-back block; the best so far are copied aside. :meth:`finish` puts them into the model. Measurements cost at
    most about ``cost`` of the training: they are counted in examples, not seconds, so that the same training measures
    the same moments on any machine, and they come closer together where the curve bends.

    Args:
        model: The model in training.
        optimizer: Its optimizer, of any kind.
        held: The held-back examples, from ``hold_back``: a dataset of (input, target) pairs, a tuple of
            inputs and targets, or an object with ``count`` and ``measure(model, batch_size)`` that returns the loss and
            the score of every example.
        loss: The loss of outputs and targets, such as ``torch.nn.functional.cross_entropy`` or a module; not used
            where ``held`` measures by itself.
        average: A :class:`TailAverage`, the ``tail`` of a new one (or several tails: the block then chooses among
            them, too), or None to measure the weights themselves.
        metric: What to choose by: ``"accuracy"``, ``"loss"``, or ``"probability"`` (of the given label). Default:
            accuracy for classes, otherwise the loss.
        cost: Most of the training's work that measurements may add, as a share.
        every: Measure after this many steps instead.
        path: File (``.safetensors``) that the best weights are written to whenever they change. It is replaced as a
            whole and survives a crash of the training.
        collate: Makes a batch of a list of held-back examples; default: torch's.

    Raises:
        HyperparameterError: an option is out of range.
        DataError: the held-back block is empty.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch...>
    >>> x = torch.randn(60, 2); y = (x[:, 0] > 0).long()
    >>> model = nn.Linear(2, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    >>> keeper = KeepBest(model, optimizer, (x[50:], y[50:]), nn.functional.cross_entropy)
    >>> for _ in range(40):
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(x[:50]), y[:50]).backward()
    ...     optimizer.step()
    >>> risk = keeper.finish()
    >>> risk.valid, risk.accuracy
    (True, 1.0)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        held: Any,
        loss: Loss | None = None,
        *,
        average: TailAverage | float | Sequence[float] | None = 0.2,
        metric: Metric | None = None,
        cost: float = 0.03,
        every: int | None = None,
        path: str | Path | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if metric not in (None, "accuracy", "loss", "probability"):
            raise HyperparameterError(f'metric must be "accuracy", "loss" or "probability", got {metric!r}')
        if not 0 < cost < 1:
            raise HyperparameterError(f"cost must be a share in (0, 1), got {cost!r}: 0.03 is 3% of the training")
        if every is not None and every < 1:
            raise HyperparameterError(f"every must be a number of steps, at least 1, got {every!r}")
        self._model, self._block = model, _block(held, loss, metric, collate)
        self._cost, self._every, self._path = cost, every, None if path is None else Path(path)
        self.curve = HeldCurve()
        self.steps = 0
        self._credit, self._batch, self._seen, self._autocast = 0.0, 0, 0, None
        self._kept: dict[str, Tensor] = {}
        self._counts_calls = True
        self._forward = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        self._owns_average = not (average is None or isinstance(average, TailAverage))
        self.average = (
            average if average is None or isinstance(average, TailAverage) else TailAverage(model, optimizer, average)
        )
        self._hook = optimizer.register_step_post_hook(self._after_step)

    @property
    def kept_step(self) -> int | None:
        """The step at which the best weights so far were kept; None before the first measurement."""
        best = self.curve.best
        return None if best is None else best.step

    def measure(self) -> None:
        """Measure the present moment, and keep it if it is the best so far."""
        tails = [None] if self.average is None else self.average.tails
        for which, tail in enumerate(tails):
            context = nullcontext() if self.average is None else self.average.swapped(which)
            with context, self._as_in_training():
                losses, scores = self._agreed(*self._block.measure(self._model, self._batch_size()))
                if self.curve.add(Moment(self.steps, tail, losses, scores)):
                    self._keep()

    def count_examples(self, number: int) -> None:
        """Say that the coming step trains on this number of further examples.

        Without it, the examples in calls of the model are counted. This is for loops that call parts of the model: from
        the first use on, its calls are no longer counted.
        """
        self._seen += number
        self._counts_calls = False

    def finish(self) -> KeptRisk:
        """Put the best weights into the model, stop following the optimizer, and estimate their risk.

        Returns:
            The population risk of the model as it now is, on data as noisy as the training data. The estimate accounts
            for having chosen the best of several moments.
        """
        if not self.curve.moments or self.curve.moments[-1].step != self.steps:
            self.measure()
        self.close()
        self._restore()
        best = self.curve.best
        assert best is not None
        value, error, plain = self.curve.chosen_risk()
        correct = float(1 - best.scores.double().mean()) if self._counts_errors(best) else math.nan
        moments = f"step {best.step} of {self.steps}, chosen among {len(self.curve.moments)} measurements"
        facts = {"step": best.step, "tail": best.tail, "accuracy": correct, "measured": len(self.curve.moments)}
        spent = len(self.curve.moments) * self._block.count * _FORWARD
        if not (math.isfinite(value) and math.isfinite(error)):
            few = f"{self._block.count} held-back examples are too few for an error; hold at least 10 back"
            reason = few if math.isfinite(plain) else "the loss of the held-back examples is not finite"
            return KeptRisk(value, math.nan, valid=False, reason=f"{reason} ({moments})", cost=spent, **facts)
        return KeptRisk(value, error, reason=moments, cost=spent, **facts)

    def close(self) -> None:
        """Stop following the optimizer and the model."""
        self._hook.remove()
        self._forward.remove()
        if self._owns_average and self.average is not None:
            self.average.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on after an interruption, the best weights included."""
        return {
            "steps": self.steps,
            "credit": self._credit,
            "batch": self._batch,
            "seen": self._seen,
            "curve": self.curve.state(),
            "kept": dict(self._kept),
            "average": self.average.state_dict() if self._owns_average and self.average is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`; the rest of the training then keeps the same weights, bit for bit.

        Raises:
            StateDictError: the state belongs to another model.
        """
        own = self._model.state_dict()
        if state["kept"] and set(state["kept"]) != set(own):
            raise StateDictError("the kept weights belong to another model: construct KeepBest as it was when saved")
        if (state["average"] is None) == (self._owns_average and self.average is not None):
            raise StateDictError("the state was saved with another kind of average: construct KeepBest as it was")
        self.steps, self._credit = int(state["steps"]), float(state["credit"])
        self._batch, self._seen = int(state["batch"]), int(state["seen"])
        self.curve.restore(state["curve"])
        self._kept = {name: value.detach().to(own[name].device, copy=True) for name, value in state["kept"].items()}
        if state["average"] is not None and self.average is not None:
            self.average.load_state_dict(state["average"])

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        self._batch = max(self._batch, self._seen)  # gradient accumulation: all examples of the step
        self._seen = 0
        if self._every is not None:
            if self.steps % self._every == 0:
                self.measure()
            return
        price = self._price()
        self._credit = min(self._credit + self._cost, _BANKED * price)
        wanted = price if self.curve.is_bending() else 2 * price
        if self._credit >= wanted:
            self._credit -= price
            self.measure()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the examples of a training step, and remember the precision it runs in."""
        if not (module.training and torch.is_grad_enabled()):
            return
        first = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()), None)
        if first is not None:
            self._seen += len(first) if self._counts_calls else 0
            kind = first.device.type
            self._autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None

    def _price(self) -> float:
        """One measurement in training steps."""
        averages = 1 if self.average is None else len(self.average.tails)
        passes = self._block.count / self._batch if self._batch else 1.0
        return averages * (max(passes, 1.0) * _FORWARD + _OVERHEAD)

    def _batch_size(self) -> int:
        return self._batch or self._seen or min(self._block.count, 256)

    def _as_in_training(self) -> Any:
        return nullcontext() if self._autocast is None else torch.autocast(self._autocast[0], self._autocast[1])

    def _agreed(self, losses: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The same numbers in every process, so that all of them keep the same moment."""
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return losses, scores
        device = next(self._model.parameters()).device
        both = torch.stack([losses, scores]).to(device)
        distributed.broadcast(both, 0)
        return both[0].cpu(), both[1].cpu()

    def _counts_errors(self, best: Moment) -> bool:
        return bool(((best.scores == 0) | (best.scores == 1)).all()) and best.scores is not best.losses

    @torch.no_grad()
    def _keep(self) -> None:
        own = self._model.state_dict()
        if self._kept:
            for name, value in own.items():
                self._kept[name].copy_(value)
        else:
            self._kept = {name: value.detach().clone() for name, value in own.items()}
        first = not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
        if self._path is not None and first:
            write_tensors(self._path, self._kept, {"step": self.steps})

    @torch.no_grad()
    def _restore(self) -> None:
        for name, value in self._model.state_dict().items():
            value.copy_(self._kept[name])


def _block(held: Any, loss: Loss | None, metric: Metric | None, collate: Any) -> Measurable:
    if isinstance(held, Measurable):
        return held
    if loss is None:
        raise HyperparameterError("KeepBest needs the loss of outputs and targets: torch.nn.functional.cross_entropy")
    return HeldBlock(held, loss, metric, collate)
