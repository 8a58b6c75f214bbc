"""Which training examples an estimate looks at."""

import torch
from jaxtyping import Int
from torch import Tensor

from poprisk.errors import DataError


def choose_examples(
    n: int, examples: int | Int[Tensor, "m"] | None, seed: int, *, most: int | None = None
) -> Int[Tensor, "m"]:
    """Examples by index, or so many drawn at random; by default all of them, up to ``most``.

    Raises:
        DataError: an example that does not exist or comes twice, or a number out of range.

    >>> choose_examples(3, None, seed=0), len(choose_examples(300, None, seed=0, most=20))
    (tensor([0, 1, 2]), 20)
    """
    if isinstance(examples, Tensor):
        chosen = examples.cpu()
        whole = chosen.dim() == 1 and len(chosen) and not chosen.is_floating_point() and chosen.dtype != torch.bool
        if not whole or int(chosen.min()) < 0 or int(chosen.max()) >= n or len(chosen.unique()) != len(chosen):
            raise DataError(
                f"examples must be different indices from 0 to {n - 1}, at least one, got {chosen.tolist()[:8]}"
            )
        return chosen
    count = min(n, most or n) if examples is None else examples
    if not 1 <= count <= n:
        raise DataError(f"examples must be between 1 and the {n} training examples, got {count}")
    if count == n:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:count]
