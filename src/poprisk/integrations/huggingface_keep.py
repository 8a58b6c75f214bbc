"""KeepBest in the Hugging Face Trainer and in TRL's trainers: end a training with the best averaged weights."""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from poprisk._core.store import atomic_file
from poprisk.errors import HyperparameterError, MissingExtraError, RunError
from poprisk.integrations._readings import PREFIX, add_to_line, held_back_readings
from poprisk.integrations._trainer_block import TrainerBlock
from poprisk.integrations.recording import unwrapped
from poprisk.optim import KeepBest, KeptRisk, Metric, hold_back

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import DefaultFlowCallback
except ImportError as error:
    raise MissingExtraError("transformers", "hf", "the Hugging Face integration") from error

STATE_FILE = "poprisk_keep_best.pt"
_WAITING = "poprisk_keep_best-{}.pt"


class KeepBestCallback(TrainerCallback):
    """Keep the best of the averaged weights of a training, measured on held-back examples with the Trainer's loss.

    Training goes on as it is. When it ends, the model has the kept weights, so that ``trainer.save_model()`` saves
    them, and ``callback.risk`` is an estimate of their risk on new data as noisy as the training data. Checkpoints
    contain the weights of their step, and in ``poprisk_keep_best.pt`` what is needed to resume bit for bit.

    Use :func:`keep_best`, which also takes examples from the Trainer's own training set and uses its ``compute_loss``.
    Without it, as ``Trainer(callbacks=[KeepBestCallback(held)])``, the model must return the loss that it is trained
    with.

    Log lines have ``poprisk/held_back_loss``, ``poprisk/held_back_accuracy`` (for classes) and ``poprisk/kept_step``.

    Args:
        held: The held-back examples, in the form of the Trainer's training set.
        tail: Share of the steps that the averaged weights cover; several tails: the held-back examples choose among
            them; None: the weights themselves. See :class:`~poprisk.TailAverage`.
        metric: What to choose by; default: accuracy for one label per example, otherwise the loss.
        cost: Most of the training's work that measurements may add, as a share.
        every: Measure after this many steps instead.
        resume_from: Checkpoint to resume from, if it is not in ``output_dir``.

    Raises:
        HyperparameterError: When training begins: the Trainer's ``load_best_model_at_end`` is on, or DeepSpeed is used.
        RunError: When training resumes from a checkpoint that was saved without this callback.
    """

    def __init__(
        self,
        held: Any,
        *,
        tail: float | Sequence[float] | None = 0.2,
        metric: Metric | None = None,
        cost: float = 0.03,
        every: int | None = None,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        self.held, self.tail, self.cost, self.every = held, tail, cost, every
        self.metric: Metric | None = metric
        self.resume_from = resume_from
        self.trainer: Trainer | None = None
        self.keeper: KeepBest | None = None
        self.risk: KeptRisk | None = None
        self._logged = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Follow the optimizer; when continuing from a checkpoint, from the state in it."""
        self._close()
        _check_arguments(args)
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        block = TrainerBlock(*self._measured_by(loader), self.metric, self.trainer)
        self.risk, self._logged = None, 0
        self.keeper = KeepBest(
            model,
            unwrapped(kwargs["optimizer"]),
            block,
            average=self.tail,
            metric=self.metric,
            cost=self.cost,
            every=self.every,
        )
        if state.global_step:
            self.keeper.load_state_dict(self._stored(Path(args.output_dir or "."), state.global_step))
            self._logged = len(self.keeper.curve.moments)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the state before the Trainer writes its checkpoint: a kill in between loses neither."""
        if control.should_save:
            self._store(args, Path(args.output_dir or ".") / _WAITING.format(state.global_step))

    on_epoch_end = on_step_end

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Move the state into the checkpoint."""
        folder = Path(args.output_dir or ".")
        waiting, checkpoint = folder / _WAITING.format(state.global_step), folder / f"checkpoint-{state.global_step}"
        if not args.should_save or not checkpoint.is_dir():
            return
        if not waiting.exists():
            self._store(args, waiting)
        if waiting.exists():
            waiting.replace(checkpoint / STATE_FILE)
        for stale in folder.glob(_WAITING.format("*")):
            stale.unlink()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the last measurement to the line with the training loss, and to the history."""
        if logs is None or "loss" not in logs or self.keeper is None:
            return
        if len(self.keeper.curve.moments) > self._logged:
            self._logged = len(self.keeper.curve.moments)
            add_to_line(held_back_readings(self.keeper), logs, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put the best weights into the model, and log the estimate of their risk."""
        if self.keeper is None:
            return
        self.risk = risk = self.keeper.finish()
        last = {"held_back_risk": risk.value, "held_back_risk_error": risk.standard_error, "kept_step": risk.step}
        if math.isfinite(risk.accuracy):
            last["held_back_accuracy"] = risk.accuracy
        line = {PREFIX + name: value for name, value in last.items()}
        if self.trainer is not None:
            self.trainer.log(line)
        else:
            state.log_history.append({**line, "epoch": state.epoch, "step": state.global_step})

    def _measured_by(self, loader: Any) -> tuple[Any, Callable[[list[Any]], Any], Callable[..., Tensor]]:
        """The examples, how they become a batch, and the loss of a batch."""
        held, collate, trainer = self.held, loader.collate_fn, self.trainer
        if trainer is None:
            return held, collate, _own_loss
        if hasattr(held, "column_names"):
            held = trainer._remove_unused_columns(held, description="held-back")
        else:
            collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="held-back")

        def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
            with trainer.compute_loss_context_manager():
                found = trainer.compute_loss(model, trainer._prepare_inputs(batch))
            return found[0] if isinstance(found, tuple) else found

        return held, collate, loss

    def _store(self, args: TrainingArguments, path: Path) -> None:
        if self.keeper is None or not args.should_save:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            torch.save(self.keeper.state_dict(), file)

    def _stored(self, folder: Path, step: int) -> dict[str, Any]:
        places = [folder / f"checkpoint-{step}" / STATE_FILE, folder / _WAITING.format(step)]
        if self.resume_from is not None:
            places = [Path(self.resume_from) / STATE_FILE]
        found = next((place for place in places if place.exists()), None)
        if found is None:
            raise RunError(
                f"the training continues from step {step}, but {places[0]} does not exist: resume from a checkpoint "
                "that was saved with this callback, and pass resume_from= if it is not in output_dir"
            )
        return torch.load(found, map_location="cpu", weights_only=True)

    def _close(self) -> None:
        if self.keeper is not None:
            self.keeper.close()
            self.keeper = None


def keep_best(
    trainer: Trainer, held: Any = 0.05, *, seed: int = 0, labels: Any = None, **options: Any
) -> KeepBestCallback:
    """Make a trainer end with the best of its averaged weights, chosen on held-back examples.

    Works for :class:`transformers.Trainer` and those that inherit from it, such as TRL's SFTTrainer and DPOTrainer,
    with its own collator and ``compute_loss``. Call it after the trainer was made and before training: the examples
    are taken from the training set as the trainer has prepared it.

    Args:
        trainer: The trainer, before training.
        held: Share of the training examples to hold back, which the trainer then does not train on; or held-back
            examples in the form that ``trainer.train_dataset`` has.
        seed: Seed for the choice of examples.
        labels: The class of each example; see :func:`~poprisk.hold_back`.
        options: See :class:`KeepBestCallback`.

    Returns:
        The callback, which has ``risk`` after training.

    Raises:
        DataError: The training set has no length.

    Example::

        trainer = Trainer(model, args, train_dataset=data)
        kept = keep_best(trainer, 0.05)
        trainer.train()                  # the model now has the kept weights
        print(kept.risk)
    """
    if isinstance(held, int | float) and not isinstance(held, bool):
        if held <= 0:
            raise HyperparameterError(f"the share of examples to hold back must be in (0, 1), got {held!r}: use 0.05")
        trainer.train_dataset, held = hold_back(trainer.train_dataset, held, seed=seed, labels=labels)
    callback = KeepBestCallback(held, **options)
    callback.trainer = trainer
    callbacks = trainer.callback_handler.callbacks
    first = next((i + 1 for i, each in enumerate(callbacks) if isinstance(each, DefaultFlowCallback)), 0)
    callbacks.insert(first, callback)  # after the one that says when to save, before those that report
    return callback


def _own_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    outputs = model(**batch)
    loss = outputs.get("loss") if isinstance(outputs, dict) else getattr(outputs, "loss", None)
    if loss is None:
        raise RunError(
            f"{type(model).__name__} returns no loss for the held-back examples: use keep_best(trainer, held), which "
            "takes the Trainer's compute_loss"
        )
    return loss


def _check_arguments(args: TrainingArguments) -> None:
    if args.load_best_model_at_end:
        raise HyperparameterError(
            "load_best_model_at_end would replace the weights that KeepBestCallback keeps: set it to False"
        )
    if args.deepspeed or args.fsdp:
        raise HyperparameterError(
            "KeepBestCallback needs the whole weights in each process, but DeepSpeed or FSDP splits them: use DDP"
        )
