"""PopRiskAdamW in the Hugging Face Trainer, and in trainers that inherit from it, such as TRL's."""

import re
import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from poprisk.errors import HyperparameterError, MissingExtraError, PopRiskWarning
from poprisk.integrations._readings import (
    METERS_FILE,  # noqa: F401
    PREFIX,
    Readings,
    add_to_line,
    find_poprisk,
    interval,
    write_readings,
)
from poprisk.integrations._schedules import keep_own_lr
from poprisk.integrations.huggingface_keep import KeepBestCallback, keep_best  # noqa: F401
from poprisk.optim import DEFAULTS, Gate, PopRiskAdamW, parse_options, read_options

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingExtraError("transformers", "hf", "the Hugging Face integration") from error


def poprisk_optimizer(
    args: TrainingArguments | None = None,
    *,
    ungated: str | Sequence[str] = (),
    ungated_lr: float | None = None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    r"""The argument ``optimizer_cls_and_kwargs`` of :class:`transformers.Trainer`.

    The Trainer does not add anything to this pair, so it must contain what the Trainer's arguments say: lr, betas and
    eps come from ``args``, then from the text ``args.optim_args`` (``"gate=snr,strength=30,betas=(0.9,0.95)"``), then
    from ``options``; later ones override earlier ones. ``args`` is read now, so change it before. Weight decay is the
    Trainer's unless it is given here; which parameters are not decayed (biases, norms) is up to the Trainer.

    Args:
        args: The Trainer's arguments. Their ``learning_rate`` is AdamW's. Without ``args``, the library's defaults are
            used.
        ungated: Parameters whose name matches one of these patterns (``re.search``) are trained as by AdamW. In this
            case the pair contains a factory.
        ungated_lr: Learning rate of these parameters; by default that of the others.
        options: Options of :class:`poprisk.PopRiskAdamW`, with ``gate=Gate(...)`` or the fields of the gate one by one
            under their names in a parameter group; values may be text.

    Raises:
        HyperparameterError: An option is unknown, of the wrong type, or out of range.

    Example:
        >>> poprisk_optimizer(lr=1e-2, strength="30")
        (<class 'poprisk.optim._adamw.PopRiskAdamW'>, {'lr': 0.01, 'gate': Gate('snr', strength=30.0)})
    """
    source = {name: options.pop(name) for name in ("variance",) if name in options}  # an object, not text
    text = read_options(getattr(args, "optim_args", None))
    if isinstance(options.get("gate"), Gate):  # it replaces what the text says about the gate
        text = {name: value for name, value in text.items() if name not in Gate().options()}
    given = text | read_options(options)
    if args is not None:
        given = {
            "lr": args.learning_rate,
            "betas": (args.adam_beta1, args.adam_beta2),
            "eps": args.adam_epsilon,
            **given,
        }
    given = parse_options(given) | source  # checked together, since they may contradict each other
    if not ungated and ungated_lr is not None:
        raise HyperparameterError("ungated_lr needs the names of the ungated parameters: pass ungated=(…)")
    if not ungated and "weight_decay" not in given:
        return PopRiskAdamW, given
    # The Trainer's own groups always use its weight decay; the factory's groups use the one given here.
    if args is not None:
        given.setdefault("weight_decay", args.weight_decay)
    return PopRiskFactory, {**given, "ungated": _patterns(ungated), "ungated_lr": ungated_lr}


class PopRiskFactory:
    """A factory for the optimizer: ``PopRiskFactory()(model, **options)``.

    Its parameter groups are decayed or not, as the Trainer would split them, and gated or not.

    Example:
        >>> model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "head": nn.Linear(2, 4)})
        >>> optimizer = PopRiskFactory()(model, ungated=("embed",), ungated_lr=5e-4)
        >>> [(g["gate"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
        [('snr', 0.001, 0.01), ('snr', 0.001, 0.0), (None, 0.0005, 0.01)]
    """

    def __call__(
        self, model: nn.Module, *, ungated: str | Sequence[str] = (), ungated_lr: float | None = None, **options: Any
    ) -> PopRiskAdamW:
        """Make the optimizer of a model; frozen parameters are left out."""
        ungated, variance = _patterns(ungated), options.pop("variance", None)
        options = {"lr": DEFAULTS.lr, "weight_decay": DEFAULTS.weight_decay, **parse_options(options)}
        adamw = {"gate": None, "lr": options["lr"] if ungated_lr is None else ungated_lr}
        decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]  # it needs no trainer
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        plain = {name for name, _ in named if any(re.search(pattern, name) for pattern in ungated)}
        for pattern in ungated:
            if not any(re.search(pattern, name) for name, _ in named):
                raise HyperparameterError(
                    f"ungated={pattern!r} matches no trainable parameter of {type(model).__name__} (the first ones are "
                    f"{[name for name, _ in named[:3]]}): use a part of a name"
                )
        groups = []
        for extra, chosen in (({}, lambda n: n not in plain), (adamw, lambda n: n in plain)):
            for decays, decay in ((True, options["weight_decay"]), (False, 0.0)):
                params = [p for n, p in named if chosen(n) and (n in decayed) == decays]
                if params:
                    groups.append({"params": params, "weight_decay": decay, **extra})
        return PopRiskAdamW(groups, variance=variance, **options)


