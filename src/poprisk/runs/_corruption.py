"""Labels replaced at random, with a record of which."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Generator, Tensor

from poprisk.errors import DataError


@dataclass(frozen=True)
class ReplacedLabels:
    """Labels after replacement, and which of them are wrong."""

    labels: Int[Tensor, "examples"]
    wrong: Bool[Tensor, "examples"]

    @property
    def share(self) -> float:
        """The share of labels that really are wrong."""
        return self.wrong.double().mean().item()


def replace_labels(
    labels: Int[Tensor, "examples"], share: float, num_classes: int, generator: Generator
) -> ReplacedLabels:
    """Replace a share of the labels by another class, uniform over the classes that are *not* the true one.

    A replaced label is therefore always wrong, and the share of wrong labels is the share asked for, rounded to a whole
    number of examples. (The other convention, a draw from all classes, leaves one in ``num_classes`` of them right.)

    Args:
        labels: The true labels, in 0 … num_classes - 1.
        share: How many to replace, from 0 to 1.
        num_classes: How many classes there are, at least 2.
        generator: Decides which examples and which labels.

    Raises:
        DataError: the share or a label is out of range.

    >>> spoiled = replace_labels(torch.zeros(10, dtype=torch.long), 0.4, 3, torch.Generator().manual_seed(0))
    >>> spoiled.share, int((spoiled.labels != 0).sum())
    (0.4, 4)
    """
    if not 0 <= share <= 1:
        raise DataError(f"share must lie between 0 and 1, got {share}")
    if num_classes < 2:
        raise DataError(f"num_classes must be at least 2, got {num_classes}: there is no other label to put in")
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
