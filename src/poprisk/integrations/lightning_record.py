"""Record a Lightning training as a run, for ``poprisk audit``, ``poprisk report`` and other analyses."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from poprisk.errors import RunError
from poprisk.integrations.lightning import _base
from poprisk.integrations.recording import (
    DrawnBatches,
    TrainerRecording,
    check_batch,
    check_from_start,
    find_network,
    watch_loader,
)
from poprisk.runs import Problem, StepContext

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
else:
    Callback = _base()

Loader = TypeVar("Loader")
_PRECISIONS = ("32-true", "64-true")


class RecordRun(TrainerRecording, Callback):
    """Record a Lightning training as a :class:`~poprisk.runs.Run`, without changing the training.

    The examples of each batch are read from the loader, which must be watched from the start::

        record = RecordRun("runs/first", problem)
        trainer = Trainer(max_epochs=20, callbacks=[record])
        trainer.fit(module, record.watch(DataLoader(data, batch_size=32, shuffle=True)))
        table = audit(record.run)

    Supported: automatic optimization with one optimizer that :class:`~poprisk.runs.Recorder` knows, one process and
    device, full precision, any number of loader workers and any sampler, accumulation, clipping by norm, schedulers.
    Not supported, with an error before the first step: several processes, mixed or half precision, manual
    optimization, clipping by value, a loader that is not watched, and a training that continues from a checkpoint.

    The problem's examples must be those of the loader's dataset, in the same order, and its model a part of the module
    (the module itself, ``module.net``, …). The targets of each batch and the gradients of the first steps are checked,
    so a ``training_step`` with another loss than the problem's gives an error; a loss that changes later gives a
    warning, and exact analyses end before that step. The gradients cannot be checked if the network is random (dropout)
    or mixes the examples of a batch.

    Args:
        path: Directory for the run, new or empty; None keeps it in memory.
        problem: What is trained. Without it, the run has batches, weights and losses, which ``poprisk report`` shows,
            but analyses that need the network are not possible. It can be added later with
            ``Run.load(path, problem=…)`` if ``network`` names the part of the module that is its model.
        network: Name of the part of the module that is the problem's model; by default, the part with its parameters.
        every: Steps between checkpoints; 1 records every step, about three weight vectors each. Default: 1, or more
            if that would take more than 1 GiB.
        augmentation: ``"unseeded"`` if the dataset changes its inputs at random; the run cannot be analyzed exactly.
        verify_steps: Number of initial steps to compare with the problem; 0 also turns off the later samples.
        analyze: Whether to audit the labels and measure the learning curves when training ends, at some 20 moments of
            the run, and keep both with it, with pictures or texts of the examples: ``poprisk report``, ``audit`` and
            ``compare`` then open the run by themselves. ``poprisk.analyze(record.run)`` adds all other parts. No effect
            without problem or path.

    Raises:
        RunError: When training begins: what cannot be recorded, and what to do.
    """

    def __init__(
        self,
        path: str | Path | None,
        problem: Problem | None = None,
        *,
        network: str | None = None,
        every: int | None = None,
        augmentation: Literal["unseeded"] | None = None,
        verify_steps: int = 2,
        analyze: bool = True,
    ) -> None:
        options = {"every": every, "augmentation": augmentation, "verify_steps": verify_steps, "analyze": analyze}
        super().__init__(path, problem, **options)  # type: ignore[arg-type]
        self.network = network
        self._parts: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._accumulated = 1

    def watch(self, loader: Loader) -> Loader:
        """Note which examples a training loader draws.

        Args:
            loader: A torch DataLoader, for ``trainer.fit`` or to return from ``train_dataloader``.

        Returns:
            The same loader.

        Raises:
            RunError: The examples of its batches cannot be known.
        """
        watch_loader(loader)
        return loader

    def on_train_start(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Check that the training can be recorded, and begin."""
        _check_trainer(trainer, pl_module)
        _check_watched(trainer.train_dataloader)
        self._parts, self._losses, self._accumulated = [], [], trainer.accumulate_grad_batches
        network = find_network(pl_module, None if self.problem is None else self.problem.module(), self.network)
        planned, clip = trainer.estimated_stepping_batches, trainer.gradient_clip_val or None
        about = {"trainer": "lightning", "accumulate": self._accumulated, "clip_norm": clip}
        steps = int(planned) if math.isfinite(planned) else None
        self._begin(trainer.train_dataloader, network, trainer.optimizers[0], steps, about)

    def on_train_epoch_start(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Discard what an epoch that ended early left behind."""
        self._parts, self._losses = [], []

    def on_train_batch_start(self, trainer: Any, pl_module: "LightningModule", batch: Any, batch_idx: int) -> None:
        """Take the indices of the batch."""
        if self._drawn is None:
            return
        indices = self._drawn.take()
        check_batch(batch, indices, self.problem)
        self._parts.append(indices)

    def on_train_batch_end(
        self, trainer: Any, pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss of a batch that was only accumulated."""
        if self._parts and isinstance(outputs, dict) and "loss" in outputs:
            self._losses.append(outputs["loss"].detach())

    def on_train_end(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Write the rest."""
        self._end()

    def on_exception(self, trainer: Any, pl_module: "LightningModule", exception: BaseException) -> None:
        """Keep the complete steps."""
        self._end(exception)

    def _batches(self) -> tuple[Sequence[Tensor], Sequence[Tensor] | None, None]:
        """Lightning divides by the configured number of micro-batches, even if an epoch ends early."""
        parts, self._parts = self._parts, []
        if len(parts) in (0, self._accumulated):
            return parts, None, None
        return parts, [torch.full((len(part),), 1 / (self._accumulated * len(part))) for part in parts], None

    def _before_close(self, step: StepContext) -> None:
        """Add the losses of the other micro-batches; the recorder has that of the last one, from the closure."""
        losses, self._losses = self._losses, []
        if step.loss is not None:
            for loss in losses:
                step.loss = step.loss + loss


def _check_trainer(trainer: Any, module: nn.Module) -> None:
    if trainer.world_size > 1:
        raise RunError(
            f"{trainer.world_size} processes share each step, but only one can be recorded: use Trainer(devices=1)"
        )
    if trainer.precision not in _PRECISIONS:
        raise RunError(
            f"precision={trainer.precision!r} gives other gradients than the problem in full precision: train with "
            'precision="32-true" or "64-true"'
        )
    if not getattr(module, "automatic_optimization", True):
        raise RunError(
            "manual optimization hides the loss of a step: use poprisk.Recorder inside training_step instead"
        )
    if len(trainer.optimizers) != 1:
        raise RunError(
            f"only one optimizer can be recorded, got {len(trainer.optimizers)}: use a module with one optimizer"
        )
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm).lower().endswith("value"):
        raise RunError('clipping by value cannot be recorded: use gradient_clip_algorithm="norm"')
    check_from_start(trainer.global_step)


def _check_watched(loader: Any) -> None:
    places = [getattr(loader, place, None) for place in ("sampler", "batch_sampler")]
    if not any(isinstance(place, DrawnBatches) for place in places):
        raise RunError(
            f"the loader ({type(loader).__name__}) is not watched, so the examples of its batches are unknown: call "
            "trainer.fit(module, record.watch(loader)), or return record.watch(loader) from train_dataloader"
        )
