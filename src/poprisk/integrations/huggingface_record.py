"""Recording a run in Hugging Face's Trainer, for ``poprisk audit``, ``poprisk report`` and other analyses of a run."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from poprisk._core.store import importable, resolve
from poprisk.errors import DataError, MissingExtraError, RunError
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
from poprisk.runs import Problem, Recorder, Run, randomness_of

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingExtraError("transformers", "hf", "the Hugging Face integration") from error

_LABELS = ("labels", "label")


class Logits(nn.Module):
    """A Hugging Face model as a function from tensors to logits, without labels and loss.

    Args:
        model: Whose forward takes the columns by name and returns something with ``logits``.
        columns: The names of the tensors, in order.
    """

    def __init__(self, model: nn.Module, columns: Sequence[str] = ("input_ids",)) -> None:
        super().__init__()
        self.model, self.columns = model, tuple(columns)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The logits of a batch."""
        return self.model(**dict(zip(self.columns, inputs, strict=True))).logits


def make_logits(make_model: str | Callable[..., nn.Module], columns: Sequence[str], **arguments: Any) -> Logits:
    """A model by its factory, or the import path of that, as :class:`Logits`."""
    factory = resolve(make_model) if isinstance(make_model, str) else make_model
    return Logits(factory(**arguments), columns)


def classification_problem(
    make_model: Callable[..., nn.Module],
    dataset: Any,
    *,
    arguments: Mapping[str, Any] | None = None,
    padding: int = 0,
    test: Any = None,
    **options: Any,
) -> Problem:
    """The problem that a Trainer solves for a model with one label for each example, under its own cross entropy.

    Sequences are padded on the right to the longest one, their attention masks with 0; the Trainer pads each batch by
    itself, which a model with attention masks does not see beyond rounding.

    Args:
        make_model: Builds the model, e.g. a ``…ForSequenceClassification`` from a configuration: a function of a module
            of yours if the run is to be opened by itself later.
        dataset: The training set as the Trainer gets it, in the same order: examples that are mappings with a label
            (``labels`` or ``label``) and the model's inputs (``input_ids``, ``attention_mask``, ``pixel_values``, …).
        arguments: Keyword arguments of ``make_model``.
        padding: The token of padding, the tokenizer's ``pad_token_id``.
        test: A data set to test on, of the same form.
        options: Of :class:`~poprisk.runs.Problem`: ``name``, ``show``, ``seed``.

    Raises:
        DataError: examples without a label or with different columns, sequences of different lengths without an
            attention mask, or labels that are no class.

    Example::

        problem = classification_problem(classifier, data, padding=tokenizer.pad_token_id)
        Trainer(model, args, train_dataset=data, callbacks=[RecordRun("runs/first", problem)]).train()
    """
    columns, inputs, labels = _tensors_of(dataset, padding)
    tested = None if test is None else _tensors_of(test, padding)
    if tested is not None and tested[0] != columns:
        raise DataError(
            f"the training examples have {list(columns)}, those to test on {list(tested[0])}: give the same"
        )
    path = importable(make_model, arguments).path
    made = partial(make_logits, make_model=path or make_model, columns=list(columns))
    rest = None if tested is None else (tested[1] if len(columns) > 1 else tested[1][0], tested[2])
    taken = inputs if len(columns) > 1 else inputs[0]
    return Problem(made, "cross_entropy", taken, labels, arguments=arguments, test=rest, **options)


