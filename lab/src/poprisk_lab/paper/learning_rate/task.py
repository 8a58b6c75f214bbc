"""The tasks of the learning-rate guide: a small vision transformer on digits, a small Qwen2 on text."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from poprisk.runs import digits_split, replace_labels
from poprisk.runs._digits import NUM_CLASSES
from poprisk_lab.data.char_lm import CharText, all_windows, random_windows

SIDE = 8


@dataclass(frozen=True)
class DigitsConfig:
    """A small vision transformer on 8 × 8 digits."""

    train_size: int = 1000
    patch: int = 4
    width: int = 64
    heads: int = 4
    layers: int = 2
    batch_size: int = 100
    steps: int = 500
    evaluations: int = 20


@dataclass(frozen=True)
class LanguageModelConfig:
    """A small Qwen2 on characters; every window of the text is drawn anew."""

    width: int = 64
    heads: int = 4
    key_value_heads: int = 2
    layers: int = 2
    context: int = 64
    batch_size: int = 16
    steps: int = 500


@dataclass(frozen=True)
class Task:
    """A task: examples, a model with the initial weights of a seed, and its score."""

    metric: str
    """``accuracy`` (higher is better) or ``loss`` (lower is better)."""
    untrained: float
    """The metric of an untrained model: one class in ten right, or all characters equally likely."""
    columns: dict[str, Tensor]
    """Training examples, one per row."""
    model: Callable[[], nn.Module]
    evaluate: Callable[[nn.Module], float]
    batch_size: int
    steps: int
    evaluate_every: int
    wrong: Tensor | None = None
    """Mask of the wrong training labels."""


def digits_task(config: DigitsConfig, noise: float, seed: int) -> Task:
    """The digits with this share of the training labels wrong."""
    split = digits_split(seed, config.train_size)
    generator = torch.Generator().manual_seed(20_000 + seed)
    replaced = replace_labels(split.train_labels, noise, NUM_CLASSES, generator)
    test = _pixels(split.test_inputs)

    def model() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        shape = ViTConfig(
            image_size=SIDE,
            patch_size=config.patch,
            num_channels=1,
            hidden_size=config.width,
            intermediate_size=4 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
        )
        shape.num_labels = NUM_CLASSES
        return ViTForImageClassification(shape)

    def accuracy(model: nn.Module) -> float:
        right = model(pixel_values=test).logits.argmax(-1) == split.test_labels
        return right.double().mean().item()

    return Task(
        metric="accuracy",
        untrained=1 / NUM_CLASSES,
        columns={"pixel_values": _pixels(split.train_inputs), "labels": replaced.labels},
        model=model,
        evaluate=accuracy,
        batch_size=config.batch_size,
        steps=config.steps,
        evaluate_every=max(1, config.steps // config.evaluations),
        wrong=replaced.wrong,
    )


def _pixels(inputs: Tensor) -> Tensor:
    """Images from -1 to 1."""
    return 2 * inputs.reshape(-1, 1, SIDE, SIDE) - 1


def language_model_task(config: LanguageModelConfig, text: CharText, seed: int) -> Task:
    """The text as windows at random positions, each used once."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    windows = random_windows(text.train, config.steps * config.batch_size, config.context, generator)
    held_out = all_windows(text.held_out, config.context)

    def model() -> nn.Module:
        from transformers import Qwen2Config, Qwen2ForCausalLM

        shape = Qwen2Config(
            vocab_size=len(text.vocabulary),
            hidden_size=config.width,
            intermediate_size=3 * config.width,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.key_value_heads,
            max_position_embeddings=config.context + 1,
            tie_word_embeddings=True,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        return Qwen2ForCausalLM(shape)

    def loss(model: nn.Module) -> float:
        parts = [(model(input_ids=x, labels=x).loss.item(), len(x)) for x in held_out.split(128)]
        return math.fsum(value * count for value, count in parts) / len(held_out)

    return Task(
        metric="loss",
        untrained=math.log(len(text.vocabulary)),
        columns={"input_ids": windows, "labels": windows},
        model=model,
        evaluate=loss,
        batch_size=config.batch_size,
        steps=config.steps,
        evaluate_every=config.steps,  # the whole held-out text takes as long as many steps
    )


def memorized_share(model: nn.Module, task: Task) -> float | None:
    """Share of the wrong training labels that the model reproduces; ``None`` if none is wrong."""
    if task.wrong is None or not task.wrong.any():
        return None
    with evaluating(model):
        reproduced = model(pixel_values=task.columns["pixel_values"]).logits.argmax(-1) == task.columns["labels"]
    return reproduced[task.wrong].double().mean().item()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[nn.Module]:
    """Evaluate the model without dropout and gradients, then restore its mode."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        model.train(was_training)
