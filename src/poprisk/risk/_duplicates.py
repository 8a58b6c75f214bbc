"""Which training examples have exactly the same inputs: they are left out together, or none of them was."""

from hashlib import blake2b

import torch
from jaxtyping import Int
from torch import Tensor

from poprisk._core.autodiff import Inputs


def duplicate_groups(inputs: Inputs) -> Int[Tensor, "n"]:
    """The group of each example: those with equal inputs share one, numbered in order of first appearance.

    Targets do not matter: a model that was trained on the input has seen it, whatever label it had there.

    >>> duplicate_groups(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [-0.0, 0.0], [0.0, 0.0]]))
    tensor([0, 1, 0, 2, 2])
    """
    rows = [_bytes_of_rows(part) for part in (inputs if isinstance(inputs, tuple) else (inputs,))]
    numbers: dict[bytes, int] = {}
    groups = []
    for pieces in zip(*rows, strict=True):
        digest = blake2b(digest_size=16)
        for piece in pieces:
            digest.update(piece)
        groups.append(numbers.setdefault(digest.digest(), len(numbers)))
    return torch.tensor(groups, dtype=torch.long)


def _bytes_of_rows(part: Tensor) -> list[memoryview]:
    """Each example's bytes, with 0 for -0."""
    x = part.detach().reshape(len(part), -1)
    x = (x + 0 if x.is_floating_point() else x).to("cpu").contiguous()
    if not x.numel():
        return [memoryview(b"")] * len(x)
    return [memoryview(row) for row in x.view(torch.uint8).numpy()]  # pyright: ignore[reportArgumentType]


def same_group(groups: Int[Tensor, "n"], examples: Int[Tensor, "m"]) -> list[Int[Tensor, "k"]]:
    """For each of these examples, itself and its duplicates.

    >>> same_group(torch.tensor([0, 1, 0]), torch.tensor([1, 2]))
    [tensor([1]), tensor([0, 2])]
    """
    return [(groups == groups[i]).nonzero().squeeze(1) for i in examples.tolist()]
