"""KeepBest in Lightning: end a training with the best averaged weights, chosen on held-back examples."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from poprisk.errors import HyperparameterError, RunError
from poprisk.integrations._readings import PREFIX, held_back_readings
from poprisk.integrations.lightning import _base
from poprisk.integrations.recording import batch_length
from poprisk.optim import HeldBlock, KeepBest, KeptRisk, Loss, Metric

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
else:
    Callback = _base()

_SPLIT = ("FSDP", "DeepSpeed", "ModelParallel")
"""Strategies, by a part of their name, that leave no process with the whole weights."""


class KeepBestCallback(Callback):
    """Keep the best of the averaged weights of a training, measured on held-back examples.

    Training goes on as it is. When it ends, the module has the kept weights, so that ``trainer.save_checkpoint(path)``
    saves them, and ``callback.risk`` is an estimate of their risk on new data as noisy as the training data.
    Checkpoints during training contain the weights of their step, and what is needed to resume bit for bit.

    ``poprisk/held_back_loss``, ``poprisk/held_back_accuracy`` (for classes) and ``poprisk/kept_step`` are logged as the
    module logs, whatever the logger, and are seen by other callbacks.

    Args:
        held: The held-back examples, from :func:`poprisk.hold_back`: a dataset of (input, target) pairs, or a tuple of
            inputs and targets.
        loss: The loss of outputs and targets, as in ``training_step``.
        network: Name of the part of the module that gives the outputs, such as ``"net"``; by default the module itself,
            which must then define ``forward``.
        tail: Share of the steps that the averaged weights cover; several tails: the held-back examples choose among
            them; None: the weights themselves. See :class:`~poprisk.TailAverage`.
        metric: What to choose by; default: accuracy for classes, otherwise the loss.
        cost: Most of the training's work that measurements may add, as a share.
        every: Measure after this many steps instead.
        collate: Makes a batch of a list of held-back examples; default: that of the training loader.

    Raises:
        HyperparameterError: When training begins: there are several optimizers, or the strategy splits the weights.
        RunError: When training begins: the module has no ``forward``.

    Example::

        train_set, held = hold_back(dataset, 0.05)
        kept = KeepBestCallback(held, torch.nn.functional.cross_entropy)
        Trainer(callbacks=[kept]).fit(module, DataLoader(train_set, batch_size=32, shuffle=True))
        print(kept.risk)
    """

    def __init__(
        self,
        held: Any,
        loss: Loss,
        *,
        network: str | None = None,
        tail: float | Sequence[float] | None = 0.2,
        metric: Metric | None = None,
        cost: float = 0.03,
        every: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        self.held, self.loss, self.network, self.tail, self.collate = held, loss, network, tail, collate
        self.metric: Metric | None = metric
        self.cost, self.every = cost, every
        self.keeper: KeepBest | None = None
        self.risk: KeptRisk | None = None
        self._restored: dict[str, Any] = {}
        self._logged = 0

    def on_train_start(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Follow the optimizer; when continuing from a checkpoint, from the state in it."""
        self._close()
        _check(trainer, pl_module, self.network)
        collate = self.collate or getattr(trainer.train_dataloader, "collate_fn", None)
        block = HeldBlock(self.held, self.loss, self.metric, collate)
        self.risk = None
        self.keeper = KeepBest(
            pl_module,
            trainer.optimizers[0],
            _PartOfModule(block, self.network, trainer.precision_plugin),
            average=self.tail,
            metric=self.metric,
            cost=self.cost,
            every=self.every,
        )
        self.keeper.count_examples(0)  # batches are counted below, not calls of the module
        if self._restored:
            self.keeper.load_state_dict(self._restored)
            self._restored = {}
        self._logged = len(self.keeper.curve.moments)

    def on_train_batch_start(self, trainer: Any, pl_module: "LightningModule", batch: Any, batch_idx: int) -> None:
        """Count the examples, which set the price of a measurement."""
        if self.keeper is not None:
            self.keeper.count_examples(batch_length(batch))

    def on_train_batch_end(
        self, trainer: Any, pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log a new measurement."""
        if self.keeper is not None and len(self.keeper.curve.moments) > self._logged:
            self._logged = len(self.keeper.curve.moments)
            pl_module.log_dict(held_back_readings(self.keeper), on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Put the best weights into the module, and log the estimate of their risk."""
        if self.keeper is None:
            return
        self.risk = risk = self.keeper.finish()
        last: dict[str, Any] = {"held_back_risk": risk.value, "held_back_risk_error": risk.standard_error}
        last |= {"kept_step": risk.step, "held_back_accuracy": risk.accuracy}
        line = {PREFIX + name: float(value) for name, value in last.items() if math.isfinite(value)}
        for logger in trainer.loggers:
            logger.log_metrics(line, step=trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: "LightningModule", exception: BaseException) -> None:
        """Stop following the optimizer; the last checkpoint has the state."""
        if self.keeper is not None:
            self.keeper.close()

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint; empty after the end, when the module has the kept weights."""
        return {} if self.keeper is None or self.risk is not None else self.keeper.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of a checkpoint, when training begins."""
        self._restored = state_dict

    def _close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()
            self.keeper = None


class _PartOfModule:
    """Measures a part of a Lightning module, in the precision of the training."""

    def __init__(self, block: HeldBlock, network: str | None, precision: Any) -> None:
        self.count, self._block, self._network, self._precision = block.count, block, network, precision

    def measure(self, model: nn.Module, batch_size: int) -> tuple[Tensor, ...]:
        part = model if self._network is None else model.get_submodule(self._network)
        with self._precision.forward_context():
            return self._block.measure(part, batch_size)


def _check(trainer: Any, module: Any, network: str | None) -> None:
    if len(trainer.optimizers) != 1:
        raise HyperparameterError(
            f"KeepBestCallback follows one optimizer, but the module has {len(trainer.optimizers)}: use KeepBest in "
            "your training_step, one for each"
        )
    strategy = type(trainer.strategy).__name__
    if any(part in strategy for part in _SPLIT):
        raise HyperparameterError(
            f"KeepBestCallback needs the whole weights in each process, but {strategy} splits them: use DDP"
        )
    base = next(each for each in type(module).__mro__ if each.__name__ == "LightningModule")
    if network is None and type(module).forward is getattr(base, "forward"):  # noqa: B009
        names = ", ".join(repr(name) for name, _ in module.named_children())
        raise RunError(
            f"{type(module).__name__} has no forward, so held-back examples cannot be measured: define it, or pass "
            f"network= with the part that gives the outputs (its parts are {names})"
        )
