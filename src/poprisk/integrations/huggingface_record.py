"""Record a training of the Hugging Face Trainer as a run, for ``poprisk audit``, ``poprisk report`` and more."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from poprisk._core.autodiff import Inputs
from poprisk._core.store import importable, resolve
from poprisk.errors import DataError, MissingExtraError, RunError
from poprisk.integrations.recording import TrainerRecording, check_batch, check_from_start, find_network
from poprisk.runs import Problem, randomness_of

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise MissingExtraError("transformers", "hf", "the Hugging Face integration") from error

_LABELS = ("labels", "label")


class Logits(nn.Module):
    """A Hugging Face model as a function from tensors to logits, without labels and loss.

    Args:
        model: A model whose forward takes the columns by name and returns an object with ``logits``.
        columns: Names of the tensors, in order.
    """

    def __init__(self, model: nn.Module, columns: Sequence[str] = ("input_ids",)) -> None:
        super().__init__()
        self.model, self.columns = model, tuple(columns)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The logits of a batch."""
        return self.model(**dict(zip(self.columns, inputs, strict=True))).logits


def make_logits(make_model: str | Callable[..., nn.Module], columns: Sequence[str], **arguments: Any) -> Logits:
    """Build a model from its factory, or the factory's import path, as :class:`Logits`."""
    factory = resolve(make_model) if isinstance(make_model, str) else make_model
    return Logits(factory(**arguments), columns)


def classification_problem(
    make_model: nn.Module | Callable[..., nn.Module],
    dataset: Any,
    *,
    arguments: Mapping[str, Any] | None = None,
    padding: int = 0,
    test: Any = None,
    **options: Any,
) -> Problem:
    """The problem that a Trainer solves for a model with one label per example and its cross-entropy loss.

    Sequences are padded on the right to the longest one, their attention masks with 0. The Trainer pads each batch
    separately; with attention masks the difference is only rounding.

    Args:
        make_model: The model, which is copied, before it is trained; or a function that builds it, e.g. a
            ``…ForSequenceClassification`` from a configuration.
        dataset: The Trainer's training set, in the same order: examples are mappings with a label (``labels`` or
            ``label``) and the model's inputs (``input_ids``, ``attention_mask``, ``pixel_values``, …). Texts among
            them are not passed to the model, but shown in reports.
        arguments: Keyword arguments for ``make_model``.
        padding: The padding token, the tokenizer's ``pad_token_id``.
        test: A test set of the same form.
        options: Options of :class:`~poprisk.runs.Problem`: ``name``, ``show``, ``seed``. In reports an example is what
            ``show(i)`` returns, e.g. ``show=lambda i: texts[i]``.

    Raises:
        DataError: Examples have no label or different columns, sequences differ in length without an attention mask,
            or labels are not classes.

    Example::

        problem = classification_problem(model, data, padding=tokenizer.pad_token_id, show=lambda i: texts[i])
        Trainer(model, args, train_dataset=data, callbacks=[RecordRun("runs/first", problem)]).train()
    """
    classes = getattr(make_model, "num_labels", None)
    columns, inputs, labels = _tensors_of(dataset, padding, classes)
    if (text := _text_column(dataset)) is not None:
        options.setdefault("show", lambda i: dataset[i][text])
    tested = None if test is None else _tensors_of(test, padding, classes)
    if tested is not None and tested[0] != columns:
        raise DataError(
            f"the training examples have the columns {list(columns)}, the test examples {list(tested[0])}: use the same"
        )
    made: Any
    if isinstance(make_model, nn.Module):
        made = Logits(make_model, columns)
    else:
        made = partial(make_logits, make_model=importable(make_model, arguments).path or make_model, columns=[*columns])
    return Problem(made, "cross_entropy", inputs, labels, arguments=arguments, test=tested and tested[1:], **options)