def _patterns(ungated: str | Sequence[str]) -> tuple[str, ...]:
    """A tuple of patterns; a single string is one pattern."""
    return (ungated,) if isinstance(ungated, str) else tuple(ungated)


class PopRiskCallback(TrainerCallback):
    """Log gate, noise scale and population rate with the loss, and store them with the run.

    They are added to the Trainer's log lines: its history, ``trainer_state.json`` in every checkpoint, the progress
    bar and, if the callback comes first, as with :func:`use_poprisk`, TensorBoard, W&B and other reporters. They are
    also written to ``poprisk_meters.json`` in the output directory at every save and at the end.

    Args:
        every: Steps between two readings; by default ten readings per log line, which are averaged.
    """

    def __init__(self, every: int | None = None) -> None:
        interval(every, 1)
        self.every = every
        self.readings = Readings()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Find the gate; when continuing from AdamW, keep the learning rate of this run."""
        self.readings = Readings()
        optimizer = find_poprisk(kwargs.get("optimizer"))
        if optimizer is None:
            kind = type(getattr(kwargs.get("optimizer"), "optimizer", kwargs.get("optimizer"))).__name__
            warnings.warn(f"PopRiskCallback logs nothing: it needs PopRiskAdamW, found {kind}", PopRiskWarning, 2)
            return
        keep_own_lr(optimizer, kwargs.get("lr_scheduler"))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the diagnostics when the gradients are complete and not yet used."""
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
        """Add the values to the line with the training loss, and to the history that is saved with the run."""
        if logs is not None and "loss" in logs and self.readings:
            add_to_line(self.readings.flush(), logs, state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep separate lines if the Trainer logs nothing."""
        if args.logging_strategy == "no" and state.global_step % _line_length(args, state) == 0:
            self._keep_line(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the readings so far."""
        self._store(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write all readings, those after the last log line included."""
        self._keep_line(state)
        self._store(args, state)

    def _keep_line(self, state: TrainerState) -> None:
        """Add a line with these values only to the history."""
        meters = self.readings.flush() if self.readings else {}
        if meters:
            state.log_history.append({**meters, "epoch": state.epoch, "step": state.global_step})

    def _store(self, args: TrainingArguments, state: TrainerState) -> None:
        lines = [line for line in state.log_history if any(name.startswith(PREFIX) for name in line)]
        if not lines or not state.is_world_process_zero or args.output_dir is None:
            return
        kept = [{k.removeprefix(PREFIX): v for k, v in line.items() if _is_ours(k)} for line in lines]
        write_readings(args.output_dir, kept)


def use_poprisk(
    trainer: Trainer,
    *,
    callback: bool = True,
    every: int | None = None,
    ungated: str | Sequence[str] = (),
    ungated_lr: float | None = None,
    **options: Any,
) -> Trainer:
    """Make an existing trainer use PopRiskAdamW and its callback.

    Also works for trainers without ``optimizer_cls_and_kwargs`` (TRL's DPOTrainer), and if PEFT creates the adapters
    inside the trainer: the optimizer is built when training begins, from the parameters that are trainable then.

    Args:
        trainer: A :class:`transformers.Trainer`, or one that inherits from it, before training.
        callback: Whether to log and store the gate diagnostics; the callback comes first, so that reporters see them.
        every: See :class:`PopRiskCallback`.
        ungated: See :func:`poprisk_optimizer`.
        ungated_lr: See :func:`poprisk_optimizer`.
        options: See :func:`poprisk_optimizer`.

    Returns:
        The same trainer.

    Raises:
        HyperparameterError: The trainer already has an optimizer, or an option is invalid.

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
    """Steps between two log lines; if the Trainer logs nothing, a tenth of the run."""
    if args.logging_strategy == "epoch":
        return max(1, round(state.max_steps / max(1, state.num_train_epochs)))
    if args.logging_strategy == "no":
        return max(1, state.max_steps // 10)
    return int(state.logging_steps or 1)


def _unscale(wrapper: Any, optimizer: PopRiskAdamW) -> None:
    """With a gradient scaler, unscale the gradients unless clipping has already done so."""
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
