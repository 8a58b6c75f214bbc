"""One step's gradient, computed from a problem's examples: what training, replay and the recorder's check share."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Generator, Tensor, nn

from poprisk._core.autodiff import check_independence
from poprisk.errors import DataError
from poprisk.runs._problem import Problem

Parts = Sequence[tuple[Tensor, Tensor | None]]
"""Micro-batches: indices, and weights of their examples' losses if these are not 1 / (their number)."""


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


def randomness_of(module: nn.Module) -> str | None:
    """Why the module does not map each example by a fixed function of the weights; None if it does."""
    try:
        check_independence(module)
    except DataError as error:
        return str(error)
    return None


def add_gradients(
    problem: Problem, module: nn.Module, parts: Parts, *, generator: Generator | None, loss_scale: float = 1.0
) -> Tensor:
    r"""Backward of :math:`\sum_{parts} \frac1A \mathrm{mean}(\ell)` (or the weighted sum), part by part.

    Returns:
        The loss, not scaled, on the module's device.
    """
    first = next(module.parameters())
    total = torch.zeros((), device=first.device, dtype=first.dtype)
    for indices, weights in parts:
        inputs, targets = problem.batch(indices, generator=generator, dtype=first.dtype)
        outputs = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
        if weights is None:
            loss = problem.batch_loss(outputs, targets)
            loss = loss / len(parts) if len(parts) > 1 else loss
        else:
            loss = problem.batch_loss(outputs, targets, weights.to(first))
        (loss if loss_scale == 1.0 else loss * loss_scale).backward()
        total += loss.detach()
    return total
