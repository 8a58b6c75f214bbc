r"""KeepBest: measure the averaged weights on a held-back block while training goes on, and end with the best."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Integral
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from poprisk.errors import HyperparameterError, StateDictError
from poprisk.optim._example_losses import Loss
from poprisk.optim._held_block import HeldBlock, Measurable
from poprisk.optim._held_curve import HeldCurve, Metric, Moment, held_error
from poprisk.optim._kept_risk import KeptRisk, accuracy_of, risk_at
from poprisk.optim._kept_weights import KeptWeights, Snapshots, witness_of
from poprisk.optim._measurement_budget import MeasurementBudget
from poprisk.optim._model_tensors import ForwardHook, check_followed, check_keys, shortened, unwrapped
from poprisk.optim._tail_average import TailAverage, recompute_batch_norm


class KeepBest:
    r"""Keeps the best of the averaged weights of a training, measured on examples that were held back.

    Training goes on as it is. Every so often, after an optimizer step, the averaged weights are measured on the
    held-back block; the best so far are copied aside. :meth:`finish` puts them into the model. Measurements cost at
    most about ``cost`` of the training: they are counted in examples, not seconds, so that the same training measures
    the same moments on any machine, and they come closer together where the curve bends.

    In a process group (DistributedDataParallel, FSDP2), every process measures the whole block, and all of them keep
    the moment that the first process measured as best. Every process must hold the same block back.

    Args:
        model: The model in training, with or without wrappers; apply ``fully_shard`` first.
        optimizer: Its optimizer, of any kind.
        held: The held-back examples, from :func:`~poprisk.hold_back`: a dataset of (input, target) pairs or of
            dictionaries, a tuple of arrays with the targets last, a :class:`~poprisk.Problem`, or an object with
            ``count`` and ``measure(model, batch_size)`` that returns the loss and the score of every example. None
            measures nothing: :meth:`finish` ends with the average of the last steps.
        loss: The loss of outputs and targets, such as ``torch.nn.functional.cross_entropy`` or a module. None where
            ``held`` is a problem or measures by itself, or where examples are dictionaries and the model returns an
            object with ``loss``, as models of transformers do.
        average: A :class:`TailAverage`, the ``tail`` of a new one (or several tails: the block then chooses among
            them, too), or None to measure the weights themselves.
        metric: What to choose by: ``"accuracy"``, ``"loss"``, or ``"probability"`` (of the given label). Default: for
            classes the accuracy, and between moments within a standard error of the best accuracy the loss at the
            temperature that suits each of them best; otherwise the loss.
        cost: Most of the training's work that measurements may add, as a share.
        every: Measure after this many steps instead.
        path: File (``.safetensors``) that the best weights are written to whenever they change. It is replaced as a
            whole and survives a crash of the training; ``safetensors.torch.load_file`` reads it. Frozen parameters
            are not in it.
        collate: Makes a batch of a list of held-back examples; default: torch's.

    Raises:
        HyperparameterError: an option is out of range, the loss is missing, or the optimizer trains another model.
        DataError: the held-back block is empty, its arrays differ in length, or it is a DataLoader.

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
        if every is not None and (isinstance(every, bool) or not isinstance(every, Integral) or every < 1):
            raise HyperparameterError(f"every must be a whole number of steps, at least 1, got {shortened(every)}")
        check_followed(model, optimizer)
        self._model, self._every, self._optimizer = unwrapped(model), every, ref(optimizer)
        self._block: Measurable | None = (
            held if held is None or isinstance(held, Measurable) else HeldBlock(held, loss, metric, collate)
        )
        self._owns_average = not (average is None or isinstance(average, TailAverage))
        self.average = (
            average if average is None or isinstance(average, TailAverage) else TailAverage(model, optimizer, average)
        )
        self.curve = HeldCurve(plain=metric is not None)
        self.steps = 0
        self._risk: KeptRisk | None = None
        self._autocast: tuple[str, torch.dtype] | None = None
        self._batch_size: int | None = None
        self._counts_calls = True
        averages = 1 if self.average is None else len(self.average.tails)
        self._budget = MeasurementBudget(cost, 0 if self._block is None else self._block.count, averages)
        self._kept = None if held is None else KeptWeights(self._model, None if path is None else Path(path))
        self._snapshots = Snapshots(self._model) if held is None else None
        self._hooks: list[Any] = [optimizer.register_step_post_hook(self._after_step)]
        if self._kept is not None:
            self._hooks.append(model.register_forward_pre_hook(ForwardHook(self._before_forward), with_kwargs=True))
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))

    @property
    def kept_step(self) -> int | None:
        """The step at which the best weights so far were kept; None before the first measurement."""
        best = self.curve.best
        return None if best is None else best.step

    def measure(self) -> None:
        """Measure the present moment, and keep it if it is the best so far. In a process group, call it in all."""
        if self._block is None or self._kept is None:
            raise HyperparameterError("there is nothing to measure: no examples were held back (held=None)")
        self._budget.batch = self._largest(self._budget.counted)
        if self._batch_size is None:  # one size for the whole training: rounding depends on it
            self._batch_size = int(self._largest(self._budget.batch_size))
        tails = [None] if self.average is None else self.average.tails
        for which, tail in enumerate(tails):
            with self._swapped(which):
                found = self._agreed(self._block.measure(self._model, self._batch_size))
                if self.curve.add(Moment(self.steps, tail, *found)):
                    self._kept.keep({"step": self.steps, "tail": tail})

    @property
    def risks(self) -> list[KeptRisk]:
        """The risk of the weights at every moment that was measured, in order.

        Each of them is unbiased for the weights of its own moment. For the moment that was chosen because it did best,
        :meth:`finish` returns the risk that accounts for the choice.
        """
        return [risk_at(each, self._budget.work) for each in self.curve.moments]

    def features(self, data: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """What the last linear layer receives, the outputs, and the targets, by the weights that were kept.

        Args:
            data: Examples in the form of the held-back ones, without augmentation; None: the held-back ones.

        Raises:
            HyperparameterError: the training is not finished, or nothing was held back in a form that can be evaluated.
        """
        if self._risk is None or not isinstance(self._block, HeldBlock):
            raise HyperparameterError("features need held-back examples, and the weights that finish() keeps: call it")
        block = self._block if data is None else self._block.like(data)
        with self._precision():
            return block.features(self._model, self._batch_size or 1024)

    def count_examples(self, number: int) -> None:
        """Say that the coming step trains on this number of further examples.

        Without it, the examples in calls of the model are counted. This is for loops that call parts of the model: from
        the first use on, its calls are no longer counted.
        """
        self._counts_calls = False
        self._budget.count(number)

    def finish(self, run: Any = None, meter: Any = None, *, batch_norm: Iterable[Any] | None = None) -> KeptRisk:
        """Put the best weights into the model, stop following the optimizer, and estimate their risk.

        If a :class:`~poprisk.Recorder` records the training, it stores them as ``run.kept``.

        Args:
            run: The recorded run (:class:`~poprisk.Run`) of this training. Used only where nothing was held back.
            meter: A :class:`~poprisk.RiskMeter`, which reads the run at the moments that were kept. The moment of the
                lowest valid reading is restored; without a valid reading, the average of the last steps is.
            batch_norm: A loader of training batches (inputs, or tuples that begin with them), from which the
                statistics of batch normalization are recomputed for the kept weights.

        Returns:
            The population risk of the model as it now is, on data as noisy as the training data. The estimate accounts
            for having chosen the best of several moments. It is not valid where nothing was held back, unless the
            weights themselves are kept (``average=None``) and the meter's reading is valid: ``reason`` says what the
            model ends with. A further call returns the same estimate and changes nothing, unless it has a meter.
        """
        if self._risk is None or (self._block is None and run is not None and meter is not None):
            record = None if self._block is None else witness_of(self._optimizer())
            if record is not None:
                record.before_kept()
            self._risk = self._finish_unmeasured(run, meter) if self._block is None else self._finish_measured()
            if batch_norm is not None:
                recompute_batch_norm(self._model, batch_norm)
            if record is not None:
                record.after_kept(self._risk, self.steps, self.curve.moments)
        return self._risk

    def _finish_measured(self) -> KeptRisk:
        if not self.curve.moments or self.curve.moments[-1].step != self.steps:
            self.measure()
        self.close()
        best = self.curve.best
        assert self._kept is not None
        assert best is not None
        self._kept.restore()
        value, error, plain = self.curve.chosen_risk()
        error = held_error(value, error, self._unseen(best), len(best.losses))
        count = len(self.curve.moments)
        moments = f"step {best.step} of {self.steps}, chosen among {count} measurement{'s' if count > 1 else ''}"
        facts = {"step": best.step, "tail": best.tail, "measured": count, "cost": count * self._budget.work}
        facts["accuracy"] = accuracy_of(best)
        if getattr(self._block, "by_batch", False):
            moments += f"; the model tells only the mean loss of a batch, so {len(best.losses)} batches were compared"
        if left := self._budget.left_over:
            moments += (
                f"; {left} examples were trained on without a step of this optimizer: another may have replaced it"
            )
        if not (math.isfinite(value) and math.isfinite(error)):
            few = f"{len(best.losses)} held-back examples are too few for an error; hold at least 10 back"
            reason = few if math.isfinite(plain) else "the loss of the held-back examples is not finite"
            return KeptRisk(value, math.nan, valid=False, reason=f"{reason} ({moments})", **facts)
        return KeptRisk(value, error, reason=moments, **facts)

    def _unseen(self, best: Moment) -> float:
        """What one more mistake of the kept weights, or an example as bad as the worst, would add to the mean loss."""
        found = None
        if isinstance(self._block, HeldBlock) and self._batch_size is not None:
            with self._precision():
                found = self._block.unseen(self._model, self._batch_size)
        return float(best.losses.max()) / len(best.losses) if found is None else found

    def _finish_unmeasured(self, run: Any, meter: Any) -> KeptRisk:
        self.close()
        assert self._snapshots is not None
        tail = None if self.average is None else self.average.tails[0]
        what = "the weights" if tail is None else f"the mean of about the last {tail:.0%} of the steps"
        reading, why = None, "pass run=… and meter=RiskMeter() to choose another moment, or hold examples back"
        if run is not None and meter is not None:
            reading, why = self._read(run, meter)
        if reading is None:
            if self.average is not None:
                self.average.copy_to_model()
            reason = f"nothing was held back, so the model has {what} at the last step, {self.steps}, unmeasured; {why}"
            return KeptRisk(math.nan, math.nan, valid=False, reason=reason, step=self.steps, tail=tail)
        if reading.step != self.steps:
            self._snapshots.restore(reading.step)
        elif self.average is not None:
            self.average.copy_to_model()
        value, error = float(reading.risk.value), float(reading.risk.standard_error)
        reason = f"the risk meter reads its lowest value after step {reading.step} of {self.steps}"
        if tail is not None:
            reason += f": the model has {what} up to there, and the reading is for the weights themselves"
        return KeptRisk(value, error, valid=tail is None, reason=reason, step=reading.step, tail=tail)

    def _read(self, run: Any, meter: Any) -> tuple[Any, str]:
        """The meter's lowest valid reading at a moment that was kept, or None and why there is none."""
        assert self._snapshots is not None
        if run.num_steps != self.steps:
            return None, f"the run has {run.num_steps} steps, but {self.steps} were counted here"
        kept = sorted({*self._snapshots.steps, self.steps})
        if not meter.readings:
            meter.read(run, kept)
        valid = [each for each in meter.readings if each.risk.valid and each.step in kept]
        if not valid:
            return None, f"the risk meter has no valid reading at the {len(kept)} moments that were kept"
        return min(valid, key=lambda each: float(each.risk.value)), ""

    def close(self) -> None:
        """Stop following the optimizer and the model."""
        for hook in self._hooks:
            hook.remove()
        if self._owns_average and self.average is not None:
            self.average.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on after an interruption, the best weights included; tensors are references.

        Of sharded models it has sharded tensors, which ``torch.distributed.checkpoint`` saves and loads.
        """
        autocast = None if self._autocast is None else [self._autocast[0], str(self._autocast[1])]
        return {
            "steps": self.steps,
            "budget": self._budget.state(),
            "batch_size": self._batch_size,
            "autocast": autocast,
            "curve": self.curve.packed(),
            "kept": {} if self._kept is None else self._kept.state(),
            "snapshots": None if self._snapshots is None else self._snapshots.state(),
            "average": self.average.state_dict() if self._owns_average and self.average is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state_dict`; the rest of the training then keeps the same weights, bit for bit.

        Raises:
            StateDictError: the state belongs to another model or block, or to a KeepBest with other options.
        """
        check_keys(state, self.state_dict(), "KeepBest")
        if (state["average"] is None) == (self._owns_average and self.average is not None):
            raise StateDictError("the state was saved with another kind of average: construct KeepBest as it was")
        if (state["snapshots"] is None) == (self._snapshots is not None):
            raise StateDictError(
                "only one of the state and this KeepBest has held-back examples: construct it as it was"
            )
        if self._kept is not None:
            self._kept.load(state["kept"])
        self._budget.restore(state["budget"])
        if self._snapshots is not None:
            self._snapshots.load(state["snapshots"])
        if state["average"] is not None and self.average is not None:
            self.average.load_state_dict(state["average"])
        self.steps, self._batch_size, self._risk = int(state["steps"]), state["batch_size"], None
        autocast = state["autocast"]
        self._autocast = autocast and (autocast[0], getattr(torch, autocast[1].removeprefix("torch.")))
        self.curve.restore(state["curve"])

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._kept is not None
        self._kept.include_unfrozen()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        if self._snapshots is not None:
            if self._snapshots.wants(self.steps):
                with self._swapped(0):
                    self._snapshots.keep(self.steps)
            return
        self._budget.end_step()
        if self._budget.batch is None:
            self._budget.batch = self._largest(self._budget.counted)
        every = self._every
        if self._budget.is_due(self.curve.is_bending()) if every is None else self.steps % every == 0:
            self.measure()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count the examples of a training step, and remember the precision it runs in."""
        if not (module.training and torch.is_grad_enabled()):
            return
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor) and each.dim():
                if self._counts_calls:
                    self._budget.count(len(each))
                kind = each.device.type
                self._autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
                return

    @contextmanager
    def _swapped(self, which: int) -> Iterator[None]:
        """The averaged weights in the model, in the precision of training."""
        with nullcontext() if self.average is None else self.average.lent(which), self._precision():
            yield

    def _precision(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._autocast is None else torch.autocast(*self._autocast)

    def _agreed(self, found: Sequence[Tensor]) -> list[Tensor]:
        """The same numbers in every process, so that all of them keep the same moment."""
        numbers = [each.float() for each in found]
        if not _several_processes():
            return numbers
        stacked = torch.stack(numbers).to(self._device())
        distributed.broadcast(stacked, 0)
        return list(stacked.cpu())

    def _largest(self, number: float) -> float:
        """The largest of the numbers that the processes have, so that all of them measure at the same steps."""
        if not _several_processes():
            return number
        shared = torch.tensor(number, dtype=torch.float64, device=self._device())
        distributed.all_reduce(shared, distributed.ReduceOp.MAX)
        return shared.item()

    def _device(self) -> torch.device:
        return next(self._model.parameters()).device


def _several_processes() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
