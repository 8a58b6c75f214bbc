"""Handwritten digits, 8 x 8 pixels: the 1797 test images of the UCI collection, as scikit-learn ships them."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
    """The digits in an order drawn from the seed: the first ``train_size`` to train on, all the others to test on.

    Raises:
        DataError: fewer than 10 examples to train on or 100 to test on.
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
