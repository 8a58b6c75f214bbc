"""Random streams that do not touch: one seed for each purpose."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Int
from torch import Generator, Tensor


def stream(seed: int, purpose: str) -> int:
    """A seed of its own for each purpose, so that no two draws share random numbers.

    >>> stream(0, "weights") != stream(0, "labels"), stream(0, "weights") == stream(0, "weights")
    (True, True)
    """
    return int.from_bytes(hashlib.sha256(f"{purpose}:{seed}".encode()).digest()[:7], "big")


def generator_for(seed: int, purpose: str) -> Generator:
    """A generator that shares no numbers with ``torch.Generator().manual_seed(seed)``, which users draw from.

    Wrong labels, for example, are often put at the first places of ``torch.randperm`` by seed 0.
    """
    return Generator().manual_seed(stream(seed, purpose))


def shuffled(count: int, seed: int, purpose: str) -> Int[Tensor, "count"]:
    """The numbers below ``count`` in random order, by :func:`generator_for`.

    >>> shuffled(5, 0, "folds").sort().values
    tensor([0, 1, 2, 3, 4])
    """
    return torch.randperm(count, generator=generator_for(seed, purpose))


def step_seed(seed: int, step: int) -> int:
    """The seed of one step's random numbers: far from every other step's, and known without those before it.

    >>> step_seed(0, 1) == step_seed(0, 1), step_seed(0, 1) == step_seed(1, 0)
    (True, False)
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:8], "big") >> 1


def step_generator(seed: int, step: int) -> Generator:
    """A generator for one step's augmentation."""
    return Generator().manual_seed(step_seed(seed, step))


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Torch's global random numbers follow from the seed inside the block and go on as before after it."""
    if seed is None:
        yield
        return
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
