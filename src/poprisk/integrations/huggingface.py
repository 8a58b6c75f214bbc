"""PopRiskAdamW in Hugging Face's Trainer, and in every trainer that inherits from it (TRL's, for one)."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from poprisk._core.store import write_json
from poprisk.errors import HyperparameterError, MissingExtraError, PopRiskWarning
from poprisk.integrations._readings import PREFIX, Readings, find_poprisk, interval
from poprisk.integrations._schedules import keep_own_lr
from poprisk.optim import DEFAULTS, PopRiskAdamW, parse_options, read_options, suggest_lr

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingExtraError("transformers", "hf", "the Hugging Face integration") from error

METERS_FILE = "poprisk_meters.json"


def poprisk_optimizer(
    args: TrainingArguments | None = None,
    *,
    ungated: str | Sequence[str] = (),
    ungated_lr: float | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    r"""What :class:`transformers.Trainer` takes as ``optimizer_cls_and_kwargs``.

    The Trainer uses such a pair verbatim, so what its arguments say must be inside: lr, betas and eps are taken from
    ``args``, then the text of ``args.optim_args`` (``"alpha=calibrated,betas=(0.9,0.95)"``), then ``options``; later
    ones win. They are read now: change ``args`` first. Weight decay is the Trainer's unless it is given here; its
    exceptions (biases, norms) are the Trainer's.

    Args:
        args: The Trainer's arguments. Their ``learning_rate`` is used as it is: set it to ``suggest_lr(...)`` of the
            one you would give AdamW. Without ``args`` the library's defaults hold.
        ungated: Parameters whose name matches one of these patterns (``re.search``) are trained as by AdamW. This gives
            the pair in its factory form.
        ungated_lr: Their learning rate, an AdamW one; by default the one for which ``suggest_lr`` gives ``lr``.
        options: Any of :class:`poprisk.PopRiskAdamW`; values may be text.

    Raises:
        HyperparameterError: an unknown option, one of the wrong type, or out of range.

    Example:
        >>> poprisk_optimizer(lr=1e-2, alpha="0.5")
        (<class 'poprisk.optim._adamw.PopRiskAdamW'>, {'lr': 0.01, 'alpha': 0.5})
    """
    source = {name: options.pop(name) for name in ("variance",) if name in options}  # an object, not an option as text
    given = read_options(getattr(args, "optim_args", None)) | read_options(options)
    if args is not None:
        if "lr" not in given:
            _warn_of_untouched_lr(args)
        given = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            **given,
        }
    given = parse_options(given) | source  # checked together, because together they may contradict each other
    if not ungated and ungated_lr is not None:
        raise HyperparameterError("ungated_lr is the lr of the ungated parameters: name them with ungated=(…)")
    if not ungated and "weight_decay" not in given:
        return PopRiskAdamW, given
    # The Trainer's own groups have its weight decay, whatever the pair says; the factory makes groups that have ours.
    if args is not None:
        given.setdefault("weight_decay", args.weight_decay)
    return PopRiskFactory, {**given, "ungated": _patterns(ungated), "ungated_lr": ungated_lr}


class PopRiskFactory:
    """The factory form: ``PopRiskFactory()(model, **options)`` makes the groups that the Trainer would not make.

    Decay and no decay as the Trainer splits them, times gated and not.

    Example:
        >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)})
        >>> optimizer = PopRiskFactory()(model, ungated=("embed",), lr=0.06)
        >>> [(g["gate"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
        [('snr', 0.06, 0.005), ('snr', 0.06, 0.0), (None, 0.001, 0.005)]
    """

    def __call__(
        self, model: nn.Module, *, ungated: str | Sequence[str] = (), ungated_lr: float | None = None, **options: Any
    ) -> PopRiskAdamW:
        """The optimizer of a model; parameters that are frozen are left out."""
        ungated, variance = _patterns(ungated), options.pop("variance", None)
        options = {"lr": DEFAULTS.lr, "weight_decay": DEFAULTS.weight_decay, **parse_options(options)}
        adamw = {"gate": None, "lr": options["lr"] / suggest_lr(1.0) if ungated_lr is None else ungated_lr}
        decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # it needs no trainer
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        plain = {name for name, _ in named if any(re.search(pattern, name) for pattern in ungated)}
        for pattern in ungated:
            if not any(re.search(pattern, name) for name, _ in named):
                raise HyperparameterError(
                    f"ungated={pattern!r} matches no trainable parameter of {type(model).__name__}, whose first are "
                    f"{[name for name, _ in named[:3]]}: give a part of a name"
                )
        groups = []
        for extra, chosen in (({}, lambda n: n not in plain), (adamw, lambda n: n in plain)):
            for decays, decay in ((True, options["weight_decay"]), (False, 0.0)):
                params = [p for n, p in named if chosen(n) and (n in decayed) == decays]
                if params:
                    groups.append({"params": params, "weight_decay": decay, **extra})
        return PopRiskAdamW(groups, variance=variance, **options)


def _patterns(ungated: str | Sequence[str]) -> tuple[str, ...]:
    """One pattern may be given alone; its letters are not patterns."""
    return (ungated,) if isinstance(ungated, str) else tuple(ungated)


class PopRiskCallback(TrainerCallback):
    """Logs gate, noise scale and population rate beside the loss, and stores them with the run.

    They join the Trainer's own log lines (its history, ``trainer_state.json`` in every checkpoint, progress bar, and,
    if the callback stands first as :func:`use_poprisk` puts it, TensorBoard, W&B and other reporters), and are written
    to ``poprisk_meters.json`` in the output directory at every save and at the end.

    Args:
        every: Steps from one reading to the next; by default ten readings per log line, which are averaged.
    """

    def __init__(self, every: int | None = None) -> None:
        interval(every, 1)
        self.every = every
        self.readings = Readings()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Looks whether there is a gate to read; going on from AdamW, keeps the lr this run was given."""
        self.readings = Readings()
        optimizer = find_poprisk(kwargs.get("optimizer"))
        if optimizer is None:
            kind = type(getattr(kwargs.get("optimizer"), "optimizer", kwargs.get("optimizer"))).__name__
            warnings.warn(f"PopRiskCallback found {kind} and not PopRiskAdamW: it logs nothing", PopRiskWarning, 2)
            return
        keep_own_lr(optimizer, kwargs.get("lr_scheduler"))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reads the meters here, where the gradients are whole and not yet used."""
        optimizer = find_poprisk(kwargs.get("optimizer"))
        step = state.global_step + 1
        due = step % interval(self.every, _line_length(args, state)) == 0 or (step == 1 and args.logging_first_step)
        if optimizer is not None and due:
            _unscale(kwargs["optimizer"], optimizer)
            self.readings.take(optimizer)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds the meters to the line about the training loss, and to the history that is saved with the run."""
        if logs is None or "loss" not in logs or not self.readings:
            return
        meters = self.readings.flush()
        logs.update(meters)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(meters)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keeps lines of its own where the Trainer was told to log nothing."""
        if args.logging_strategy == "no" and state.global_step % _line_length(args, state) == 0:
            self._keep_line(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes what the history holds so far."""
        self._store(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes the whole history, also what came after the last line."""
        self._keep_line(state)
        self._store(args, state)

    def _keep_line(self, state: TrainerState) -> None:
        """A line of meters alone, in the history."""
        meters = self.readings.flush() if self.readings else {}
        if meters:
            state.log_history.append({**meters, "epoch": state.epoch, "step": state.global_step})

    def _store(self, args: TrainingArguments, state: TrainerState) -> None:
        lines = [line for line in state.log_history if any(name.startswith(PREFIX) for name in line)]
        if not lines or not state.is_world_process_zero or args.output_dir is None:
            return
        kept = [{k.removeprefix(PREFIX): v for k, v in line.items() if _is_ours(k)} for line in lines]
        write_json(Path(args.output_dir) / METERS_FILE, {"format_version": 1, "readings": kept})


def use_poprisk(
    trainer: Trainer,
    *,
    callback: bool = True,
    every: int | None = None,
    ungated: str | Sequence[str] = (),
    ungated_lr: float | None = None,
    **options: Any,
) -> Trainer:
    """Gives a trainer PopRiskAdamW and its callback, after construction: one line for any trainer.

    Also for those that take no ``optimizer_cls_and_kwargs`` (TRL's DPOTrainer), and where PEFT creates the adapters
    inside the trainer: the optimizer is built when training begins, from what is trainable then.

    Args:
        trainer: A :class:`transformers.Trainer` or one that inherits from it, not yet training.
        callback: Whether to log and store the meters; the callback goes first, so that reporters see them.
        every: See :class:`PopRiskCallback`.
        ungated: See :func:`poprisk_optimizer`, as ``ungated_lr`` and ``options``.
        ungated_lr: See there.
        options: See there.

    Returns:
        The same trainer.

    Raises:
        HyperparameterError: the trainer already has an optimizer, or an option is wrong.

    Example::

        trainer = use_poprisk(DPOTrainer(model, args=args, train_dataset=pairs, peft_config=lora))
        trainer.train()
    """
    if trainer.optimizer is not None:
        raise HyperparameterError(
            f"this {type(trainer).__name__} already has the optimizer {type(trainer.optimizer).__name__}: build it "
            "without optimizers=(…), and call use_poprisk before train()"
        )
    pair = poprisk_optimizer(trainer.args, ungated=ungated, ungated_lr=ungated_lr, **options)
    trainer.optimizer_cls_and_kwargs = pair
    callbacks = trainer.callback_handler.callbacks
    if callback:
        own = next((c for c in callbacks if isinstance(c, PopRiskCallback)), None) or PopRiskCallback(every)
        own.every = own.every if every is None else every
        trainer.callback_handler.callbacks = [own, *(c for c in callbacks if c is not own)]
    return trainer


def _line_length(args: TrainingArguments, state: TrainerState) -> int:
    """Steps from one log line to the next; where there are to be none, a tenth of the run."""
    if args.logging_strategy == "epoch":
        return max(1, round(state.max_steps / max(1, state.num_train_epochs)))
    if args.logging_strategy == "no":
        return max(1, state.max_steps // 10)
    return int(state.logging_steps or 1)


def _warn_of_untouched_lr(args: TrainingArguments) -> None:
    default: Any = next((f.default for f in fields(args) if f.name == "learning_rate"), None)
    if args.learning_rate == default:
        warnings.warn(
            f"learning_rate is {default:g}, the default of {type(args).__name__}, which is meant for AdamW and slow "
            f"here: set learning_rate=poprisk.suggest_lr({default:g}), that is {suggest_lr(default):g}",
            PopRiskWarning,
            stacklevel=3,
        )


def _unscale(wrapper: Any, optimizer: PopRiskAdamW) -> None:
    """Under a gradient scaler: clipping has unscaled the gradients, or, without clipping, it is done here instead."""
    scaler = getattr(wrapper, "scaler", None)
    if scaler is None or not scaler.is_enabled():
        return
    try:
        scaler.unscale_(optimizer)
    except RuntimeError as error:
        if "already been called" not in str(error):
            raise


def _is_ours(key: str) -> bool:
    return key.startswith(PREFIX) or key in ("step", "epoch")
