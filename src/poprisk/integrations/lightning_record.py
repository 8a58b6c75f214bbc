"""Recording a run in Lightning, for ``poprisk audit``, ``poprisk report`` and every other analysis of a run."""

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
    StepBlocks,
    check_batch,
    find_network,
    make_recorder,
    unwatch_loader,
    unwrapped,
    watch_loader,
)
from poprisk.runs import Problem, Recorder, Run, StepContext

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule
else:
    Callback = _base()

Loader = TypeVar("Loader")
_PRECISIONS = ("32-true", "64-true")


class RecordRun(Callback):
    """Records a Lightning training as a :class:`~poprisk.runs.Run`; the training is what it is without.

    Which examples are in a batch is known from the loader, which has to be watched from its beginning::

        record = RecordRun("runs/first", problem)
        trainer = Trainer(max_epochs=20, callbacks=[record])
        trainer.fit(module, record.watch(DataLoader(data, batch_size=32, shuffle=True)))
        table = audit(record.run)

    Supported: automatic optimization with one optimizer that :class:`~poprisk.runs.Recorder` knows, one process and
    device, full precision, any number of loader workers and any sampler, accumulation, clipping by norm, schedulers.
    Refused before the first step: several processes, mixed or half precision, manual optimization, clipping by value,
    a loader that was not watched, and a training that goes on from a checkpoint.

    The problem's examples must be those of the loader's dataset in the same order, and its model a part of the module
    (the module itself, ``module.net``, …). That is checked: each batch has its examples' targets, and the first steps
    have their gradients, so that a ``training_step`` that computes another loss than the problem's is refused, unless
    the network draws at random or mixes the batch, where there is no such gradient.

    Args:
        path: A directory for the run, new or empty; None keeps it in memory.
        problem: What is trained. Without it the run has batches, weights and losses, which ``poprisk report`` shows,
            and no analysis that needs the network; ``Run.load(path, problem=…)`` brings it later, if ``network`` said
            which part of the module is its model.
        network: The name of the module's part that is the problem's model; default: the one with its parameters.
        every: Steps between checkpoints; 1 records every step, about three weight vectors each.
        augmentation: ``"unseeded"`` if the dataset changes its inputs at random: recorded, but not for exact analyses.
        verify_steps: How many first steps to compare with the problem.

    Raises:
        RunError: when training begins, with what cannot be recorded and what to do.
    """

    def __init__(
        self,
        path: str | Path | None,
        problem: Problem | None = None,
        *,
        network: str | None = None,
        every: int = 1,
        augmentation: Literal["unseeded"] | None = None,
        verify_steps: int = 2,
    ) -> None:
        self.path, self.problem, self.network = path, problem, network
        self._options = {"every": every, "augmentation": augmentation, "verify_steps": verify_steps}
        self._blocks: StepBlocks | None = None
        self._recorder: Recorder | None = None
        self._drawn: DrawnBatches | None = None
        self._loader: Any = None
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
            RunError: its batches cannot be told from each other.
        """
        watch_loader(loader)
        return loader

    @property
    def run(self) -> Run:
        """The run as far as it has been written.

        Raises:
            RunError: training has not begun.
        """
        if self._recorder is None:
            raise RunError("nothing has been recorded yet: call trainer.fit(…) with this callback first")
        return self._recorder.run

    def on_train_start(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Looks at all that could stand in the way, and begins."""
        loader = trainer.train_dataloader
        _check_trainer(trainer, pl_module)
        _check_watched(loader)
        self._loader, self._drawn = loader, watch_loader(loader)
        self._parts, self._losses, self._accumulated = [], [], trainer.accumulate_grad_batches
        network = find_network(pl_module, None if self.problem is None else self.problem.module(), self.network)
        optimizer = unwrapped(trainer.optimizers[0])
        planned = trainer.estimated_stepping_batches
        about = {
            "trainer": "lightning",
            "accumulate": self._accumulated,
            "clip_norm": trainer.gradient_clip_val or None,
        }
        options = {**self._options, "steps": int(planned) if math.isfinite(planned) else None, "training": about}

        def make() -> Recorder:
            return make_recorder(self.path, network, optimizer, self.problem, len(loader.dataset), **options)

        self._blocks = StepBlocks(make, optimizer, self._batches, self._add_losses)
        self._recorder = self._blocks.recorder

    def on_train_epoch_start(self, trainer: Any, pl_module: "LightningModule") -> None:
        """An epoch that was ended early leaves nothing behind."""
        self._parts, self._losses = [], []

    def on_train_batch_start(self, trainer: Any, pl_module: "LightningModule", batch: Any, batch_idx: int) -> None:
        """Takes the indices of the batch."""
        if self._drawn is None:
            return
        indices = self._drawn.take()
        check_batch(batch, indices, self.problem)
        self._parts.append(indices)

    def on_train_batch_end(
        self, trainer: Any, pl_module: "LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the loss of a batch that was only accumulated."""
        if self._parts and isinstance(outputs, dict) and "loss" in outputs:
            self._losses.append(outputs["loss"].detach())

    def on_train_end(self, trainer: Any, pl_module: "LightningModule") -> None:
        """Writes what is left."""
        self._end(None)

    def on_exception(self, trainer: Any, pl_module: "LightningModule", exception: BaseException) -> None:
        """Keeps the steps that were whole."""
        self._end(exception)

    def _batches(self) -> tuple[Sequence[Tensor], Sequence[Tensor] | None, None]:
        """Lightning divides by the number of micro-batches that were asked for, also where an epoch ends early."""
        parts, self._parts = self._parts, []
        if len(parts) in (0, self._accumulated):
            return parts, None, None
        return parts, [torch.full((len(part),), 1 / (self._accumulated * len(part))) for part in parts], None

    def _add_losses(self, step: StepContext) -> None:
        """The recorder has the last micro-batch's loss, from the closure."""
        losses, self._losses = self._losses, []
        if step.loss is not None:
            for loss in losses:
                step.loss = step.loss + loss

    def _end(self, error: BaseException | None) -> None:
        blocks, self._blocks, self._drawn = self._blocks, None, None
        if blocks is not None:
            blocks.end(error)
            unwatch_loader(self._loader)


def _check_trainer(trainer: Any, module: nn.Module) -> None:
    if trainer.world_size > 1:
        raise RunError(
            f"{trainer.world_size} processes share each step, one process can be recorded: Trainer(devices=1)"
        )
    if trainer.precision not in _PRECISIONS:
        raise RunError(
            f"precision={trainer.precision!r} computes other gradients than the problem's in full precision: train "
            'with precision="32-true" or "64-true"'
        )
    if not getattr(module, "automatic_optimization", True):
        raise RunError(
            "with manual optimization the loss of a step is not known here: put a poprisk.Recorder into training_step"
        )
    if len(trainer.optimizers) != 1:
        raise RunError(f"a run has one optimizer, got {len(trainer.optimizers)}: record a training with one")
    if trainer.gradient_clip_val and str(trainer.gradient_clip_algorithm).lower().endswith("value"):
        raise RunError('clipping by value is no step of the recorded loss: gradient_clip_algorithm="norm"')
    if trainer.global_step:
        raise RunError(
            f"the training goes on from step {trainer.global_step} of a checkpoint, whose first steps were not "
            "recorded: record a training from its beginning"
        )


def _check_watched(loader: Any) -> None:
    places = [getattr(loader, place, None) for place in ("sampler", "batch_sampler")]
    if not any(isinstance(place, DrawnBatches) for place in places):
        raise RunError(
            f"the training loader ({type(loader).__name__}) is not watched, and the examples of its batches not known: "
            "pass trainer.fit(module, record.watch(loader)), or return record.watch(loader) from train_dataloader"
        )
