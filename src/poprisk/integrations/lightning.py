"""A callback that logs the gate of PopRiskAdamW in Lightning; the optimizer itself works there unchanged."""

import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.utils.hooks import RemovableHandle

from poprisk.errors import MissingExtraError, PopRiskWarning
from poprisk.integrations._readings import METERS_FILE, PREFIX, Readings, find_poprisk, interval, write_readings
from poprisk.integrations._schedules import keep_own_lr
from poprisk.integrations.loggers import before_each_step, steps_taken
from poprisk.optim import PopRiskAdamW

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule


def _base() -> Any:
    """The Callback class of the package in use; Lightning has two names, with unrelated classes."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    names.sort(key=lambda name: name not in sys.modules)  # the one already imported, otherwise the first
    for name in names:
        with suppress(ImportError):
            return import_module(name).Callback
    raise MissingExtraError("lightning", "lightning", "the Lightning integration")


if not TYPE_CHECKING:
    Callback = _base()


class PopRiskCallback(Callback):
    """Log gate, noise scale and population rate of every PopRiskAdamW, and store them with the run.

    They are added to the lines that Lightning logs every ``log_every_n_steps`` steps, whatever the logger, and to the
    metrics that other callbacks see. Names start with ``poprisk/``, or with ``poprisk/0/`` and so on if there are
    several PopRiskAdamW optimizers. They are also written to ``poprisk_meters.json`` in the logger's directory (without
    a logger, the trainer's ``default_root_dir``) at every checkpoint and at the end; ``step`` counts finished steps, as
    ``trainer.global_step`` does. A resumed run keeps the readings up to its checkpoint.

    The diagnostics are read inside the step, with the gradients that it will use: after the closure, after
    accumulation, unscaled and clipped. ``on_before_optimizer_step`` would be too early: before clipping, a large batch
    seems to move the weights farther than it will, and ``self_fit`` would be too high.

    Args:
        every: Steps between two readings; by default ten readings per log line, which are averaged. If it is longer
            than a log line, Lightning repeats the last values in between.

    Example::

        trainer = Trainer(callbacks=[PopRiskCallback()])
    """

    def __init__(self, every: int | None = None) -> None:
        interval(every, 1)
        self.every = every
        self.lines: list[dict[str, float]] = []
        self._readings: dict[str, Readings] = {}
        self._handles: list[RemovableHandle] = []
        self._logged: set[str] = set()
        self._step_is_due = False

    def on_train_start(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Find the optimizers with a gate, and drop readings that do not belong to this run."""
        self._remove()
        self.lines = [line for line in self.lines if line["step"] <= trainer.global_step]
        found = [(index, find_poprisk(optimizer)) for index, optimizer in enumerate(trainer.optimizers)]
        gated = [(index, optimizer) for index, optimizer in found if optimizer is not None]
        if not gated:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "no optimizer"
            warnings.warn(f"PopRiskCallback logs nothing: it needs PopRiskAdamW, found {kinds}", PopRiskWarning, 2)
        for index, optimizer in gated:
            for config in trainer.lr_scheduler_configs:
                if config.scheduler.optimizer is optimizer:
                    keep_own_lr(optimizer, config.scheduler)
            name = f"{index}/" if len(gated) > 1 else ""
            self._readings[name] = Readings()
            if trainer.log_every_n_steps:
                read = self._reader(optimizer, self._readings[name], interval(self.every, trainer.log_every_n_steps))
                self._handles.append(before_each_step(optimizer, read))

    def _reader(self, optimizer: PopRiskAdamW, readings: Readings, every: int) -> Callable[[], None]:
        step = steps_taken(optimizer)

        def read() -> None:
            nonlocal step
            step += 1
            if step % every == 0:
                readings.take(optimizer)

        return read

    def on_before_optimizer_step(self, trainer: Any, pl_module: "LightningModule", optimizer: Any) -> None:
        """Note that this batch completes a step."""
        self._step_is_due = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the values to Lightning's log line, if one is due."""
        stepped = self._step_is_due or not pl_module.automatic_optimization
        self._step_is_due = False
        if stepped and (trainer._logger_connector.should_update_logs or trainer.fast_dev_run):
            meters = self._flush(trainer)
            # Lightning repeats a value until it gets a new one, so a missing value must be logged as NaN
            values = {**dict.fromkeys(self._logged, float("nan")), **meters} if meters else {}
            pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
            self._logged |= meters.keys()

    def on_save_checkpoint(self, trainer: Any, pl_module: "LightningModule", checkpoint: dict[str, Any]) -> None:
        """Write the readings so far."""
        self._store(trainer)

    def on_train_end(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Write all readings, those after the last log line included."""
        self._flush(trainer)
        self._store(trainer)
        self._remove()

    def on_exception(self, trainer: Any, pl_module: "LightningModule", exception: BaseException) -> None:
        """Detach from the optimizers; the file stays as the last checkpoint left it."""
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        """The state for the checkpoint: the lines so far."""
        return {"lines": [dict(line) for line in self.lines]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the lines of a checkpoint."""
        self.lines = [dict(line) for line in state_dict["lines"]]

    def _flush(self, trainer: Any) -> dict[str, float]:
        """The values of one line, which is also kept."""
        meters = {
            PREFIX + name + key.removeprefix(PREFIX): value
            for name, readings in self._readings.items()
            if readings
            for key, value in readings.flush().items()
        }
        if meters:
            kept = {key.removeprefix(PREFIX): value for key, value in meters.items()}
            self.lines.append({"step": trainer.global_step, "epoch": trainer.current_epoch, **kept})
        return meters

    def _store(self, trainer: Any) -> None:
        if not self.lines or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        folder = _folder(trainer)
        if "://" in folder:
            warnings.warn(
                f"{METERS_FILE} can be written to a local directory only, not to {folder}; its values are in the "
                "checkpoints and in the logger",
                PopRiskWarning,
                stacklevel=2,
            )
            return
        write_readings(folder, self.lines)

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._readings, self._logged, self._step_is_due = [], {}, set(), False


def _folder(trainer: Any) -> str:
    """The directory of this run: the logger's, or the one that ModelCheckpoint would use."""
    logger = trainer.logger
    if logger is None:
        return str(trainer.default_root_dir)
    if logger.log_dir is not None:
        return str(logger.log_dir)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return f"{logger.save_dir or trainer.default_root_dir}/{logger.name}/{version}"
