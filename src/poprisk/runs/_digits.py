"""Handwritten digits, 8 x 8 pixels (the 1797 test images of the UCI collection), and labels replaced at random."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from poprisk.errors import DataError, MissingExtraError

NUM_EXAMPLES, NUM_PIXELS, NUM_CLASSES = 1797, 64, 10
_FEWEST_TRAIN, _FEWEST_TEST = 10, 100
TRAIN_SIZES = (_FEWEST_TRAIN, NUM_EXAMPLES - _FEWEST_TEST)


@dataclass(frozen=True)
class Split:
    """Training and test examples; inputs in [0, 1]."""

    train_inputs: Float[Tensor, "train pixels"]
    train_labels: Int[Tensor, "train"]
    test_inputs: Float[Tensor, "test pixels"]
    test_labels: Int[Tensor, "test"]


def digits_split(seed: int, train_size: int) -> Split:
    """Shuffle the digits; the first ``train_size`` are the training examples, all others the test examples.

    Args:
        seed: Seed for the order.
        train_size: Number of training examples.

    Raises:
        DataError: there would be fewer than 10 training or 100 test examples.
        MissingExtraError: scikit-learn is not installed.
    """
    low, high = TRAIN_SIZES
    if not low <= train_size <= high:
        raise DataError(f"train_size must lie between {low} and {high} of the {NUM_EXAMPLES} digits, got {train_size}")
    inputs, labels = _load()
    order = torch.randperm(NUM_EXAMPLES, generator=torch.Generator().manual_seed(seed))
    train, test = order[:train_size], order[train_size:]
    return Split(inputs[train], labels[train], inputs[test], labels[test])


def _load() -> tuple[Tensor, Tensor]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtraError("scikit-learn", "data", "the digits data") from None
    pixels, labels = load_digits(return_X_y=True)
    return torch.as_tensor(pixels, dtype=torch.float32) / 16, torch.as_tensor(labels, dtype=torch.long)


@dataclass(frozen=True)
class ReplacedLabels:
    """Labels after replacement, and a mask of the wrong ones."""

    labels: Int[Tensor, "examples"]
    wrong: Bool[Tensor, "examples"]

    @property
    def share(self) -> float:
        """The share of wrong labels."""
        return self.wrong.double().mean().item()


def replace_labels(
    labels: Int[Tensor, "examples"], share: float, num_classes: int, generator: Generator
) -> ReplacedLabels:
    """Replace a share of the labels by another class, drawn uniformly from the classes other than the true one.

    Every replaced label is therefore wrong, and the share of wrong labels is ``share``, rounded to a whole number of
    examples. (The other convention, a draw from all classes, leaves one in ``num_classes`` of them correct.)

    Args:
        labels: The true labels, in 0 … num_classes - 1.
        share: Share of the labels to replace, from 0 to 1.
        num_classes: Number of classes, at least 2.
        generator: Random generator that chooses the examples and their new labels.

    Raises:
        DataError: the share or a label is out of range.

    >>> spoiled = replace_labels(torch.zeros(10, dtype=torch.long), 0.4, 3, torch.Generator().manual_seed(0))
    >>> spoiled.share, int((spoiled.labels != 0).sum())
    (0.4, 4)
    """
    if not 0 <= share <= 1:
        raise DataError(f"share must lie between 0 and 1, got {share}")
    if num_classes < 2:
        raise DataError(f"num_classes must be at least 2, got {num_classes}")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise DataError(
            f"labels must lie in 0 … {num_classes - 1} for num_classes={num_classes}, "
            f"got {int(labels.min())} … {int(labels.max())}"
        )
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    shift = torch.randint(1, num_classes, (len(chosen),), generator=generator)
    replaced = labels.clone()
    replaced[chosen] = (labels[chosen] + shift) % num_classes
    return ReplacedLabels(replaced, replaced != labels)