class RecordRun(TrainerCallback):
    """Records what a Trainer does as a :class:`~poprisk.runs.Run`; the training is what it is without.

    Which examples are in a batch is known from the Trainer's own loader, whose draws are noted::

        record = RecordRun("runs/first", classification_problem(classifier, data))
        Trainer(model, args, train_dataset=data, callbacks=[record]).train()
        table = audit(record.run)

    Supported: one process and device, float32 or float64, an optimizer that :class:`~poprisk.runs.Recorder` knows (the
    Trainer's AdamW, PopRiskAdamW), clipping by norm, schedules, any sampler and collate function that leaves the
    examples in order. Refused before the first step: several processes or devices, ``fp16`` and ``bf16``, gradient
    accumulation (the Trainer may weigh micro-batches by their labels, which cannot be seen here), label smoothing, and
    a training that goes on from a checkpoint.

    A problem is needed for the audit and for every analysis with the network. :func:`classification_problem` makes one
    for models with one label for each example. Losses that are means over the tokens of a batch (language models) or
    compare with another model (TRL's DPO) are no mean over examples: record them without a problem, and there are
    batches, weights and the losses of the steps, which ``poprisk report`` shows. The exact tier (influence, operators)
    takes models that torch can differentiate example by example: ``attn_implementation="eager"`` and no dropout. With
    any other attention the audit has everything but the exact columns, and says so.

    Args:
        path: A directory for the run, new or empty; None keeps it in memory.
        problem: What is trained, or None.
        every: Steps between checkpoints; 1 records every step, about three weight vectors each.
        augmentation: ``"unseeded"`` if the dataset changes its inputs at random: recorded, but not for exact analyses.
        verify_steps: How many first steps to compare with the problem; without effect where the model has dropout.

    Raises:
        RunError: when training begins, with what cannot be recorded and what to do.
    """

    def __init__(
        self,
        path: str | Path | None,
        problem: Problem | None = None,
        *,
        every: int = 1,
        augmentation: Literal["unseeded"] | None = None,
        verify_steps: int = 2,
    ) -> None:
        self.path, self.problem = path, problem
        self._options = {"every": every, "augmentation": augmentation, "verify_steps": verify_steps}
        self._blocks: StepBlocks | None = None
        self._recorder: Recorder | None = None
        self._drawn: DrawnBatches | None = None
        self._loader: Any = None
        self._forward: Any = None
        self._batch: Any = None
        self._loss: Tensor | None = None

    @property
    def run(self) -> Run:
        """The run as far as it has been written.

        Raises:
            RunError: training has not begun.
        """
        if self._recorder is None:
            raise RunError("nothing has been recorded yet: train a Trainer with this callback first")
        return self._recorder.run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Looks at all that could stand in the way, and begins."""
        self.close()
        _check_arguments(args, state)
        model, loader = kwargs["model"], kwargs["train_dataloader"]
        optimizer = unwrapped(kwargs["optimizer"])
        network = self._network(model)
        self._check_randomness(model, network)
        about = {"trainer": "transformers", "clip_norm": args.max_grad_norm or None}
        options = {**self._options, "steps": state.max_steps or None, "training": about}

        def make() -> Recorder:
            return make_recorder(self.path, network, optimizer, self.problem, len(loader.dataset), **options)

        self._drawn, self._loader = watch_loader(loader), loader
        self._blocks = StepBlocks(make, optimizer, self._batches)
        self._recorder = self._blocks.recorder
        self._forward = model.register_forward_hook(self._look, with_kwargs=True)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Writes the steps so far beside every checkpoint of the Trainer's."""
        if self._recorder is not None and self._blocks is not None:
            self._recorder.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Writes what is left."""
        self.close()

    def close(self) -> None:
        """Write what is left; the Trainer calls for it at the end, but not after an exception."""
        blocks, self._blocks, self._drawn = self._blocks, None, None
        if blocks is not None:
            self._forward.remove()
            unwatch_loader(self._loader)
            blocks.end()

    def _network(self, model: nn.Module) -> nn.Module:
        """What the problem's model is: the trained one, or its logits."""
        if self.problem is None:
            return model
        rebuilt = self.problem.module()
        return find_network(Logits(model, rebuilt.columns) if isinstance(rebuilt, Logits) else model, rebuilt)

    def _check_randomness(self, model: nn.Module, network: nn.Module) -> None:
        """Dropout that a configuration asks for and no module shows would be taken for a fixed function."""
        config = vars(getattr(model, "config", object)) if self._options["augmentation"] is None else {}
        hidden = [name for name, p in config.items() if "dropout" in name and isinstance(p, float) and p > 0]
        if hidden and randomness_of(network.train()) is None:
            raise RunError(
                f"{hidden[0]}={config[hidden[0]]:g} of the model's configuration draws at random where no module shows "
                'it: set it to 0, or pass augmentation="unseeded", which allows all analyses that are not exact'
            )

    def _look(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Keeps the batch and its loss; forwards without labels are not the training's."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if model.training and loss is not None:
            self._batch, self._loss = dict(kwargs), loss.detach()

    def _batches(self) -> tuple[Sequence[Tensor], None, Tensor | None]:
        assert self._drawn is not None
        indices, loss = self._drawn.take(), self._loss
        check_batch(self._batch, indices, self.problem)
        self._batch = self._loss = None
        return [indices], None, loss


def _check_arguments(args: TrainingArguments, state: TrainerState) -> None:
    if args.world_size > 1 or args.n_gpu > 1 or args.deepspeed or args.fsdp:
        raise RunError(
            f"{max(args.world_size, args.n_gpu)} processes or devices share each step, one can be recorded: start one "
            "process, with CUDA_VISIBLE_DEVICES set to one device"
        )
    if args.fp16 or args.bf16:
        which = "fp16" if args.fp16 else "bf16"
        raise RunError(f"{which}=True computes other gradients than the problem's in full precision: train without it")
    if args.gradient_accumulation_steps > 1:
        raise RunError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: the Trainer may weigh micro-batches by "
            "their labels, which cannot be seen here; use a larger per_device_train_batch_size and 1"
        )
    if args.label_smoothing_factor:
        raise RunError("label smoothing is another loss than the model's own: set label_smoothing_factor=0")
    if state.global_step:
        raise RunError(
            f"the training goes on from step {state.global_step} of a checkpoint, whose first steps were not recorded: "
            "record a training from its beginning"
        )


def _tensors_of(dataset: Any, padding: int) -> tuple[tuple[str, ...], tuple[Tensor, ...], Tensor]:
    """Columns, their tensors, labels."""
    examples = [dataset[i] for i in range(len(dataset))]
    first = examples[0] if examples else {}
    label = next((name for name in _LABELS if name in first), None) if isinstance(first, Mapping) else None
    if label is None:
        got = list(first) if isinstance(first, Mapping) else type(first).__name__
        raise DataError(f"examples must be mappings with {' or '.join(_LABELS)}, got {got}")
    columns = tuple(name for name in first if name != label)
    odd = next((i for i, example in enumerate(examples) if {*columns, label} != set(example)), None)
    if odd is not None:
        raise DataError(f"example {odd} has {sorted(examples[odd])}, the first {sorted(first)}: give all the same")
    inputs = tuple(_padded([torch.as_tensor(e[name]) for e in examples], name, columns, padding) for name in columns)
    labels = torch.as_tensor([int(e[label]) for e in examples])
    if bool((labels < 0).any()):
        raise DataError(f"labels must be classes from 0, got {int(labels.min())}")
    return columns, inputs, labels


def _padded(rows: list[Tensor], name: str, columns: Sequence[str], padding: int) -> Tensor:
    longest = max(len(row) if row.dim() else 0 for row in rows)
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack(rows)
    if "attention_mask" not in columns or any(row.dim() != 1 for row in rows):
        raise DataError(
            f"{name!r} has rows of different shapes, which needs an attention_mask beside sequences: pad them"
        )
    value = padding if name == "input_ids" else 0
    return torch.stack([nn.functional.pad(row, (0, longest - len(row)), value=value) for row in rows])