class RecordRun(TrainerRecording, TrainerCallback):
    """Record a training of a Trainer as a :class:`~poprisk.runs.Run`, without changing the training.

    The examples of each batch are read from the Trainer's own loader::

        record = RecordRun("runs/first", classification_problem(model, data))
        Trainer(model, args, train_dataset=data, callbacks=[record]).train()
        table = audit(record.run)

    Supported: one process and device, float32 or float64, an optimizer that :class:`~poprisk.runs.Recorder` knows (the
    Trainer's AdamW, PopRiskAdamW), clipping by norm, schedules, any sampler, and collate functions that keep the order
    of the examples. Not supported, with an error before the first step: several processes or devices, ``fp16`` and
    ``bf16``, gradient accumulation (the Trainer may weight micro-batches by their labels, which the callback cannot
    see), label smoothing, and a training that continues from a checkpoint.

    The audit and every analysis with the network need a problem. :func:`classification_problem` makes one for models
    with one label per example. Losses that average over the tokens of a batch (language models) or compare with
    another model (TRL's DPO) are not means over examples: record these without a problem, and ``poprisk report`` shows
    their losses. Exact analyses (influence) and operators need a model that :func:`torch.func.vmap` can run, e.g. Qwen2
    with ``attn_implementation="eager"``, exact ones also no dropout. Otherwise the audit has all but the exact columns.

    Args:
        path: Directory for the run, new or empty; None keeps it in memory.
        problem: What is trained, or None.
        every: Steps between checkpoints; 1 records every step, about three weight vectors each. Default: 1, or more
            if that would take more than 1 GiB.
        augmentation: ``"unseeded"`` if the dataset changes its inputs at random; the run cannot be analyzed exactly.
        verify_steps: Number of initial steps to compare with the problem, a sample of later ones follows; 0 turns both
            off. No effect with dropout.
        analyze: Whether to audit the labels and measure the learning curves when training ends, at some 20 moments of
            the run, and keep both with it, with pictures or texts of the examples: ``poprisk report``, ``audit`` and
            ``compare`` then open the run by themselves. ``poprisk.analyze(record.run)`` adds all other parts. No effect
            without problem or path.

    Raises:
        RunError: When training begins: what cannot be recorded, and what to do.
    """

    _forward: Any = None
    _batch: Any = None
    _loss: Tensor | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that the training can be recorded, and begin."""
        self.close()
        _check_arguments(args)
        check_from_start(state.global_step)
        model = kwargs["model"]
        network = self._network(model)
        self._check_randomness(model, network)
        about = {"trainer": "transformers", "clip_norm": args.max_grad_norm or None}
        self._begin(kwargs["train_dataloader"], network, kwargs["optimizer"], state.max_steps or None, about)
        self._forward = model.register_forward_hook(self._look, with_kwargs=True)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the steps so far at every checkpoint of the Trainer."""
        if self._recorder is not None and self._hooks:
            self._recorder.flush()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the rest."""
        self.close()

    def close(self) -> None:
        """Write the rest; the Trainer does this at the end, but not after an exception."""
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
        self._end()

    def _network(self, model: nn.Module) -> nn.Module:
        """The problem's model: the trained one, or its logits."""
        if self.problem is None:
            return model
        rebuilt = self.problem.module()
        return find_network(Logits(model, rebuilt.columns) if isinstance(rebuilt, Logits) else model, rebuilt)

    def _check_randomness(self, model: nn.Module, network: nn.Module) -> None:
        """Check for dropout that the configuration asks for but no module shows."""
        config = vars(getattr(model, "config", object)) if self._options["augmentation"] is None else {}
        hidden = [name for name, p in config.items() if "dropout" in name and isinstance(p, float) and p > 0]
        if hidden and randomness_of(network.train()) is None:
            raise RunError(
                f"{hidden[0]}={config[hidden[0]]:g} in the model's configuration applies dropout that no module shows: "
                'set it to 0, or pass augmentation="unseeded", which allows all analyses that are not exact'
            )

    def _look(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], outputs: Any) -> None:
        """Keep the batch and its loss; forward passes without labels are not part of the training."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
        if model.training and loss is not None:
            self._batch, self._loss = dict(kwargs), loss.detach()

    def _batches(self) -> tuple[Sequence[Tensor], None, Tensor | None]:
        assert self._drawn is not None
        indices, loss = self._drawn.take(), self._loss
        check_batch(self._batch, indices, self.problem)
        self._batch = self._loss = None
        return [indices], None, loss


def _check_arguments(args: TrainingArguments) -> None:
    if args.world_size > 1 or args.n_gpu > 1 or args.deepspeed or args.fsdp:
        raise RunError(
            f"{max(args.world_size, args.n_gpu)} processes or devices share each step, but only one can be recorded: "
            "start one process, with CUDA_VISIBLE_DEVICES set to one device"
        )
    if args.fp16 or args.bf16:
        which = "fp16" if args.fp16 else "bf16"
        raise RunError(f"{which}=True gives other gradients than the problem in full precision: train without it")
    if args.gradient_accumulation_steps > 1:
        raise RunError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: the Trainer may weight micro-batches by "
            "their labels, which cannot be recorded; use 1 and a larger per_device_train_batch_size"
        )
    if args.label_smoothing_factor:
        raise RunError("label smoothing changes the loss of the model: set label_smoothing_factor=0")


def _text_column(dataset: Any) -> str | None:
    """The first column of texts, which no model takes."""
    first = dataset[0] if len(dataset) else {}
    return next((name for name, value in first.items() if isinstance(value, str)), None)


def _tensors_of(dataset: Any, padding: int, classes: int | None) -> tuple[tuple[str, ...], Inputs, Tensor]:
    """Names of the columns, their tensors, and the labels, where they are those of a classification."""
    if isinstance(dataset, Mapping) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(f"expected the dataset that the Trainer trains on, got {type(dataset).__name__}: pass that")
    if padding is not None and not hasattr(padding, "__index__"):
        raise DataError(f"padding must be a token's number, got {type(padding).__name__}: use tokenizer.pad_token_id")
    examples = [dataset[i] for i in range(len(dataset))]
    first = examples[0] if examples else {}
    label = next((name for name in _LABELS if name in first), None) if isinstance(first, Mapping) else None
    if label is None:
        got = list(first) if isinstance(first, Mapping) else type(first).__name__
        raise DataError(f"examples must be mappings with {' or '.join(_LABELS)}, got {got}")
    columns = tuple(name for name, value in first.items() if name != label and not isinstance(value, str))
    if not columns:
        raise DataError(f"examples must have inputs such as input_ids, got {list(first)}: tokenize the dataset first")
    odd = next((i for i, example in enumerate(examples) if first.keys() != set(example)), None)
    if odd is not None:
        raise DataError(
            f"example {odd} has the columns {sorted(examples[odd])}, the first {sorted(first)}: use the same"
        )
    inputs = tuple(_padded([torch.as_tensor(e[name]) for e in examples], name, columns, padding) for name in columns)
    labels, end = [e[label] for e in examples], classes or 2**63
    wrong = [x for x in labels if not hasattr(x, "__index__") or getattr(x, "ndim", 0) or not 0 <= x < end]
    if wrong:
        last = f" to {classes - 1}, as the model has num_labels={classes}" if classes else ""
        raise DataError(f"labels must be classes from 0{last}, got {wrong[0]!r}: give each class such a number")
    return columns, inputs if len(columns) > 1 else inputs[0], torch.as_tensor([int(x) for x in labels])


def _padded(rows: list[Tensor], name: str, columns: Sequence[str], padding: int) -> Tensor:
    longest = max(len(row) if row.dim() else 0 for row in rows)
    if all(row.shape == rows[0].shape for row in rows):
        return torch.stack(rows)
    if "attention_mask" not in columns or any(row.dim() != 1 for row in rows):
        raise DataError(f"{name!r} has rows of different shapes, but there is no attention_mask: pad them, or add one")
    value = padding if name == "input_ids" else 0
    return torch.stack([nn.functional.pad(row, (0, longest - len(row)), value=value) for row in rows])
